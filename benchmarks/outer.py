"""Outer optimizers by number of jobs: objf and WER at equal frames.

    python benchmarks/outer.py sweep RESULTS.jsonl [--epochs 1] [--seeds 0 1 2] [SETTING ...]
    python benchmarks/outer.py table RESULTS.jsonl

`sweep` runs `ngsgd train` on recipe=digits once per cell, with simulated jobs in one process, and
appends a line to RESULTS.jsonl for each.  Finished cells are skipped.  `table` prints mean (lowest
to highest) over the seeds, and the fraction of layer updates that update-norm clipping shortened,
averaged over the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from ngsgd.errors import DivergenceError
from ngsgd.files import read_json_lines
from ngsgd.word_errors import WordErrors

JOBS = (1, 2, 4, 8, 16)
RULES = {
    "gain 1": ["outer.kind=average"],
    "gain sqrt(N)": ["outer.kind=bmuf", "outer.gain=0"],
    "gain N": ["outer.kind=bmuf"],          # outer.gain is set to the number of jobs
    "DiLoCo": ["outer.kind=diloco"],
}
OPTIMIZERS = ("sgd", "ngsgd")


def cells(seeds: list[int]) -> list[dict[str, Any]]:
    """With one job every gain is 1, so this row has one cell."""
    return [{"seed": seed, "num_jobs": num_jobs, "optimizer": optimizer, "rule": rule}
            for seed, num_jobs, optimizer, rule in itertools.product(seeds, JOBS, OPTIMIZERS, RULES)
            if num_jobs > 1 or rule in ("gain 1", "DiLoCo")]


def run(cell: dict[str, Any], cache: Path, settings: list[str]) -> dict[str, Any]:
    """One training run; its last line of events, and the clipping statistics."""
    rule = RULES[cell["rule"]] + ([f"outer.gain={cell['num_jobs']}"] if cell["rule"] == "gain N" else [])
    jobs = [f"schedule.num_jobs_{end}={cell['num_jobs']}" for end in ("initial", "final")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "ngsgd", "train", "--quiet",
                               "cluster=in_process", "tracking.kind=none",
                               "combination.kind=none", f"output_dir={folder}", f"data.cache_dir={cache}", f"seed={cell['seed']}",
                               f"optimizer={cell['optimizer']}", *jobs, *rule, *settings], check=False, stdout=subprocess.DEVNULL)
        if done.returncode == DivergenceError.exit_code:
            return {**cell, "diverged": True}
        done.check_returncode()
        (events,) = Path(folder).glob("*/events.jsonl")
        lines = read_json_lines(events)
    (report,) = [line for line in lines if line["event"] == "finished"]
    steps = [line for line in lines if line["event"] == "outer_iteration"]
    return {**cell, "outer_iters": len(steps), "frames": report["frames_processed"], "valid_objf": report["valid"]["objf"],
            "train_objf": report["train"]["objf"], "wer": WordErrors.of_json(report["test_errors"]).wer,
            "seconds": report["seconds"], "clip": statistics.fmean(step["max_change_share"] for step in steps)}


def sweep(results: Path, seeds: list[int], settings: list[str]) -> None:
    done = {tuple(line[key] for key in ("seed", "num_jobs", "optimizer", "rule")) for line in read_json_lines(results)} \
        if results.exists() else set()
    for cell in cells(seeds):
        if tuple(cell.values()) not in done:
            line = run(cell, results.parent / "outer-data", settings)
            print(line, flush=True)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def table(results: Path) -> None:
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in read_json_lines(results):
        found[line["optimizer"], line["num_jobs"], line["rule"]].append(line)
    print("| optimizer | jobs | outer its | rule | valid objf | %WER, test | clip, % | seeds |\n|---|---|---|---|---|---|---|---|")
    for optimizer, num_jobs, rule in itertools.product(OPTIMIZERS, JOBS, RULES):
        every = found.get((optimizer, num_jobs, rule), [])
        lines = [line for line in every if "diverged" not in line]
        if every and not lines:
            print(f"| {optimizer} | {num_jobs} | | {rule} | diverged | | | {len(every)} |")
        elif lines:
            count = f"{len(lines)} of {len(every)}" if len(every) > len(lines) else str(len(lines))
            clip = 100 * statistics.fmean(line["clip"] for line in lines)
            print(f"| {optimizer} | {num_jobs} | {lines[0]['outer_iters']} | {rule} | {spread(lines, 'valid_objf', 3)} | "
                  f"{spread(lines, 'wer', 2)} | {clip:.0f} | {count} |")


def spread(lines: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [line[key] for line in lines]
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("sweep", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options, settings = parser.parse_known_args()
    if options.command == "table":
        table(options.results)
    else:
        sweep(options.results, options.seeds, ["egs.samples_per_iter=2000", f"schedule.num_epochs={options.epochs}", *settings])


if __name__ == "__main__":
    main()
