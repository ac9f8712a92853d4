"""Time `ngsgd compare` of many synthetic runs: `python -m tests.launcher.reports.many_runs`.

Times depend on the machine, so no test checks them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ngsgd.pipeline.recipes import recipe
from ngsgd.runs import config_file
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import final_report, job, outer_iteration
from tests.launcher.reports.test_report import decode_files

# as many figures as a job of five layers has
_HEALTH = {
    f"affine{layer}/{side}_{what}": 0.123456789012345
    for layer in range(5)
    for side in ("input", "output")
    for what in ("last_e", "effective_rank")
}
_SEEDS = 5


def make_runs(root: Path, count: int) -> list[Path]:
    """Runs of 16 outer iterations with three jobs, five seeds of each setting."""
    runs = []
    for number in range(count):
        run = root / f"run{number}-20260101-000000"
        run.mkdir(parents=True)
        lr = 0.005 * (1 + number // _SEEDS)
        config = recipe("digits", seed=number % _SEEDS, schedule={"lr_initial": lr})
        (run / "config.yaml").write_text(config_file.to_yaml(config))
        log = EventLog(run / "events.jsonl")
        for outer_iter in range(16):
            jobs = tuple(
                replace(job(number=worker, worker=worker), health=_HEALTH) for worker in range(3)
            )
            log.outer_iteration(
                outer_iteration(
                    outer_iter,
                    num_outer_iters=16,
                    jobs=jobs,
                    valid_objf=-2.0 + outer_iter / (9 + number),
                )
            )
        log.finished(replace(final_report(), wer_percent=3.0 + number / 100))
        log.close("FINISHED")
        decode_files(run, 3.0 + number / 100)
        runs.append(run)
    return runs


def main() -> None:
    """Print the seconds of one call."""
    with tempfile.TemporaryDirectory() as folder:
        runs = make_runs(Path(folder), 500)
        size = sum((run / "events.jsonl").stat().st_size for run in runs)
        command = [
            sys.executable,
            "-m",
            "ngsgd.launcher",
            "compare",
            *map(str, runs),
            "-o",
            f"{folder}/page.html",
        ]
        began, used = time.perf_counter(), os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        now = os.times()
        cpu = now.children_user + now.children_system - used.children_user - used.children_system
        print(
            f"{len(runs)} runs, {size / 1e6:.0f} MB of events: {time.perf_counter() - began:.2f} s, CPU {cpu:.2f} s"
        )


if __name__ == "__main__":
    main()
