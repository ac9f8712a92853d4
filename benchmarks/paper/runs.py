"""Run cells without a result, and store each result as one line of JSON."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paper.cells import TASKS, Cell, grid
from ngsgd.errors import DivergenceError
from ngsgd.files import read_json_lines
from ngsgd.word_errors import WordErrors

RESULTS = Path(__file__).parent / "results"
_POINTS = 60   # points of a learning curve that are kept

Line = dict[str, Any]


def known(task: str) -> dict[str, Line]:
    """Results so far, by the cells' keys."""
    path, found = RESULTS / f"{task}.jsonl", dict[str, Line]()
    for line in read_json_lines(path) if path.exists() else []:
        if "valid_wer" in line:
            line["valid_wer_percent"] = float(line["valid_wer"].split()[1])
        found[line["key"]] = line
    return found


def best_rates(task: str, methods: tuple[str, ...]) -> dict[str, float]:
    """The best rates by validation objf, of the methods that have been searched."""
    found = {method: _best(task, grid(task, (method,))) for method in methods}
    return {method: rate for method, rate in found.items() if rate is not None}


def best_synchronous_rate(task: str, outer: str, num_jobs: int, method: str) -> float | None:
    """The same for the synchronous baselines, of all rates that ran with seed 0."""
    return _best(task, (Cell(task, method, outer, num_jobs, 0, line["rate"]) for line in known(task).values()
                        if (line["method"], line["outer"], line["num_jobs"], line["seed"]) == (method, outer, num_jobs, 0)))


def _best(task: str, cells: Iterable[Cell]) -> float | None:
    done = known(task)
    finished = [line for cell in cells if (line := done.get(cell.key())) and "diverged" not in line]
    return float(max(finished, key=lambda line: line["valid_objf"])["rate"]) if finished else None


def run_all(cells: Iterable[Cell], work: Path, source: str) -> None:
    """Run missing cells one after another; Ctrl-C loses only the current run."""
    for cell in cells:
        if cell.key() in known(cell.task):
            continue
        line = {"key": cell.key(), **asdict(cell), "commit": commit(), **run(cell, work, source)}
        print({name: value for name, value in line.items() if name != "curve"}, flush=True)
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{cell.task}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run(cell: Cell, work: Path, source: str, also: tuple[str, ...] = ()) -> Line:
    """Train and decode; `also` contains settings that override the cell's."""
    with trained(cell, work, source, f"tracking.uri=sqlite:///{work / 'mlflow.db'}", *also) as events:
        if events is None:
            return {"diverged": True}
        return _summary(read_json_lines(events), json.loads((events.parent / "decode" / "wer.json").read_text(encoding="utf-8")))


@contextmanager
def trained(cell: Cell, work: Path, source: str, *also: str) -> Iterator[Path | None]:
    """The events of a run, None if it diverged; its folder is deleted in the end."""
    folder = work / cell.key()
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"data.source={source}"] if TASKS[cell.task].needs_source else []
    done = subprocess.run([sys.executable, "-m", "ngsgd", "train", "--quiet", *cell.settings(), *words, *also,
                           f"output_dir={folder}", f"data.cache_dir={work / 'data'}"], check=False, stdout=subprocess.DEVNULL)
    try:
        if done.returncode == DivergenceError.exit_code:
            yield None
            return
        done.check_returncode()
        (events,) = folder.glob("*/events.jsonl")
        yield events
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outer_iterations(events: list[Line]) -> list[Line]:
    return [event for event in events if event["event"] == "outer_iteration"]


def _summary(events: list[Line], wer: Line) -> Line:
    steps = outer_iterations(events)
    (report,) = [event for event in events if event["event"] == "finished"]
    test, valid = (WordErrors.of_json(report[name]) for name in ("test_errors", "valid_errors"))
    kept = steps[::max(1, len(steps) // _POINTS)]
    kept += steps[-1:] if kept[-1] is not steps[-1] else []
    return {"frames": report["frames_processed"], "outer_iters": len(steps),
            "train_objf": round(report["train"]["objf"], 5), "valid_objf": round(report["valid"]["objf"], 5),
            "valid_accuracy": report["valid"]["accuracy"], "wer": str(test), "wer_percent": test.wer,
            "valid_wer": str(valid), "interval": wer["test_interval_95"],
            "average_s": round(statistics.median(step["average_s"] for step in steps), 4),
            "clipped": round(statistics.fmean(step["max_change_share"] for step in steps), 4),
            "curve": [[step["frames_processed"], round(step["train"]["objf"], 4), round(step["valid"]["objf"], 4)]
                      for step in kept]}


def commit() -> str:
    """Return the short hash of the current commit."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True,
                          check=True).stdout.strip()
