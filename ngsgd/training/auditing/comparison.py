"""Comparison of two results of the same job: bitwise, or with a tolerance.

Workers with equal numeric fingerprints compute bitwise identical results, so a single wrong bit is
found. Results of different processors, versions or kernels, and results of GPUs, agree only up to
rounding, which training amplifies. Of these the objective and the norm of the parameter delta are
compared with `TOLERANCE`, so only large faults are found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np

from ngsgd.training.auditing.pool import WorkerIdentity
from ngsgd.training.job import Fisher, JobResult
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import part_of_initial_parameters

# Largest relative difference of two objectives, or of the norms of two parameter deltas. The vector
# instructions of one processor (AVX-512, AVX2, none) give values that differ by up to 0.08 %
# (docs/silent-corruption.md). The parameters themselves differ by 0.0006 % late in training and by
# more than half of their change in the first job, whose learning rate is high: no tolerance on them
# separates rounding from faults.
TOLERANCE = 0.02
# smallest objective to which a difference is relative
SMALLEST_OBJECTIVE = 0.01


# compared by identity: arrays have no truth value
@dataclass(frozen=True, eq=False)
class Run:
    """One run of a job."""

    worker: int
    identity: WorkerIdentity
    result: JobResult
    # digests of everything that the result contributes to the run
    digests: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, result: JobResult, identity: WorkerIdentity) -> Run:
        return cls(result.worker, identity, result, digests_of(result))


def digests_of(result: JobResult) -> tuple[str, ...]:
    """Digests of the vector to average and of all other values that depend on the arithmetic."""
    own = ""
    if result.own is not None and result.own is not result.sent and result.own.is_here:
        own = f"{digest(result.own.read()):016x}"
    # repr: NaN equals NaN
    return (f"{result.digest:016x}", own, _digest_of_fisher(result.fisher), repr(result.objf), str(result.num_frames),
            str(result.num_minibatches))


def _digest_of_fisher(fisher: Fisher | None) -> str:
    if fisher is None:
        return ""
    found = hashlib.blake2b(digest_size=8)
    for name, state in sorted(fisher.items()):
        for key, value in sorted(state.items()):
            found.update(f"{name}/{key}".encode())
            found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def is_bitwise(one: Run, other: Run) -> bool:
    """Whether the results of these workers must be bitwise identical."""
    return (one.identity.is_reproducible and other.identity.is_reproducible
            and one.identity.bits == other.identity.bits)


@dataclass(frozen=True)
class Comparison:
    """Whether two runs of a job agree."""

    layout: FlatLayout

    def agree(self, one: Run, other: Run) -> bool:
        if one.digests == other.digests:
            return True
        return not is_bitwise(one, other) and self.distance(one.result, other.result) <= TOLERANCE

    def distance(self, one: JobResult, other: JobResult) -> float:
        """Larger relative difference: of the objectives, or of the norms of the deltas."""
        if one.num_minibatches != other.num_minibatches:
            return float("inf")
        objectives = abs(one.objf - other.objf) / max(abs(one.objf), abs(other.objf), SMALLEST_OBJECTIVE)
        mine, theirs = self._norm(one), self._norm(other)
        found = max(objectives, abs(mine - theirs) / max(mine, theirs, 1e-30))
        # max() ignores NaN in its second argument
        return found if np.isfinite([objectives, mine, theirs]).all() else float("inf")

    def _norm(self, result: JobResult) -> float:
        """Norm of the change of the parameters that a job sends."""
        sent, total = result.sent.read(), 0.0
        start = None if result.job.returns == "move" else part_of_initial_parameters(result.job.start, self.layout)
        for source, target in self.layout.fragment(*result.job.send):
            change = (sent[target] if start is None else sent[target] - start(source)).astype(np.float64)
            total += float(np.dot(change, change))
        return float(np.sqrt(total))


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
