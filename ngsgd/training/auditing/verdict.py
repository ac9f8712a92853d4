"""The verdict on the runs of one job: which workers are right, or which run is needed next.

    1. Two workers that agree are right, and every worker that differs from them is at fault.
    2. If they differ, a run on a third worker decides.
    3. Without an agreement among three workers, or without a third worker, each of them repeats the
       job. A worker whose two runs differ is at fault if another one agrees with itself. If no
       worker agrees with itself, the training is not reproducible, and no worker is at fault. If
       several agree with themselves, nothing decides between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from ngsgd.training.auditing.comparison import Run

# workers that are asked before each of them repeats the job
_MAX_WORKERS = 3

Outcome = Literal["agreed", "decided", "ask_other", "ask_again", "alone", "undecided", "not_reproducible"]


@dataclass(frozen=True)
class Verdict:
    """A verdict; `right` and `faulty` belong to "agreed" and "decided", `again` to "ask_again"."""

    outcome: Outcome
    right: tuple[Run, ...] = ()
    # workers
    faulty: tuple[int, ...] = ()
    # workers whose second run is needed
    again: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.outcome in ("ask_other", "ask_again")


def verdict(runs: Sequence[Run], agree: Callable[[Run, Run], bool], *, others: bool) -> Verdict:
    """Judge the runs of a job.

    Args:
        runs: at least one run.
        agree: comparison of two runs.
        others: whether a worker without a run can be asked.
    """
    workers = list(dict.fromkeys(run.worker for run in runs))
    for one, other in combinations(runs, 2):
        if one.worker != other.worker and agree(one, other):
            return _decided(runs, [run for run in runs if run in (one, other) or agree(one, run)])
    if others and len(workers) < _MAX_WORKERS:
        return Verdict("ask_other")
    if len(workers) == 1:
        return Verdict("alone")
    if again := tuple(worker for worker in workers if sum(run.worker == worker for run in runs) < 2):
        return Verdict("ask_again", again=again)
    consistent = [one for one, other in combinations(runs, 2) if one.worker == other.worker and agree(one, other)]
    if len(consistent) == 1:
        return _decided(runs, [run for run in runs if run.worker == consistent[0].worker])
    return Verdict("undecided" if consistent else "not_reproducible")


def _decided(runs: Sequence[Run], right: Sequence[Run]) -> Verdict:
    faulty = tuple(dict.fromkeys(run.worker for run in runs if run not in right))
    return Verdict("decided" if faulty else "agreed", tuple(right), faulty)
