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
    outer_iter: int     # where the pass was first planned: with the seed, this and `job` decide the order of its examples
    job: int
    first: int = 0      # minibatches
    stop: int | None = None  # None: to the end of the pass


Fisher = Mapping[str, Mapping[str, Any]]  # name of an estimate to its state, as NumPy arrays and numbers


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
    take: tuple[int, int] | None = (0, 1)   # (fragment, number of fragments) taken in from the model; None: nothing
    fisher: Fisher | None = None            # the Fisher estimates to go on from; None: afresh


@dataclass(frozen=True)
class Job:
    """One SGD run; with the run's seed it decides the result bit for bit, whichever worker runs it."""

    outer_iter: int
    job: int
    attempt: int       # 1 for the first try
    pieces: tuple[WorkItem, ...]
    start: JobInit
    lr: float          # per frame
    lr_factor: float   # lr over the effective learning rate; what is not diluted by averaging, such as l2, is divided by it
    progress: float = 0.0  # share of the data processed before this outer iteration, 0 to 1
    returns: Literal["parameters", "move"] = "parameters"
    send: tuple[int, int] = (0, 1)   # (fragment, number of fragments) that is averaged
    keep_fisher: bool = False        # the Fisher estimates are needed for the job's next start
    keep_own: bool = False           # the whole of the result is needed for the job's next start
    layer_rates: Mapping[str, float] = field(default_factory=dict)  # factors on the rates of layers (optimizer.equalize_layers)

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
    sent: VectorRef                # what is averaged: parameters or move, of the fragment that the job was told to send
    digest: int                    # of `sent`, made by the worker (`ngsgd.training.validation.checksums`)
    num_frames: int
    num_minibatches: int
    objf: float                    # mean per frame while training
    accuracy: float                # 0 to 1
    seconds: float
    max_change_share: float        # of layer updates, 0 to 1
    max_param_change_share: float  # of minibatches, 0 to 1
    num_skipped: int               # minibatches
    own: VectorRef | None = None   # with `keep_own`: what the job's next start is made of
    fisher: Fisher | None = None   # with `keep_fisher`
    rejection_reason: str = ""              # what the worker itself found wrong with `sent`; empty if nothing is
    remainder: tuple[WorkItem, ...] = ()  # what was not processed, because the worker was asked to stop
    health: dict[str, float] = field(default_factory=dict)  # of the Fisher estimates at the end (ngsgd.optim.inspection.figures)
    host: str = ""                 # of a worker on another machine than the coordinator's
    machine: dict[str, float] = field(default_factory=dict)  # the load of that machine at the job's end
    deltas: Deltas | None = None   # norms of the parameter delta, made by the worker from `sent`


@dataclass(frozen=True)
class JobFailure:
    """A job that ended without a result."""

    job: Job
    worker: int
    reason: str                    # how it ended: signal, exit, exception
    worker_died: bool
    error: Exception | None = None  # what the job raised, where the worker lived on
    last_words: str = ""           # the end of what a dead worker wrote to its log
    from_outside: bool = False     # the coordinator killed the worker, or its fork server ended: no evidence against the data


Outcome = JobResult | JobFailure


class ResultsLost(Exception):
    """Results that were reported, but can no longer be read: each is a failure of its job after all."""

    def __init__(self, failures: Sequence[JobFailure]) -> None:
        super().__init__("; ".join(failure.reason for failure in failures))
        self.failures = failures
