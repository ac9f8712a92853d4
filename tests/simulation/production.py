"""Production workers of a trial, which run on its clock, die in their jobs and take snapshots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ngsgd.training.job import Job, JobResult
from ngsgd.training.snapshots.job_snapshots import NUM_BLOCKS
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block, Header
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker


class _DiedError(Exception):
    """The process of the worker ends here."""


class ProductionWorker(Worker):
    """Runs the first minibatches of a job, and ends as a worker that was asked to, or that died."""

    def __init__(self, spec: TaskSpec, index: int) -> None:
        super().__init__(spec, index)
        self._ends_after, self._dies_after, self._num_done, self._minibatch_s = 0.0, math.inf, 0, 1.0
        timer = self.snapshots.timer
        timer.clock = timer.work_clock = lambda: self._num_done * self._minibatch_s

    def run_until(self, job: Job, memory: SimulatedMemory | None, minibatch_s: float, *, ends_after: float = math.inf,
                  dies_after: float = math.inf, is_leaving: bool = False) -> JobResult | None:
        """Run a job with the snapshots in `memory`; None if the worker died."""
        self._ends_after, self._dies_after, self._num_done, self._minibatch_s = ends_after, dies_after, 0, minibatch_s
        self.snapshots.memory, self.snapshots.is_leaving = memory, lambda: is_leaving
        try:
            return self.run(job)
        except _DiedError:
            return None

    def _loop(self, run: Any, batches: Any, should_stop: Callable[[], bool]) -> None:
        numbers = itertools.count(run.continued_at + 1)

        def is_asked() -> bool:
            self._num_done = next(numbers)
            if self._num_done > self._dies_after:
                raise _DiedError
            return self._num_done >= self._ends_after
        super()._loop(run, batches, is_asked)


class SimulatedMemory:
    """Two blocks for the snapshots of a job."""

    def __init__(self) -> None:
        self.blocks = [np.zeros(0, np.uint8) for _ in range(NUM_BLOCKS)]

    def room(self, index: int, num_bytes: int) -> Block:
        missing = max(0, num_bytes - len(self.blocks[index]))
        self.blocks[index] = np.concatenate([self.blocks[index], np.zeros(missing, np.uint8)])
        return self.blocks[index]

    def block(self, index: int) -> Block:
        return self.blocks[index]

    def is_ready(self) -> bool:
        return True

    def written(self, index: int, block: Block, *, is_last: bool) -> None:
        pass

    def newest(self) -> tuple[int, int]:
        """(minibatches of the newest snapshot, its block); 0 without one."""
        headers = (Header.decode(block[:HEADER_BYTES].tobytes()) for block in self.blocks)
        return max((0 if header is None else header.num_minibatches, index) for index, header in enumerate(headers))

    def damage(self) -> None:
        """Leave the newest snapshot half-written under a complete header."""
        block = self.blocks[self.newest()[1]]
        block[len(block) // 2:] ^= 1


class SimulatedMemories:
    """The memory of the coordinator process for snapshots."""

    def __init__(self) -> None:
        self._free: list[SimulatedMemory] = []

    def allocate(self) -> SimulatedMemory:
        return self._free.pop() if self._free else SimulatedMemory()

    def release(self, memory: SimulatedMemory) -> None:
        for block in memory.blocks:
            block[:HEADER_BYTES] = 0
        self._free.append(memory)

    def discard(self, memory: SimulatedMemory) -> None:
        pass

    def newest(self, memory: SimulatedMemory) -> int:
        return memory.newest()[0]

    def close(self) -> None:
        self._free.clear()
