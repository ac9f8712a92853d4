"""What the coordinator sends to a worker and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from ngsgd.config import RunConfig
from ngsgd.schedules import Shard
from ngsgd.training.flat import Vector


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs to know before its first job."""

    config: RunConfig
    egs_directory: str


@dataclass(frozen=True)
class Job:
    """One SGD run over one shard; with the run's seed it decides the result bit for bit, whichever worker runs it."""

    outer_iter: int
    job: int
    attempt: int       # 1 for the first try
    shard: Shard
    lr: float          # per frame
    num_jobs: int
    progress: float = 0.0  # share of the data processed before this outer iteration, 0 to 1


@dataclass(frozen=True)
class JobResult:
    """A finished job."""

    job: Job
    worker: int
    parameters: Vector
    num_frames: int
    num_minibatches: int
    objf: float                    # mean per frame while training
    accuracy: float                # 0 to 1
    seconds: float
    max_change_share: float        # of layer updates, 0 to 1
    max_param_change_share: float  # of minibatches, 0 to 1
    num_skipped: int               # minibatches
    health: dict[str, float]       # of the Fisher estimates at the end (ngsgd.optim.inspection.figures)


@dataclass(frozen=True)
class JobFailure:
    """A job that ended without a result."""

    job: Job
    worker: int
    reason: str                    # how it ended: signal, exit, exception
    worker_died: bool
    error: Exception | None = None  # what the job raised, where the worker lived on
