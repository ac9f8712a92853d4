"""Records of a run: plain numbers for log lines, charts and JSON files.

Objective functions (objf) are per frame; higher is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from ngsgd.word_errors import WordErrors


@dataclass(frozen=True)
class JobRecord:
    """The outcome of one job of one outer iteration."""

    # 0-based within the outer iteration
    job: int
    # worker slot that ran the job; unchanged when the worker process is replaced
    worker: int
    # 1 for the first try
    attempt: int
    num_frames: int
    num_minibatches: int
    # mean over the job during training, nats per frame
    objf: float
    # frame accuracy, 0 to 1
    accuracy: float
    # from the first minibatch to the last
    seconds: float
    # fraction of layer updates clipped by max_change, 0 to 1
    max_change_share: float
    # fraction of minibatches whose update was clipped by max_param_change, 0 to 1
    max_param_change_share: float
    # minibatches skipped because a gradient was not finite
    num_skipped: int
    accepted: bool
    # reason of the rejection; empty when accepted
    reason: str
    # diagnostics of the Fisher estimates at the end of the job, by layer and side
    health: dict[str, float] = field(default_factory=dict)
    # arrival time of the result, on the clock of OuterIterationRecord.elapsed_s
    ended_s: float = 0.0
    # host name of a worker on another machine than the coordinator
    host: str = ""
    # load of that machine at the end of the job
    machine: dict[str, float] = field(default_factory=dict)
    # examples of minibatches with a non-finite loss or gradient -> reason
    bad_examples: dict[str, str] = field(default_factory=dict)
    # minibatches of earlier attempts that this one continued; 0: it started at the beginning
    continued_at: int = 0


@dataclass(frozen=True)
class SubsetScore:
    """Score of the model on a fixed subset of frames."""

    objf: float                # nats per frame
    # frame accuracy, 0 to 1
    accuracy: float


@dataclass(frozen=True)
class OuterIterationRecord:
    """One committed outer iteration."""

    outer_iter: int            # 0-based
    num_outer_iters: int
    num_jobs: int              # planned
    num_accepted: int
    # passes over the data completed after this outer iteration, in epochs
    epoch: float
    num_epochs: float
    # total over all accepted jobs since the start of the run; the x axis of every chart
    frames_processed: int
    effective_lr: float        # per frame
    # learning rate of each job, per frame
    lr: float
    # gain of the outer optimizer: lr is effective_lr * num_jobs / gain
    gain: float
    # score of the averaged model on the fixed training subset
    train: SubsetScore
    # score of the averaged model on the fixed validation subset
    valid: SubsetScore
    jobs: tuple[JobRecord, ...]
    # per layer: norm of the change in this outer iteration over the norm of the parameters
    relative_change: dict[str, float]
    compute_s: float           # time spent waiting for jobs
    average_s: float
    checkpoint_s: float
    # time training waited for diagnostics, which run concurrently with the next outer iteration
    diagnostics_s: float
    # seconds since this process began training
    elapsed_s: float
    # estimated seconds for the remaining outer iterations
    left_s: float
    # seconds without a minibatch after which a worker is replaced; derived from measurements
    patience_s: float = 0.0
    # at the end of the outer iteration
    workers_alive: int = 0
    # deaths of workers since this process began training
    num_deaths: int = 0
    # late or duplicate results that were discarded since this process began training
    num_discarded: int = 0
    # additional values of the task's evaluation (`Evaluation.figures`)
    diagnostics: dict[str, float] = field(default_factory=dict)
    # work items deferred to a later outer iteration
    num_deferred: int = 0
    # jobs that were repeated on another worker and compared (failure.audit_every)
    num_audited: int = 0
    # average over sites after this outer iteration, if there was one: round, counted and possible
    # sites, rounds missed, wait_s, sent_bytes and received_bytes of this site
    sites: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OuterIterationRecord:
        """Build a record from values of `asdict`; KeyError, TypeError, ValueError for others."""
        jobs = tuple(_from_json(JobRecord, job) for job in values["jobs"])
        subsets = {name: _from_json(SubsetScore, values[name]) for name in ("train", "valid")}
        return _from_json(cls, {**values, **subsets, "jobs": jobs})

    @property
    def skew(self) -> float:
        """Extra duration of the slowest accepted job, as a fraction of the median duration."""
        seconds = [job.seconds for job in self.jobs if job.accepted]
        return max(seconds) / max(statistics.median(seconds), 1e-9) - 1.0 if seconds else 0.0

    @property
    def objf(self) -> float:
        """Mean objf per frame of the accepted jobs during training."""
        return self._frame_mean("objf")

    @property
    def accuracy(self) -> float:
        return self._frame_mean("accuracy")

    @property
    def max_change_share(self) -> float:
        return self._frame_mean("max_change_share")

    @property
    def max_param_change_share(self) -> float:
        return self._frame_mean("max_param_change_share")

    @property
    def health(self) -> dict[str, float]:
        """Mean of each Fisher diagnostic over the accepted jobs."""
        values: dict[str, list[float]] = {}
        for job in self.jobs:
            if job.accepted:
                for name, value in job.health.items():
                    values.setdefault(name, []).append(value)
        return {name: statistics.fmean(found) for name, found in values.items()}

    def _frame_mean(self, name: str) -> float:
        accepted = [job for job in self.jobs if job.accepted]
        num_frames = sum(job.num_frames for job in accepted)
        return float(sum(getattr(job, name) * job.num_frames for job in accepted) / max(num_frames, 1))


@dataclass(frozen=True)
class FinalReport:
    """Final results of a run."""

    # None for a custom task
    test_errors: WordErrors | None
    valid_errors: WordErrors | None
    train: SubsetScore
    valid: SubsetScore
    frames_processed: int
    seconds: float
    # files written, by label: path
    files: dict[str, str] = field(default_factory=dict)
    # metrics of a custom task, by name, such as valid/loss
    metrics: dict[str, float] = field(default_factory=dict)
    # 95 % confidence interval of the test WER in percent: low, high; empty where it is not known
    interval: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FinalReport:
        """Build a report from the values of `asdict`; raises as for an outer iteration."""
        subsets = {name: _from_json(SubsetScore, values[name]) for name in ("train", "valid")}
        errors = {name: values[name] and WordErrors.of_json(values[name]) for name in ("test_errors", "valid_errors")}
        return _from_json(cls, {**values, **subsets, **errors})


@dataclass(frozen=True)
class Incident:
    """An unplanned event and the action taken; each is one line in every log."""

    # worker_died | job_failed | job_rejected | worker_replaced | job_continued | interrupted | ...
    what: str
    # one message: the worker or job, the event, the action taken
    message: str
    outer_iter: int
    job: int = -1              # -1: not about a job
    worker: int = -1
    # time of detection, on the clock of OuterIterationRecord.elapsed_s
    elapsed_s: float = 0.0
    # FailureKind, where a worker or its input is the cause
    kind: str = ""


_Record = TypeVar("_Record")
# annotation -> types that JSON returns for it; NaN and integers are accepted for a float
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "SubsetScore": (SubsetScore,),
    "WordErrors | None": (WordErrors, type(None)),
    "tuple[JobRecord, ...]": (tuple,), "dict[str, float]": (dict,), "dict[str, str]": (dict,)}


def _from_json(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Build a record from JSON values, each of which must have the annotated type."""
    found = {}
    for spec in fields(kind):  # type: ignore[arg-type]
        if spec.name not in values:
            continue
        value, types = values[spec.name], _JSON_TYPES[str(spec.type)]
        is_flag = isinstance(value, bool) and bool not in types
        if is_flag or not isinstance(value, types):
            raise TypeError(f"{spec.name} is {value!r}; expected {spec.type}")
        if isinstance(value, dict):
            inner = _JSON_TYPES[str(spec.type).removeprefix("dict[str, ").removesuffix("]")]
            if not all(isinstance(one, inner) and not isinstance(one, bool) for one in value.values()):
                raise TypeError(f"{spec.name} holds values that are not {spec.type}")
        found[spec.name] = value
    return kind(**found)


class Tracker(Protocol):
    """Receives the records of a run as they are made; docs/trackers.md has an example.

    The methods are called in this order, by the thread that trains; a subclass needs only some.
    """

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        """Receive a committed outer iteration."""
        return

    def incident(self, incident: Incident) -> None:
        """Receive an unplanned event, such as the death of a worker."""
        return

    def finished(self, report: FinalReport) -> None:
        """Receive the scores of the final model."""
        return

    def close(self, status: str) -> None:
        """End the run; `status` is FINISHED, FAILED or KILLED."""
        return


class Trackers:
    """Passes every record to all trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        for tracker in self.trackers:
            tracker.outer_iteration(record)

    def incident(self, incident: Incident) -> None:
        for tracker in self.trackers:
            tracker.incident(incident)

    def finished(self, report: FinalReport) -> None:
        for tracker in self.trackers:
            tracker.finished(report)

    def close(self, status: str) -> None:
        for tracker in self.trackers:
            tracker.close(status)
