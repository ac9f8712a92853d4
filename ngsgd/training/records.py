"""What the coordinator reports: plain numbers, ready for a log line, a chart or a JSON file.

Objective functions are per frame and go up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar


@dataclass(frozen=True)
class JobRecord:
    """One job of one outer iteration, as it ended."""

    # 0-based within the outer iteration
    job: int
    # slot that ran it; stable when a worker process is replaced
    worker: int
    # 1 for the first try
    attempt: int
    num_frames: int
    num_minibatches: int
    # mean over the job while it trained, nats per frame
    objf: float
    # share of frames, 0 to 1
    accuracy: float
    # from the first minibatch to the last
    seconds: float
    # share of layer updates shortened by max_change, 0 to 1
    max_change_share: float
    # share of minibatches shortened by max_param_change, 0 to 1
    max_param_change_share: float
    # minibatches skipped because a gradient was not finite
    num_skipped: int
    accepted: bool
    # why it was rejected; empty when accepted
    reason: str
    # of the Fisher estimates at the end, by layer and side
    health: dict[str, float] = field(default_factory=dict)
    # when its result arrived, on the clock of OuterIterationRecord.elapsed_s
    ended_s: float = 0.0
    # of a worker on another machine than the coordinator's
    host: str = ""
    # the load of that machine at the job's end
    machine: dict[str, float] = field(default_factory=dict)

    @property
    def frames_per_second(self) -> float:
        return self.num_frames / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class SubsetScore:
    """The model on a fixed subset of frames."""

    objf: float                # nats per frame
    # share of frames, 0 to 1
    accuracy: float


@dataclass(frozen=True)
class OuterIterationRecord:
    """One committed outer iteration."""

    outer_iter: int            # 0-based
    num_outer_iters: int
    num_jobs: int              # planned
    num_accepted: int
    # data passes done after this outer iteration, in epochs
    epoch: float
    num_epochs: float
    # since the start of the run, over all accepted jobs; the x axis of every chart
    frames_processed: int
    effective_lr: float        # per frame
    # per frame, of each job
    lr: float
    # of the outer optimiser: lr is effective_lr * num_jobs / gain
    gain: float
    # the averaged model on the fixed training subset
    train: SubsetScore
    # the averaged model on the fixed held-out subset
    valid: SubsetScore
    jobs: tuple[JobRecord, ...]
    # per layer: norm of this outer iteration's change over norm of the parameters
    relative_change: dict[str, float]
    compute_s: float           # waiting for jobs
    average_s: float
    checkpoint_s: float
    # that training waited for diagnostics; they run beside the next outer iteration
    diagnostics_s: float
    # since this process began training
    elapsed_s: float
    # estimate for the outer iterations to come
    left_s: float
    # without a minibatch after which a worker is replaced; derived from what was measured
    patience_s: float = 0.0
    # at the end of the outer iteration
    workers_alive: int = 0
    # of workers, since this process began training
    num_deaths: int = 0
    # results that nobody waited for, likewise
    num_discarded: int = 0
    # further numbers of the task's evaluation (`Evaluation.figures`)
    diagnostics: dict[str, float] = field(default_factory=dict)
    # pieces of work put off to a later outer iteration
    num_deferred: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OuterIterationRecord:
        """The record that `asdict` made these values of; other entries of a log line are ignored.

        Raises KeyError, TypeError or ValueError where an entry is missing or has another type.
        """
        jobs = tuple(_from_json(JobRecord, job) for job in values["jobs"])
        subsets = {name: _from_json(SubsetScore, values[name]) for name in ("train", "valid")}
        return _from_json(cls, {**values, **subsets, "jobs": jobs})

    @property
    def skew(self) -> float:
        """How much longer the slowest accepted job took than the median one, as a share of the median."""
        seconds = [job.seconds for job in self.jobs if job.accepted]
        return max(seconds) / max(statistics.median(seconds), 1e-9) - 1.0 if seconds else 0.0

    @property
    def objf(self) -> float:
        """Mean objf per frame while the accepted jobs trained."""
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
        """Mean over the accepted jobs of what each says of its Fisher estimates."""
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
    """What the run came to."""

    # on the test set: "%WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"
    wer: str
    wer_percent: float
    valid_wer: str
    train: SubsetScore
    valid: SubsetScore
    frames_processed: int
    seconds: float
    # what was written: label -> path
    files: dict[str, str] = field(default_factory=dict)
    # of a task of the user's own, by name, such as valid/loss
    metrics: dict[str, float] = field(default_factory=dict)
    # 95 % confidence interval of the test WER in percent: low, high; empty where it is not known
    interval: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FinalReport:
        """The report that `asdict` made these values of; raises like `OuterIterationRecord.from_json`."""
        subsets = {name: _from_json(SubsetScore, values[name]) for name in ("train", "valid")}
        return _from_json(cls, {**values, **subsets})


@dataclass(frozen=True)
class Incident:
    """Something that was not planned, and what was done about it: one line in every log."""

    # worker_died | job_failed | job_rejected | worker_replaced | interrupted | ...
    what: str
    # one sentence: who, what, what was done
    message: str
    outer_iter: int
    job: int = -1              # -1: not about a job
    worker: int = -1
    # when it was noticed, on the clock of OuterIterationRecord.elapsed_s
    elapsed_s: float = 0.0


_Record = TypeVar("_Record")
# by annotation: what JSON gives for it; a float that was NaN or a whole number stays a number
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "SubsetScore": (SubsetScore,),
    "tuple[JobRecord, ...]": (tuple,), "dict[str, float]": (dict,), "dict[str, str]": (dict,)}


def _from_json(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A record of the given kind from its JSON values, each of which must have the annotated type."""
    found = {}
    for spec in fields(kind):  # type: ignore[arg-type]
        if spec.name not in values:
            continue
        value, types = values[spec.name], _JSON_TYPES[str(spec.type)]
        is_flag = isinstance(value, bool) and bool not in types
        if is_flag or not isinstance(value, types):
            raise TypeError(f"{spec.name} is {value!r}, not {spec.type}")
        if isinstance(value, dict):
            inner = _JSON_TYPES[str(spec.type).removeprefix("dict[str, ").removesuffix("]")]
            if not all(isinstance(one, inner) and not isinstance(one, bool) for one in value.values()):
                raise TypeError(f"{spec.name} holds values that are not {spec.type}")
        found[spec.name] = value
    return kind(**found)
