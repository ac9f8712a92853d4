"""What the coordinator sends to a worker and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ngsgd.schedules import Shard
from ngsgd.training.parameter_deltas import Deltas
from ngsgd.training.parameter_vector import Vector


class VectorRef(Protocol):
    """A parameter vector that lies where coordinator and workers can reach it; the reference itself is small."""

    @property
    def is_here(self) -> bool:
        """Whether reading it in the coordinator's process moves nothing over a network."""

    def read(self) -> Vector:
        """The vector, for reading only; no copy where the memory is shared."""


@dataclass(frozen=True)
class LocalRef:
    """A vector in this very process."""

    vector: Vector
    is_here = True

    def read(self) -> Vector:
        return self.vector


@dataclass(frozen=True)
class WorkItem:
    """A run of minibatches of one pass over an archive, in the order that the pass's first plan gave it."""

    shard: Shard
    # where the pass was first planned: with the seed, this and `job` decide the order of its
    # examples
    outer_iter: int
    job: int
    first: int = 0      # minibatches
    # None: to the end of the pass
    stop: int | None = None


# name of an estimate to its state, as NumPy arrays and numbers
Fisher = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class JobInit:
    """What a job's parameters are before its first minibatch.

    Plain: the broadcast model.  With the job's own last result x (streaming): mix x + (1 - mix) model
    in the fragment that is taken in, x elsewhere.  With its own last move m (overlapped averaging): model + m, since the
    model is one outer iteration old and does not hold that move yet.
    """

    model: VectorRef
    own: VectorRef | None = None
    own_is_move: bool = False
    mix: float = 0.0
    # (fragment, number of fragments) taken in from the model; None: nothing
    take: tuple[int, int] | None = (0, 1)
    # the Fisher estimates to go on from; None: afresh
    fisher: Fisher | None = None


@dataclass(frozen=True)
class Job:
    """One SGD run; with the run's seed it decides the result bit for bit, whichever worker runs it."""

    outer_iter: int
    job: int
    # 1 for the first try
    attempt: int
    pieces: tuple[WorkItem, ...]
    start: JobInit
    lr: float          # per frame
    # lr over the effective learning rate; what is not diluted by averaging, such as l2, is divided
    # by it
    lr_factor: float
    # share of the data processed before this outer iteration, 0 to 1
    progress: float = 0.0
    returns: Literal["parameters", "move"] = "parameters"
    # (fragment, number of fragments) that is averaged
    send: tuple[int, int] = (0, 1)
    # the Fisher estimates are needed for the job's next start
    keep_fisher: bool = False
    # the whole of the result is needed for the job's next start
    keep_own: bool = False
    # factors on the rates of layers (optimizer.equalize_layers)
    layer_rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[int, int, int]:
        """(outer iteration, job, attempt): no two tries of a run share it."""
        return self.outer_iter, self.job, self.attempt

    @property
    def shard(self) -> Shard:
        """The first one; most jobs have no other."""
        return self.pieces[0].shard


@dataclass(frozen=True)
class JobResult:
    """A finished job."""

    job: Job
    worker: int
    # what is averaged: parameters or move, of the fragment that the job was told to send
    sent: VectorRef
    # of `sent`, made by the worker (`ngsgd.training.validation.checksums`)
    digest: int
    num_frames: int
    num_minibatches: int
    # mean per frame while training
    objf: float
    accuracy: float                # 0 to 1
    seconds: float
    # of layer updates, 0 to 1
    max_change_share: float
    max_param_change_share: float  # of minibatches, 0 to 1
    num_skipped: int               # minibatches
    # with `keep_own`: what the job's next start is made of
    own: VectorRef | None = None
    fisher: Fisher | None = None   # with `keep_fisher`
    # what the worker itself found wrong with `sent`; empty if nothing is
    rejection_reason: str = ""
    # what was not processed, because the worker was asked to stop
    remainder: tuple[WorkItem, ...] = ()
    # of the Fisher estimates at the end (ngsgd.optim.inspection.figures)
    health: dict[str, float] = field(default_factory=dict)
    # of a worker on another machine than the coordinator's
    host: str = ""
    # the load of that machine at the job's end
    machine: dict[str, float] = field(default_factory=dict)
    # norms of the parameter delta, made by the worker from `sent`
    deltas: Deltas | None = None


@dataclass(frozen=True)
class JobFailure:
    """A job that ended without a result."""

    job: Job
    worker: int
    # how it ended: signal, exit, exception
    reason: str
    worker_died: bool
    # what the job raised, where the worker lived on
    error: Exception | None = None
    # the end of what a dead worker wrote to its log
    last_words: str = ""
    # the coordinator killed the worker, or its fork server ended: no evidence against the data
    from_outside: bool = False


Outcome = JobResult | JobFailure


class ResultsLost(Exception):
    """Results that were reported, but can no longer be read: each is a failure of its job after all."""

    def __init__(self, failures: Sequence[JobFailure]) -> None:
        super().__init__("; ".join(failure.reason for failure in failures))
        self.failures = failures
