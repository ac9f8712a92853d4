"""Comparison of two results of the same job: bitwise, or with a tolerance.

Workers with equal numeric fingerprints compute bitwise identical results, so a single wrong bit is
found. Results of different processors, versions or kernels, and results of GPUs, agree only up to
rounding, which training amplifies. Of these the objective and the norm of the parameter delta are
compared with `TOLERANCE`, so only large faults are found.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from ngsgd.training.auditing.pool import WorkerIdentity
from ngsgd.training.job import JobResult
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
    digests: tuple[str, ...]


def digests_of(result: JobResult) -> tuple[str, ...]:
    """Digests of the vector to average and of all other values that depend on the arithmetic."""
    own = ""
    if result.own is not None and result.own is not result.sent and result.own.is_here:
        own = f"{digest(result.own.read()):016x}"
    of_fisher = hashlib.blake2b(digest_size=8)
    for name, state in sorted((result.fisher or {}).items()):
        for key, value in sorted(state.items()):
            of_fisher.update(f"{name}/{key}".encode())
            of_fisher.update(np.ascontiguousarray(value).tobytes())
    # repr: NaN equals NaN
    return (f"{result.digest:016x}", own, "" if result.fisher is None else of_fisher.hexdigest(),
            repr(result.objf), str(result.num_frames), str(result.num_minibatches))


def is_bitwise(one: Run, other: Run) -> bool:
    """Whether the results of these workers must be bitwise identical."""
    return one.identity.is_reproducible and other.identity.is_reproducible and one.identity.bits == other.identity.bits


def agree(layout: FlatLayout, one: Run, other: Run) -> bool:
    """Whether two runs of a job agree."""
    if one.digests == other.digests:
        return True
    mine, theirs = one.result, other.result
    if is_bitwise(one, other) or mine.num_minibatches != theirs.num_minibatches:
        return False
    norms = _norm(mine, layout), _norm(theirs, layout)
    largest = max(abs(mine.objf), abs(theirs.objf), SMALLEST_OBJECTIVE)
    objectives = abs(mine.objf - theirs.objf) / largest
    # NaN is not less
    return (objectives <= TOLERANCE and all(map(math.isfinite, norms))
            and abs(norms[0] - norms[1]) / max(*norms, 1e-30) <= TOLERANCE)


def _norm(result: JobResult, layout: FlatLayout) -> float:
    """Norm of the change of the parameters that a job sends."""
    sent, total = result.sent.read(), 0.0
    is_move = result.job.returns == "move"
    start = None if is_move else part_of_initial_parameters(result.job.start, layout)
    for source, target in layout.fragment(*result.job.send):
        change = (sent[target] - start(source) if start else sent[target]).astype(np.float64)
        total += float(np.dot(change, change))
    return float(np.sqrt(total))


# workers that are asked before each of them repeats the job
_MAX_WORKERS = 3

Outcome = Literal["agreed", "decided", "ask_other", "ask_again", "alone", "undecided", "not_reproducible"]


class Verdict(NamedTuple):
    """A verdict; `right` and `faulty` belong to "agreed" and "decided", `again` to "ask_again"."""

    outcome: Outcome
    right: tuple[Run, ...] = ()
    # workers
    faulty: tuple[int, ...] = ()
    # workers whose second run is needed
    again: tuple[int, ...] = ()


def verdict(runs: Sequence[Run], agree: Callable[[Run, Run], bool], *, others: bool) -> Verdict:
    """Judge the runs of a job; `others`: whether a worker without a run can be asked."""
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
