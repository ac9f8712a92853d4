"""Comparison of two results of the same job: bitwise, or with a tolerance.

Workers with equal numeric fingerprints compute bitwise identical results, so a single wrong bit is
found. Results of different processors, versions or kernels, and results of GPUs, agree only up to
rounding. Their parameter deltas are compared with `TOLERANCE`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from ngsgd.training.auditing.pool import WorkerIdentity
from ngsgd.training.job import Fisher, JobResult
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import part_of_initial_parameters

# Largest distance of two parameter deltas, as a fraction of the larger one. Rounding differs by
# 1e-7 per operation, and training amplifies it with each minibatch: the vector instructions of one
# processor (AVX-512, AVX2, none) give deltas that differ by up to 2e-4 after 100 minibatches and
# 3e-3 after 1,000 (docs/silent-corruption.md). A fault that matters changes a delta by more.
TOLERANCE = 0.02


@dataclass(frozen=True)
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
        """Norm of the difference of two parameter deltas as a fraction of the larger one."""
        if one.num_minibatches != other.num_minibatches:
            return float("inf")
        x, y = one.sent.read(), other.sent.read()
        start = _zeros if one.job.returns == "move" else part_of_initial_parameters(one.job.start, self.layout)
        apart, largest = 0.0, np.zeros(2)
        for source, target in self.layout.fragment(*one.job.send):
            before, mine, theirs = start(source), x[target], y[target]
            apart += _square(mine - theirs)
            largest += (_square(mine - before), _square(theirs - before))
        found = float(np.sqrt(apart / max(float(largest.max()), 1e-300)))
        return found if np.isfinite(found) else float("inf")


def _zeros(part: slice) -> Vector:
    return np.zeros(part.stop - part.start, np.float32)


def _square(vector: Vector) -> float:
    return float(np.dot(vector, vector))
