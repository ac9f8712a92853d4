"""Records as a coordinator would make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ngsgd.training.records import FinalReport, JobRecord, OuterIterationRecord, SubsetScore
from ngsgd.word_errors import WordErrors


class Printed(NamedTuple):
    """What a command line printed."""

    out: str
    err: str


# words of `ngsgd`, and the exit code that they must have, such as code=2
Command = Callable[..., Printed]
TEST_ERRORS, VALID_ERRORS = WordErrors(1000, 4, 7, 20), WordErrors(500, 2, 3, 9)


def job(*, number: int = 0, worker: int = 0, objf: float = -1.8, accepted: bool = True) -> JobRecord:
    reason = "" if accepted else "diverged"
    return JobRecord(number, worker, 1, 16000, 125, objf, 0.5, 2.0, 0.12, 0.01, 0, accepted, reason)


def outer_iteration(outer_iter: int = 11, *, num_outer_iters: int = 40, jobs: tuple[JobRecord, ...] = (),
                    left_s: float = 80.0, valid_objf: float = -1.92) -> OuterIterationRecord:
    jobs = jobs or (job(), job(number=1, worker=1))
    return OuterIterationRecord(
        outer_iter, num_outer_iters, len(jobs), sum(one.accepted for one in jobs),
        4.0 * (outer_iter + 1) / num_outer_iters, 4.0, 32000 * (outer_iter + 1),
        0.0021, 0.0042, 1.0, SubsetScore(-1.79, 0.6), SubsetScore(valid_objf, 0.612), jobs,
        {"layers.0.affine": 0.1}, 2.0, 0.01, 0.02, 0.05, 24.0, left_s)


def final_report() -> FinalReport:
    return FinalReport(TEST_ERRORS, VALID_ERRORS, SubsetScore(-1.0, 0.7), SubsetScore(-1.1, 0.6), 1280000, 75.0,
                       {"run folder": "/r/x"})
