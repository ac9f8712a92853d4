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

    job: int                   # 0-based within the outer iteration
    worker: int                # slot that ran it; stable when a worker process is replaced
    attempt: int               # 1 for the first try
    num_frames: int
    num_minibatches: int
    objf: float                # mean over the job while it trained, nats per frame
    accuracy: float            # share of frames, 0 to 1
    seconds: float             # from the first minibatch to the last
    max_change_share: float    # share of layer updates shortened by max_change, 0 to 1
    max_param_change_share: float  # share of minibatches shortened by max_param_change, 0 to 1
    num_skipped: int           # minibatches skipped because a gradient was not finite
    accepted: bool
    reason: str                # why it was rejected; empty when accepted
    health: dict[str, float] = field(default_factory=dict)  # of the Fisher estimates at the end, by layer and side
    ended_s: float = 0.0       # when its result arrived, on the clock of OuterIterationRecord.elapsed_s
    host: str = ""             # of a worker on another machine than the coordinator's
    machine: dict[str, float] = field(default_factory=dict)  # the load of that machine at the job's end

    @property
    def frames_per_second(self) -> float:
        return self.num_frames / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class SubsetScore:
    """The model on a fixed subset of frames."""

    objf: float                # nats per frame
    accuracy: float            # share of frames, 0 to 1


@dataclass(frozen=True)
class OuterIterationRecord:
    """One committed outer iteration."""

    outer_iter: int            # 0-based
    num_outer_iters: int
    num_jobs: int              # planned
    num_accepted: int
    epoch: float               # data passes done after this outer iteration, in epochs
    num_epochs: float
    frames_processed: int      # since the start of the run, over all accepted jobs; the x axis of every chart
    effective_lr: float        # per frame
    lr: float                  # per frame, of each job
    gain: float                # of the outer optimiser: lr is effective_lr * num_jobs / gain
    train: SubsetScore         # the averaged model on the fixed training subset
    valid: SubsetScore         # the averaged model on the fixed held-out subset
    jobs: tuple[JobRecord, ...]
    relative_change: dict[str, float]  # per layer: norm of this outer iteration's change over norm of the parameters
    compute_s: float           # waiting for jobs
    average_s: float
    checkpoint_s: float
    diagnostics_s: float       # that training waited for diagnostics; they run beside the next outer iteration
    elapsed_s: float           # since this process began training
    left_s: float              # estimate for the outer iterations to come
    patience_s: float = 0.0    # without a minibatch after which a worker is replaced; derived from what was measured
    workers_alive: int = 0     # at the end of the outer iteration
    num_deaths: int = 0        # of workers, since this process began training
    num_discarded: int = 0     # results that nobody waited for, likewise
    diagnostics: dict[str, float] = field(default_factory=dict)  # of training.diagnostics: dead units, silence, gradients
    num_deferred: int = 0      # pieces of work put off to a later outer iteration

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

    wer: str                   # on the test set: "%WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]"
    wer_percent: float
    valid_wer: str
    train: SubsetScore
    valid: SubsetScore
    frames_processed: int
    seconds: float
    files: dict[str, str] = field(default_factory=dict)  # what was written: label -> path

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FinalReport:
        """The report that `asdict` made these values of; raises like `OuterIterationRecord.from_json`."""
        subsets = {name: _from_json(SubsetScore, values[name]) for name in ("train", "valid")}
        return _from_json(cls, {**values, **subsets})


@dataclass(frozen=True)
class Incident:
    """Something that was not planned, and what was done about it: one line in every log."""

    what: str                  # worker_died | job_failed | job_rejected | worker_replaced | interrupted | ...
    message: str               # one sentence: who, what, what was done
    outer_iter: int
    job: int = -1              # -1: not about a job
    worker: int = -1
    elapsed_s: float = 0.0     # when it was noticed, on the clock of OuterIterationRecord.elapsed_s


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
