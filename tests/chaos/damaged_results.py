"""Real training runs in which one result of 24 is damaged before its checksum is made.

Prints word error rates, with the checks of results and without them.

python -m tests.chaos.damaged_results [--without-checks] [--only NAME ...] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ngsgd.files import read_json_lines
from ngsgd.launcher.commands.train import train
from ngsgd.launcher.config import compose
from ngsgd.tasks.frames import schedule_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobResult
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.validation.held_out_check import HeldOutCheck
from ngsgd.training.worker import Worker

SMALL = [
    "cluster=in_process",
    "cluster.num_workers=24",
    "cluster.threads_per_worker=1",
    "egs.samples_per_iter=4000",
    "data.train_minutes=40",
    "tracking.kind=none",
]
JOB = 7


def flip(vector: Vector) -> None:
    vector.view(np.uint32)[len(vector) // 3] ^= np.uint32(1 << 30)


DAMAGES: dict[str, Any] = {
    "none": lambda vector: None,
    "exponent bit 30 of one parameter": flip,
    "all times 2^60": lambda vector: np.multiply(vector, np.float32(2.0**60), out=vector),
    "all signs": lambda vector: np.negative(vector, out=vector),
    "noise of sigma 0.3": lambda vector: np.add(
        vector,
        np.random.default_rng(0).normal(0.0, 0.3, len(vector)).astype(np.float32),
        out=vector,
    ),
    "zeros": lambda vector: vector.fill(0.0),
}


class _Damaging(Worker):
    """Damages what job 7 of the last outer iteration ended with."""

    name = "none"

    def __init__(self, spec: SpeechTaskSpec, index: int) -> None:
        super().__init__(spec, index)
        self._last = schedule_of(spec.config, spec.shards()).num_outer_iters - 1

    def _result(self, job: Job, *rest: Any) -> JobResult:
        if (job.outer_iter, job.job) == (self._last, JOB):
            vector = self.layout.flatten(self.model.state_dict())
            DAMAGES[self.name](vector)
            self.layout.load(self.model, vector)
        return super()._result(job, *rest)


def _without_checks() -> contextlib.ExitStack:
    """Averages whatever is finite, as long as this is open."""
    changes = contextlib.ExitStack()
    changes.enter_context(patch("ngsgd.training.worker.measure", return_value=None))
    changes.enter_context(patch.object(HeldOutCheck, "is_suspect", return_value=False))
    changes.enter_context(patch.object(HeldOutCheck, "failure", return_value=""))
    return changes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-checks", action="store_true", help="average whatever is finite")
    parser.add_argument("--only", nargs="*", choices=DAMAGES, default=list(DAMAGES), help="damages")
    parser.add_argument("overrides", nargs="*", help="further settings of the runs")
    arguments = parser.parse_args()
    settings = [*SMALL, *arguments.overrides]
    with (_without_checks() if arguments.without_checks else contextlib.ExitStack(),
          patch("ngsgd.cluster.pool.Worker", _Damaging)):
        for _Damaging.name in arguments.only:
            report = train(compose.compose(settings), quiet=True)
            events = read_json_lines(Path(report.files["events"]))
            reasons = [job["reason"] for event in events for job in event.get("jobs", ())
                       if job["reason"]]
            assert report.test_errors
            print(f"{_Damaging.name}: WER {report.test_errors.wer:.1f} %, "
                  f"rejected: {'; '.join(reasons) or 'none'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
