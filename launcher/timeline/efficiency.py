"""Participation and effective training time, from the outer iterations of a run.

participation = contributions counted / contributions possible
effective training time = seconds in minibatches of counted jobs / (wall seconds x workers)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ngsgd.training.records import NOT_THE_BEST, OuterIterationRecord


@dataclass(frozen=True)
class Efficiency:
    """Sums over the outer iterations of a run."""

    # results that entered an average
    num_counted: int = 0
    # jobs planned, without sound results that are not averaged by design
    # (schedule.early_rules)
    num_possible: int = 0
    # of counted jobs, from the first minibatch to the last
    minibatch_s: float = 0.0
    # of training; pauses between two processes of a run do not count
    wall_s: float = 0.0
    # largest number of workers in any outer iteration
    num_workers: int = 0

    @property
    def participation(self) -> float:
        """0 to 1; NaN before the first outer iteration."""
        return self.num_counted / self.num_possible if self.num_possible else float("nan")

    @property
    def effective_share(self) -> float:
        """Effective training time, 0 to 1; NaN before the first outer iteration."""
        available_s = self.wall_s * self.num_workers
        return self.minibatch_s / available_s if available_s > 0.0 else float("nan")

    @property
    def text(self) -> str:
        return f"participation {100 * self.participation:.4g} %, effective training time {100 * self.effective_share:.3g} %"


def efficiency_of(events: Iterable[Mapping[str, Any]]) -> Efficiency:
    """Sum over the events "outer_iteration" of a run; the others are ignored."""
    counted = possible = workers = 0
    minibatch_s = wall_s = 0.0
    for event in events:
        if event.get("event") != "outer_iteration":
            continue
        jobs = event["jobs"]
        counted += event["num_accepted"]
        possible += event["num_jobs"] - sum(job["reason"] == NOT_THE_BEST for job in jobs)
        minibatch_s += sum(job["seconds"] for job in jobs if job["accepted"])
        wall_s = max(wall_s, event["elapsed_s"])
        workers = max(workers, event.get("workers_alive", 0), len({job["worker"] for job in jobs}))
    return Efficiency(counted, possible, minibatch_s, wall_s, workers)


def of_record(record: OuterIterationRecord, before_s: float = 0.0) -> Efficiency:
    """The same of one outer iteration; `before_s` is `elapsed_s` of the one before."""
    one = efficiency_of([{"event": "outer_iteration", **asdict(record)}])
    since = before_s if before_s < record.elapsed_s else 0.0
    return Efficiency(one.num_counted, one.num_possible, one.minibatch_s, record.elapsed_s - since, one.num_workers)
