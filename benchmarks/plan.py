"""Predictions of `ngsgd plan` compared with runs of `ngsgd train` on this machine, interleaved.

    python benchmarks/plan.py [--rounds 3] [--workers 1 2 4] [--clusters local ray] [SETTING ...]

Each round measures with `ngsgd plan` for half a minute before every run.  A row is a run: predicted
and measured mean seconds of an outer iteration (jobs, averaging, checkpoint, diagnostics), and the
ratio; then the medians.  The first outer iteration is skipped, because workers warm up in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from ngsgd.files import read_json_lines

NGSGD = (sys.executable, "-m", "ngsgd")
OUTER_ITERS = 12
PARTS = ("compute_s", "average_s", "checkpoint_s", "diagnostics_s")


def predicted_s(num_workers: int, settings: list[str]) -> float:
    done = subprocess.run([*NGSGD, "plan", "--json", "--workers", str(num_workers), *settings], check=True, capture_output=True)
    seconds: float = json.loads(done.stdout)["rows"][0]["here"]["outer_iter_s"]
    return seconds


def taken_s(num_workers: int, kind: str, output_dir: Path, settings: list[str]) -> float:
    """The mean over the outer iterations after the first."""
    before = set(output_dir.glob("*/events.jsonl"))
    subprocess.run([*NGSGD, "train", "--quiet", f"cluster={kind}", f"cluster.num_workers={num_workers}", *settings], check=True,
                   stdout=subprocess.DEVNULL)
    (events,) = set(output_dir.glob("*/events.jsonl")) - before
    steps = [line for line in read_json_lines(events) if line["event"] == "outer_iteration"]
    return statistics.fmean(sum(step[part] for part in PARTS) for step in steps[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clusters", nargs="+", default=["local", "ray"])
    options, extra = parser.parse_known_args()
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        common = ["tracking.kind=none", f"output_dir={folder}", "data.train_minutes=80", "data.valid_minutes=2",
                  "data.test_minutes=0.5", *extra]
        for _ in range(options.rounds):
            for kind in options.clusters:
                for count in options.workers:
                    # 80 minutes are about 30 jobs of 16000 frames: as many passes as OUTER_ITERS
                    # need
                    settings = [*common, f"schedule.num_epochs={OUTER_ITERS * count / 30:.3f}"]
                    told = predicted_s(count, settings)
                    took = taken_s(count, kind, Path(folder), settings)
                    pairs[kind, count].append((told, took))
                    print(f"{kind} {count} workers: predicted {told:.3f} s, measured {took:.3f} s "
                          f"({took / told - 1:+.1%})", flush=True)
    for (kind, count), found in pairs.items():
        told, took = (statistics.median(values) for values in zip(*found, strict=True))
        off = [took / told - 1 for told, took in found]
        print(f"| {kind} | {count} | {told:.2f} | {took:.2f} | {took / told - 1:+.1%} ({min(off):+.1%} to {max(off):+.1%}) |")


if __name__ == "__main__":
    main()
