"""Participation, effective training time, cost and averages over sites, from the log of a run.

- participation: contributions counted / contributions possible
- effective training time: seconds in minibatches of counted jobs / (wall seconds x workers)
- cost: hours of training x workers of each outer iteration x price of a worker for an hour
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ngsgd.counting import counted
from ngsgd.training.records import OuterIterationRecord

_FRAME_S = 0.01


@dataclass(frozen=True)
class _Counts:
    num_counted: int = 0
    num_possible: int = 0

    @property
    def participation(self) -> float:
        """0 to 1; NaN before the first outer iteration, or without an average."""
        return self.num_counted / self.num_possible if self.num_possible else float("nan")


@dataclass(frozen=True)
class Efficiency(_Counts):
    """Sums over the outer iterations of a run: counted results, planned jobs, and times."""

    # of counted jobs, from the first minibatch to the last
    minibatch_s: float = 0.0
    # of training; pauses between two processes of a run do not count
    wall_s: float = 0.0
    # largest number of workers in any outer iteration
    num_workers: int = 0
    # frames or examples of counted jobs
    num_samples: int = 0
    # wall seconds of each outer iteration x its workers
    worker_s: float = 0.0

    @property
    def effective_share(self) -> float:
        """Effective training time, 0 to 1; NaN before the first outer iteration."""
        available_s = self.wall_s * self.num_workers
        return self.minibatch_s / available_s if available_s > 0.0 else float("nan")

    def cost(self, price_per_hour: float) -> float:
        """Price of the workers during training, in the currency of `price_per_hour`."""
        return self.worker_s / 3600.0 * price_per_hour

    def cost_text(self, price_per_hour: float, *, is_speech: bool) -> str:
        """The cost, and the cost per hour of trained audio or per million trained examples."""
        cost = self.cost(price_per_hour)
        units = self.num_samples * _FRAME_S / 3600.0 if is_speech else self.num_samples / 1e6
        per_unit = f"{cost / units:.3g} per {'hour of audio' if is_speech else 'million examples'}" if units else ""
        return ", ".join([f"{cost:.3g}", *([per_unit] if per_unit else [])])

    @property
    def text(self) -> str:
        return f"participation {100 * self.participation:.4g} %, effective training time {100 * self.effective_share:.3g} %"


def efficiency_of(events: Iterable[Mapping[str, Any]]) -> Efficiency:
    """Sum over the events "outer_iteration" of a run; the others are ignored."""
    accepted = possible = workers = samples = 0
    minibatch_s = wall_s = worker_s = before_s = 0.0
    for event in events:
        if event.get("event") != "outer_iteration":
            continue
        jobs = event["jobs"]
        accepted += event["num_accepted"]
        possible += event["num_jobs"]
        minibatch_s += sum(job["seconds"] for job in jobs if job["accepted"])
        samples += sum(job["num_frames"] for job in jobs if job["accepted"])
        # elapsed_s begins again in a process that resumes the run
        seconds = event["elapsed_s"] - (before_s if before_s < event["elapsed_s"] else 0.0)
        before_s = event["elapsed_s"]
        here = max(event.get("workers_alive", 0), len({job["worker"] for job in jobs}))
        wall_s, worker_s, workers = wall_s + seconds, worker_s + seconds * here, max(workers, here)
    return Efficiency(accepted, possible, minibatch_s, wall_s, workers, samples, worker_s)


def of_record(record: OuterIterationRecord, before_s: float = 0.0) -> Efficiency:
    """The same of one outer iteration; `before_s` is `elapsed_s` of the one before."""
    one = efficiency_of([{"event": "outer_iteration", **asdict(record)}])
    seconds = _seconds_of(record, before_s)
    return replace(one, wall_s=seconds, worker_s=seconds * one.num_workers)


def samples_per_second(record: OuterIterationRecord, before_s: float = 0.0) -> float:
    """Frames or examples of the accepted jobs of an outer iteration per second."""
    return sum(job.num_frames for job in record.jobs if job.accepted) / max(_seconds_of(record, before_s), 1e-9)


def _seconds_of(record: OuterIterationRecord, before_s: float) -> float:
    """The clock begins again in a process that resumes the run."""
    return record.elapsed_s - (before_s if before_s < record.elapsed_s else 0.0)


@dataclass(frozen=True)
class SiteFigures(_Counts):
    """Sums over the averages of one site with the others: sites in them, and sites of the run."""

    num_rounds: int = 0
    sent_mb: float = 0.0
    received_mb: float = 0.0
    wait_s: float = 0.0

    @property
    def text(self) -> str:
        return (f"{counted(self.num_rounds, 'average')} over sites, participation {100 * self.participation:.4g} %; "
                f"{self.sent_mb:.3g} MB sent, {self.received_mb:.3g} MB received")


def sites_of(events: Iterable[Mapping[str, Any]]) -> SiteFigures:
    """Sum over the events "outer_iteration" of a run; the others are ignored."""
    rounds = [event["sites"] for event in events if event.get("event") == "outer_iteration" and event.get("sites")]

    def total(name: str) -> float:
        return float(sum(one.get(name, 0.0) for one in rounds))
    return SiteFigures(int(total("counted")), int(total("possible")), int(total("averages")), total("sent_bytes") / 1e6,
                       total("received_bytes") / 1e6, total("wait_s"))
