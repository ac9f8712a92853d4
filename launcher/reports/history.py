"""The history of one run as its files have it: iterations, stops, workers, layers, final scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ngsgd.training.records import OuterIterationRecord
from ngsgd.word_errors import WordErrors

if TYPE_CHECKING:
    from ngsgd.config import RunConfig

Event = Mapping[str, Any]
# incidents about a worker that lost a job, marked with a cross on the timeline
FAULTS = ("worker_died", "job_failed")
# statuses of a closed event -> the reason shown
_ENDINGS = {"KILLED": "stopped by Ctrl-C or a signal", "FAILED": "ended by an error", "FINISHED": "finished and continued"}
_NO_WORD = "its process ended without a last entry (killed, out of memory, or power loss)"


@dataclass(frozen=True)
class Score:
    """A score of the training and validation examples, and where the events have it."""

    title: str
    unit: str
    train: str
    valid: str
    scale: float = 1.0


class Curve:
    """The outer iterations of one run, in order; a custom task has losses, metrics and examples."""

    def __init__(self, events: Iterable[Event], *, is_speech: bool = True) -> None:
        self.is_speech = is_speech
        self.example = "frame" if is_speech else "example"
        # the line of an outer iteration that ran twice is superseded by the later one
        latest = {one["outer_iter"]: one for one in events if one.get("event") == "outer_iteration"}
        self.iterations = [latest[outer_iter] for outer_iter in sorted(latest)]
        most = max((event["frames_processed"] for event in self.iterations), default=0)
        units = ((1e6, " (millions)"), (1e3, " (thousands)"), (1.0, ""))
        self.scale, unit = next((one for one in units if most >= 2 * one[0]), units[-1])
        self.x_label = f"{self.example}s processed{unit}"
        self.positions = [event["frames_processed"] / self.scale for event in self.iterations]

    @property
    def scores(self) -> list[Score]:
        if self.is_speech:
            return [Score("Objective function", "nats per frame", "train.objf", "valid.objf"),
                    Score("Frame accuracy", "%", "train.accuracy", "valid.accuracy", 100.0)]
        last = self.iterations[-1].get("diagnostics", {})
        names = [name.removeprefix("valid/") for name in last if name.startswith("valid/")]
        return [Score("Loss (mean over examples)", "", "train.objf", "valid.objf", -1.0),
                *(Score(one, "", f"diagnostics.train/{one}", f"diagnostics.valid/{one}") for one in names)]

    def values(self, key: str, scale: float = 1.0) -> list[float]:
        """The values of a key such as train.objf, by outer iteration; NaN where there is none."""
        first, _, second = key.partition(".")
        return [scale * (event[first].get(second, math.nan) if second
                         else event.get(first, math.nan)) for event in self.iterations]


@dataclass(frozen=True)
class Stop:
    """A place where training stopped and a later process resumed it."""

    # the newest committed outer iteration, 0-based; -1: none
    outer_iter: int
    # on the clock of training, which stands still between processes
    elapsed_s: float
    frames_processed: int
    reason: str
    # by a person or a scheduler, after a complete outer iteration
    is_clean: bool


@dataclass(frozen=True)
class WorkerRow:
    worker: int
    host: str
    num_jobs: int
    frames_per_s: float
    busy_s: float
    # seconds in which other jobs of the same outer iteration still ran
    waiting_s: float
    # jobs that it ran after another attempt had failed, and attempts that failed on it
    num_retried: int
    num_failed: int


@dataclass(frozen=True)
class LayerRow:
    """What natural gradient did in one layer at the last outer iteration; NaN: not measured."""

    layer: str
    # side, such as input -> (effective rank, smallest e_i)
    sides: dict[str, tuple[float, float]]
    # share of updates that max_change clipped, 0 to 1
    clipped: float
    # between preconditioned and plain gradient
    cosine: float
    # norm of the last outer iteration's change over the norm of the parameters
    change: float


@dataclass(frozen=True)
class RunHistory:
    """All that a report reads of a run."""

    name: str
    config: RunConfig
    events: Sequence[Event]
    # as `ngsgd info --json`
    state: Mapping[str, Any]
    ledger: Sequence[Event] = ()
    # of wer.json: the 95% interval of the WER on the test set
    interval: tuple[float, float] | None = None

    @functools.cached_property
    def curve(self) -> Curve:
        return Curve(self.events, is_speech=not self.config.task._target_)

    @property
    def iterations(self) -> list[Event]:
        return self.curve.iterations

    @property
    def final(self) -> Event | None:
        """The scores of the final model; None before the end."""
        return next((event for event in reversed(self.events) if event.get("event") == "finished"), None)

    @property
    def test_errors(self) -> WordErrors | None:
        """Of the final model; None before the end, and for a task without words."""
        counts = (self.final or {}).get("test_errors")
        return WordErrors.of_json(counts) if counts else None

    @property
    def incidents(self) -> list[Event]:
        """With a kind, a worker and a time each, also where a log does not have them."""
        found = [event for event in self.events if event.get("event") == "incident"]
        return [{**event, "what": str(event.get("what", "")),
                 "worker": worker if isinstance(worker := event.get("worker"), int) else -1,
                 "elapsed_s": at if isinstance(at := event.get("elapsed_s"), int | float) else 0.0} for event in found]

    def stops(self) -> list[Stop]:
        """Every stop that a later process resumed, in order."""
        closed, newest = dict[int, str](), -1
        for event in self.events:
            if event.get("event") == "outer_iteration":
                newest = event["outer_iter"]
            elif event.get("event") == "closed":
                closed[newest] = event["status"]
        starts = [line["after"] for line in self.ledger
                  if line.get("event") == "started" and isinstance(line.get("after"), int)]
        if not starts:
            # no ledger: a closed event that others follow
            starts = [-1, *(outer_iter for outer_iter in closed if outer_iter < newest)]
        found = {event["outer_iter"]: event for event in self.iterations}
        return [Stop(after, float(found[after]["elapsed_s"]) if after in found else 0.0,
                     int(found[after]["frames_processed"]) if after in found else 0,
                     _ENDINGS.get(closed.get(after, ""), _NO_WORD), closed.get(after) in ("KILLED", "FINISHED"))
                for after in starts[1:]]

    def workers(self) -> list[WorkerRow]:
        """A row for each worker, the slowest first."""
        jobs: dict[int, list[Event]] = {}
        waits: dict[int, float] = {}
        for event in self.iterations:
            busy: dict[int, float] = {}
            for job in event["jobs"]:
                jobs.setdefault(job["worker"], []).append(job)
                busy[job["worker"]] = busy.get(job["worker"], 0.0) + job["seconds"]
            for worker, seconds in busy.items():
                waits[worker] = waits.get(worker, 0.0) + max(0.0, event["compute_s"] - seconds)
        failed = [event["worker"] for event in self.incidents if event["what"] in FAULTS]
        rows = []
        for worker, mine in jobs.items():
            busy_s = sum(job["seconds"] for job in mine)
            rows.append(WorkerRow(
                worker, mine[-1].get("host", ""), len(mine),
                sum(job["num_frames"] for job in mine) / max(busy_s, 1e-9), busy_s, waits[worker],
                sum(job["attempt"] > 1 for job in mine), failed.count(worker)))
        return sorted(rows, key=lambda row: (row.frames_per_s, row.worker))

    def layers(self) -> list[LayerRow]:
        """A row for each preconditioned layer, in the order of the model."""
        if not self.iterations:
            return []
        last, rank, nan = self.iterations[-1], "_effective_rank", math.nan
        health = OuterIterationRecord.from_json(last).health
        rows = []
        for layer in dict.fromkeys(name.rpartition("/")[0] for name in health):
            ranks = {name: value for name, value in health.items() if name.startswith(f"{layer}/") and name.endswith(rank)}
            sides = {name.rpartition("/")[2].removesuffix(rank): (value, health.get(name.replace(rank, "_last_e"), nan))
                     for name, value in ranks.items()}
            rows.append(LayerRow(layer, sides, health.get(f"{layer}/limited", nan), health.get(f"{layer}/cosine", nan),
                                 last["relative_change"].get(f"{layer}.weight", nan)))
        return rows
