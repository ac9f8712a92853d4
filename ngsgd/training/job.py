"""Messages between coordinator and workers: jobs, results and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ngsgd.errors import FailureKind, failure_kind
from ngsgd.ops.compression import Codec, Encoded
from ngsgd.schedules import Shard
from ngsgd.training.parameter_deltas import Deltas, Exact
from ngsgd.training.parameter_vector import Vector


class VectorRef(Protocol):
    """Small reference to a parameter vector that coordinator and workers can read."""

    @property
    def is_here(self) -> bool:
        """Whether the process of the coordinator can read the vector without network transfer."""

    def read(self) -> Vector:
        """Return the vector, read-only; no copy if the memory is shared."""


@dataclass(frozen=True)
class LocalRef:
    """A vector in this process."""

    vector: Vector
    is_here = True

    def read(self) -> Vector:
        return self.vector


@dataclass(frozen=True)
class WorkItem:
    """A range of minibatches of one pass over an archive, in the order of its first plan."""

    shard: Shard
    # outer iteration that first planned the pass: it determines the examples' order
    outer_iter: int
    job: int
    first: int = 0      # first minibatch
    # index after the last minibatch; None: to the end of the pass
    stop: int | None = None


# name of an estimate -> its state, as NumPy arrays and numbers
Fisher = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class JobInit:
    """Initial parameters of a job, before its first minibatch.

    By default the broadcast model. With the previous result x of the job slot (streaming): mix x +
    (1 - mix) model in the fragment that is merged, x elsewhere. With the previous parameter delta m
    of the slot (overlapped averaging): model + m, since the model is one outer iteration old and
    does not contain m yet.

    With compression, x is the vector that the previous job of the slot encoded: its delta and the
    error before it. The job starts from the model + the error that is left, so a worker continues
    from its own training that the others do not have yet.
    """

    model: VectorRef
    own: VectorRef | None = None
    own_is_move: bool = False
    mix: float = 0.0
    # (fragment, number of fragments) merged from the model; None: no fragment
    take: tuple[int, int] | None = (0, 1)
    # Fisher estimates to continue from; None: new estimates
    fisher: Fisher | None = None
    # compression of the parameter delta; None: none
    codec: Codec | None = None


@dataclass(frozen=True)
class Job:
    """One SGD run; with the seed of the run it determines the result bitwise, on any worker."""

    outer_iter: int
    job: int
    # 1 for the first try
    attempt: int
    pieces: tuple[WorkItem, ...]
    start: JobInit
    lr: float          # per frame
    # lr over the effective lr; terms that averaging does not dilute, such as l2, are divided by it
    lr_factor: float
    # fraction of the data processed before this outer iteration, 0 to 1
    progress: float = 0.0
    returns: Literal["parameters", "move"] = "parameters"
    # (fragment, number of fragments) that is averaged
    send: tuple[int, int] = (0, 1)
    # whether the next start of this job needs the Fisher estimates
    keep_fisher: bool = False
    # whether the next start of this job needs the complete result
    keep_own: bool = False
    # names of examples to omit (failure.on_bad_batch=quarantine)
    excluded: tuple[str, ...] = ()
    # work items that the worker probably processes next; a hint without effect on results
    upcoming: tuple[WorkItem, ...] = ()
    # number of a repetition for the audit, which is not averaged; 0: none
    repeat: int = 0
    # number of the plan in this process; an outer iteration that is repeated has another one
    plan: int = 0

    @property
    def identity(self) -> tuple[int, int, int]:
        """(outer iteration, job, attempt): unique within a plan; negative for repetitions."""
        return self.outer_iter, self.job, -self.repeat or self.attempt

    @property
    def num_vectors(self) -> int:
        """Vectors that a result contains: the one to average, and `own` if it is another one."""
        return 1 + (self.keep_own and (self.send != (0, 1) or self.start.codec is not None))

    @property
    def shard(self) -> Shard:
        """The first shard; most jobs have only one."""
        return self.pieces[0].shard


@dataclass(frozen=True)
class BadBatch:
    """A minibatch with a non-finite loss or gradient, which changed no parameter."""

    shard: Shard
    # of the pass over the shard, from 0
    number: int
    reason: str
    # utterance ids or indices of the examples at fault; empty if the task does not name examples
    examples: tuple[str, ...] = ()
    # fraction of the rows of the minibatch that are at fault; 1 if it is not known
    share: float = 1.0


@dataclass(frozen=True)
class JobResult:
    """The result of a finished job."""

    job: Job
    worker: int
    # vector to average: parameters or delta, of the fragment that the job sends
    sent: VectorRef
    # checksum of `sent`, computed by the worker (`ngsgd.training.validation.checksums`)
    digest: int
    num_frames: int
    num_minibatches: int
    # mean per frame during training
    objf: float
    accuracy: float                # 0 to 1
    seconds: float
    # fraction of layer updates clipped, 0 to 1
    max_change_share: float
    max_param_change_share: float  # fraction of minibatches clipped, 0 to 1
    num_skipped: int               # minibatches
    # with `keep_own`: input of the next start of this job
    own: VectorRef | None = None
    # with a codec: the compressed delta that `sent` was computed from
    encoded: Encoded | None = None
    # elements of the delta that are not compressed
    exact: Exact = ()
    fisher: Fisher | None = None   # with `keep_fisher`
    # problem in `sent` found by the worker; empty if none
    rejection_reason: str = ""
    # work that was not processed, because the worker was asked to stop
    remainder: tuple[WorkItem, ...] = ()
    # diagnostics of the Fisher estimates at the end (ngsgd.optim.inspection.figures)
    health: dict[str, float] = field(default_factory=dict)
    # host name of a worker on another machine than the coordinator
    host: str = ""
    # load of that machine at the end of the job
    machine: dict[str, float] = field(default_factory=dict)
    # norms of the parameter delta, computed by the worker from `sent`
    deltas: Deltas | None = None
    bad_batches: tuple[BadBatch, ...] = ()
    # minibatches of earlier attempts that this one continued; 0: it started at the beginning
    continued_at: int = 0


@dataclass(frozen=True)
class JobFailure:
    """A job that ended without a result."""

    job: Job
    worker: int
    # how it ended: signal, exit, exception
    reason: str
    worker_died: bool
    # exception of the job, if the worker survived
    error: Exception | None = None
    # last log lines of a dead worker
    last_words: str = ""
    # the coordinator killed the worker, or its fork server ended: no evidence against the data
    from_outside: bool = False
    kind: FailureKind = FailureKind.UNKNOWN

    @classmethod
    def of_error(cls, job: Job, worker: int, error: Exception) -> JobFailure:
        """The failure of a job that raised an exception; its worker lives."""
        name = type(error).__name__
        return cls(job, worker, f"{name}: {error}", False, error, kind=failure_kind(name, str(error)))


Outcome = JobResult | JobFailure


class ResultsLost(Exception):
    """Reported results can no longer be read; each counts as a failure of its job."""

    def __init__(self, failures: Sequence[JobFailure]) -> None:
        super().__init__("; ".join(failure.reason for failure in failures))
        self.failures = failures
