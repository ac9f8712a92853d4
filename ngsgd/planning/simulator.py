"""N logical workers on a virtual clock: real training, simulated time, stragglers and failures.

The coordinator uses it like any pool and reads the time from `SimulatedPool.clock`. Every job with
a result is trained by one worker in this process; a job that dies is not trained.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.cluster.process import configure_process
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.planning.simulated_cluster import Books, SimulatedCluster
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome
from ngsgd.training.worker import Worker, never, np_empty


@dataclass
class _Task:
    """A running job; its minibatches take equally long."""

    job: Job
    began: float
    overhead_s: float
    minibatch_s: float
    num_minibatches: int  # minibatches after which it ends: all, or fewer after a stop request
    was_told: bool = False

    @property
    def ends_at(self) -> float:
        return self.began + self.overhead_s + self.num_minibatches * self.minibatch_s

    def done(self, now: float) -> int:
        passed = (now - self.began - self.overhead_s) / self.minibatch_s
        return min(self.num_minibatches, max(0, math.floor(passed)))


@dataclass
class _SimulatedWorker:
    index: int
    chance: np.random.Generator
    fails_at: float
    back_at: float | None = None  # time of its return while it is gone
    hung_at: float = math.inf  # no progress from this time on
    task: _Task | None = None

    @property
    def is_idle(self) -> bool:
        return self.back_at is None and self.task is None

    @property
    def wakes_at(self) -> float:
        """Time of the next spontaneous event."""
        if self.back_at is not None:
            return self.back_at
        if self.hung_at < math.inf:
            return math.inf
        return min(self.fails_at, self.task.ends_at if self.task else math.inf)


class SimulatedPool(InProcessPool):
    """Workers of this process with virtual time; the same seed gives the same events."""

    spec: SpeechTaskSpec

    def __init__(self, spec: SpeechTaskSpec, cluster: SimulatedCluster, num_workers: int, num_threads: int, *,
                 should_stop: Callable[[], bool] = never, make_worker: Callable[[SpeechTaskSpec, int], Worker] = Worker) -> None:
        self.spec, self.cluster = spec, cluster
        self.num_workers, self.num_threads = num_workers, num_threads
        self.should_stop, self.make_worker = should_stop, make_worker
        self.books, self._now = Books(), 0.0
        self._outcomes: deque[Outcome] = deque()
        # workers that were busy so far: a schedule may begin with few jobs
        self._num_wanted = 0
        chances = [cluster.failures_of(index) for index in range(num_workers)]
        self._slots = [_SimulatedWorker(index, chance, cluster.time_to_failure(chance)) for index, chance in enumerate(chances)]

    def clock(self) -> float:
        """Virtual seconds since the pool was created."""
        return self._now

    def start(self) -> None:
        configure_process(self.num_threads)
        self._worker = self.make_worker(self.spec, 0)

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        """Advance the clock by the time of both directions; the coordinator takes the step."""
        num_bytes = max((result.sent.read().nbytes for result in results), default=0)
        self._advance(self._now + self.cluster.average_s(max(len(results), 1), num_bytes), is_averaging=True)
        return False

    def num_idle(self) -> int:
        return sum(slot.is_idle for slot in self._slots)

    def num_workers_alive(self) -> int:
        return sum(slot.back_at is None for slot in self._slots)

    def submit(self, job: Job) -> None:
        # assign a job to the same worker where possible, as in the other pools: then a slow machine
        # can get a shorter job
        slot = min((slot for slot in self._slots if slot.is_idle), key=lambda s: (s.index != job.job % self.num_workers, s.index))
        size, num_frames, num_minibatches = self.spec.config.schedule.minibatch_size, 0, 0
        for piece in job.pieces:
            stop = self.spec.shards().num_frames(piece.shard)
            frames = (stop if piece.stop is None else min(stop, piece.stop * size)) - piece.first * size
            num_frames += frames
            num_minibatches += math.ceil(frames / size)
        seconds = self.cluster.seconds(num_frames, num_minibatches, job.identity, slot.index)
        slot.task = _Task(job, self._now, self.cluster.overhead_s, seconds / num_minibatches, num_minibatches)
        self._num_wanted = min(self.num_workers, max(self._num_wanted, job.job + 1))

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self._outcomes:
            next_event = min(slot.wakes_at for slot in self._slots)
            self._advance(min(next_event, self._now + timeout_s))
        return self._outcomes.popleft() if self._outcomes else None

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {slot.index: (slot.task.job.identity, slot.task.done(min(self._now, slot.hung_at)))
                for slot in self._slots if slot.task}

    def kill(self, worker: int, reason: str) -> None:
        self._end(self._slots[worker], reason)

    def stop_jobs(self, outer_iter: int) -> None:
        for task in (slot.task for slot in self._slots if slot.task and slot.task.job.outer_iter == outer_iter):
            task.num_minibatches = min(task.num_minibatches, task.done(self._now) + 1)
            task.was_told = True

    def abandon(self) -> None:
        for slot in self._slots:
            slot.task = None

    # Events ---------------------------------------------------------------------------------------

    def _advance(self, until: float, *, is_averaging: bool = False) -> None:
        while (slot := min(self._slots, key=lambda s: s.wakes_at)).wakes_at <= until:
            self._pass(slot.wakes_at, is_averaging)
            if slot.back_at is not None:
                slot.back_at = None
                slot.fails_at = self._now + self.cluster.time_to_failure(slot.chance)
            elif slot.task and slot.task.ends_at <= slot.fails_at:
                self._outcomes.append(self._result(slot, slot.task))
            elif slot.chance.random() < self.cluster.hang_share:
                slot.hung_at = self._now
                self.books.num_hangs += 1
            else:
                self._end(slot, f"simulated failure at {self._now:.1f} s")
        self._pass(until, is_averaging)

    def _end(self, slot: _SimulatedWorker, reason: str) -> None:
        task, slot.task = slot.task, None
        slot.back_at, slot.hung_at = self._now + self.cluster.replace_s, math.inf
        self.books.num_deaths += 1
        if task:
            self.books.broken_s += self._now - task.began
            self._outcomes.append(JobFailure(task.job, slot.index, reason, True))

    def _result(self, slot: _SimulatedWorker, task: _Task) -> JobResult:
        """Train the job, now that its number of minibatches is known."""
        slot.task = None
        num_done = 0

        def ends() -> bool:
            nonlocal num_done
            num_done += 1
            return (task.was_told and num_done >= task.num_minibatches) or self.should_stop()
        self._worker.index = slot.index
        result = self._worker.run(task.job, np_empty, ends)
        seconds = result.num_minibatches * task.minibatch_s
        self.books.trained_s += seconds
        self.books.overhead_s += task.overhead_s
        return replace(result, seconds=seconds)

    def _pass(self, until: float, is_averaging: bool) -> None:
        seconds, self._now = until - self._now, until
        tasks = [slot.task for slot in self._slots if slot.task]
        free = self._num_wanted - len(tasks)
        gone = min(free, self.num_workers - self.num_workers_alive())
        waited_s = (free - gone) * seconds
        self.books.total_s += self._num_wanted * seconds
        self.books.replaced_s += gone * seconds
        if is_averaging:
            self.books.average_s += waited_s
        elif any(task.job.attempt == 1 for task in tasks):
            self.books.stragglers_s += waited_s
        else:
            self.books.repeats_s += waited_s
