"""Partitioning of the data of an outer iteration over its jobs: equal, or by worker speed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ngsgd.config import ScheduleConfig
from ngsgd.schedules import Shard
from ngsgd.training.job import JobResult, WorkItem

Work = tuple[tuple[WorkItem, ...], ...]
# factor of the expected amount of work; unfinished work is returned
_AMPLE = 1.3


class EqualPartitioner:
    """Assigns one complete shard to each job, as in Kaldi; deferred work items are separate
    jobs.
    """

    # no time limit
    round_s = math.inf

    def num_passes(self, num_jobs: int, pending: Sequence[WorkItem]) -> int:
        """Number of new passes that an outer iteration of `num_jobs` jobs begins."""
        return num_jobs

    def work(self, fresh: Sequence[WorkItem], pending: Sequence[WorkItem], num_jobs: int) -> Work:
        """Work items of each job."""
        return tuple((piece,) for piece in (*fresh, *pending))

    def observe(self, results: Sequence[JobResult]) -> None:
        """Update the estimated speed of the workers from the results of an outer iteration."""


class SpeedPartitioner(EqualPartitioner):
    """Distributes the same amount of data so that all jobs end together: slow workers get less.

    The split depends on measured times, so runs are not reproducible; each job is.
    """

    def __init__(self, num_minibatches: Callable[[Shard], int]) -> None:
        self.num_minibatches = num_minibatches
        # job -> minibatches per second; a job is assigned to the same worker where possible
        self._speed: dict[int, float] = {}

    def work(self, fresh: Sequence[WorkItem], pending: Sequence[WorkItem], num_jobs: int) -> Work:
        pieces = (*pending, *fresh)
        return cut(pieces, self._targets(sum(map(self._size, pieces)), num_jobs), self._size)

    def observe(self, results: Sequence[JobResult]) -> None:
        for result in results:
            self._speed[result.job.job] = result.num_minibatches / max(result.seconds, 1e-9)

    def _targets(self, total: int, num_jobs: int) -> list[int]:
        known = [self._speed[job] for job in range(num_jobs) if job in self._speed]
        typical = sum(known) / len(known) if known else 1.0
        speeds = [self._speed.get(job, typical) for job in range(num_jobs)]
        ends = [round(total * sum(speeds[:job + 1]) / sum(speeds)) for job in range(num_jobs)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _size(self, piece: WorkItem) -> int:
        stop = self.num_minibatches(piece.shard) if piece.stop is None else piece.stop
        return stop - piece.first


class TimeBudgetPartitioner(SpeedPartitioner):
    """Gives each job a fixed duration; results are weighted by their number of examples."""

    def __init__(self, num_minibatches: Callable[[Shard], int], round_s: float) -> None:
        super().__init__(num_minibatches)
        self.round_s = round_s

    def num_passes(self, num_jobs: int, pending: Sequence[WorkItem]) -> int:
        if not self._speed:
            return num_jobs
        missing = sum(self._targets(0, num_jobs)) - sum(map(self._size, pending))
        return max(0 if pending else 1, math.ceil(missing / self.num_minibatches(Shard(0, 0))))

    def _targets(self, total: int, num_jobs: int) -> list[int]:
        if not self._speed:
            return super()._targets(total, num_jobs)
        typical = sum(self._speed.values()) / len(self._speed)
        return [max(1, round(_AMPLE * self.round_s * self._speed.get(job, typical))) for job in range(num_jobs)]


def make_partitioner(config: ScheduleConfig, count: Callable[[Shard, int], int]) -> EqualPartitioner:
    """Build the configured partitioner; `count(shard, size)` returns the minibatches of a shard."""
    def num_minibatches(shard: Shard) -> int:
        return count(shard, config.minibatch_size)
    if config.load_balancing == "none":
        return EqualPartitioner()
    if config.load_balancing == "speed":
        return SpeedPartitioner(num_minibatches)
    return TimeBudgetPartitioner(num_minibatches, config.sync_interval_s)


def cut(pieces: Sequence[WorkItem], targets: Sequence[int], size: Callable[[WorkItem], int]) -> Work:
    """Split work items in order over jobs of `targets` minibatches; the last job gets the rest.

    Every minibatch is assigned exactly once. Jobs without work are omitted.
    """
    queue = deque(pieces)
    work: list[list[WorkItem]] = []
    for target in targets:
        taken: list[WorkItem] = []
        room = target
        while queue and room > 0:
            piece = queue.popleft()
            if size(piece) > room:
                middle = piece.first + room
                queue.appendleft(replace(piece, first=middle))
                piece = replace(piece, stop=middle)
            room -= size(piece)
            taken.append(piece)
        work.append(taken)
    work[-1] += queue
    return tuple(tuple(taken) for taken in work if taken)
