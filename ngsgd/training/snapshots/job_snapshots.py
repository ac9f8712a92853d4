"""Snapshots that a worker takes of its job, at minibatch boundaries.

A snapshot is taken after `failure.snapshot_interval_s`, or later: the time for snapshots is at most
`failure.snapshot_cost` of the time of the job. Shorter jobs take none.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.errors import warn
from ngsgd.optim import Optimizer
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.training.diagnostics.job_sums import JobSums
from ngsgd.training.job import Job, WorkItem
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block, Header, Packed, unpack
from ngsgd.training.task import Task
from ngsgd.training.validation.checksums import digest

T = TypeVar("T")

NUM_BLOCKS = 2
# before the first measurement; memory that is new to a process is slower than a copy
_BYTES_PER_S = 5e8
# with snapshots=auto, the fraction of the free memory of the machine that all workers may use
MOST_MEMORY = 0.25


@dataclass(frozen=True)
class JobState:
    """The objects that a job changes; parameters of layers that are not trained yet included."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    preconditioner: Preconditioner | None
    sums: JobSums
    device: torch.device

    def values(self) -> dict[str, Any]:
        """Return the current state; its tensors are not copied."""
        return {"parameters": [p.detach() for p in self.model.parameters()], "buffers": dict(self.model.named_buffers()),
                "optimizer": self.optimizer.training_state(), "preconditioner": self.preconditioner.state_dict()
                if self.preconditioner else None, "sums": self.sums.state(), "task": self.task.job_state(),
                "random": random_states(self.device)}

    def load(self, values: dict[str, Any]) -> None:
        """Continue from `values`, which another process may have returned."""
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values["parameters"], strict=True):
                p.copy_(value)
            for path, module in self.model.named_modules():
                for name, buffer in module._buffers.items():
                    if (value := values["buffers"].get(f"{path}.{name}" if path else name)) is None:
                        continue
                    if buffer is not None and buffer.shape == value.shape:
                        buffer.copy_(value)
                    else:
                        # such as a cache that grows with the longest input
                        module._buffers[name] = value.to(self.device)
        self.optimizer.load_training_state(values["optimizer"])
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(values["preconditioner"])
        self.sums.load_state(values["sums"])
        self.task.load_job_state(values["task"])
        # last, because the steps above may use random numbers
        states = values["random"]
        torch.set_rng_state(states["torch"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self.device)
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])


def is_random_reader(batches: Iterator[T], device: torch.device) -> tuple[bool, Iterator[T]]:
    """Read one minibatch; return whether that used the global generators, and all minibatches."""
    # the restored states are those after the completed minibatches, which are read again
    before = _comparable(random_states(device))
    first = list(itertools.islice(batches, 1))
    return _comparable(random_states(device)) != before, itertools.chain(first, batches)


def _comparable(states: Any) -> Any:
    """Replace each array and tensor of nested values by its bytes."""
    if isinstance(states, dict):
        return {key: _comparable(value) for key, value in states.items()}
    if isinstance(states, tuple):
        return tuple(_comparable(value) for value in states)
    return np.asarray(states).tobytes() if isinstance(states, (np.ndarray, Tensor)) else states


def random_states(device: torch.device) -> dict[str, Any]:
    """States of the global generators of torch, NumPy and Python."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


class SnapshotMemory(Protocol):
    """Two blocks that outlive the worker; they are written alternately."""

    def room(self, index: int, num_bytes: int) -> Block:
        """Return a block for writing, with at least so many bytes; raise OSError without memory."""

    def block(self, index: int) -> Block:
        """Return a block for reading, of any size."""

    def is_ready(self) -> bool:
        """Whether a block can be written now."""

    def written(self, index: int, block: Block, *, is_last: bool) -> None:
        """Keep a block that was written; the worker ends after the last one."""


@dataclass
class SnapshotTimer:
    """Decides when a snapshot is due, from the measured time of earlier ones."""

    interval_s: float
    # maximum fraction of the time of a job
    max_cost: float
    clock: Callable[[], float] = time.perf_counter
    # of the cost; on a busy machine waiting for a core is no cost of a snapshot
    work_clock: Callable[[], float] = time.thread_time
    bytes_per_s: float = _BYTES_PER_S
    # expected size; 0: not known
    num_bytes: int = 0
    _since: float = 0.0
    _work_since: float = 0.0
    _wait_work_s: float = 0.0
    # no snapshot is due before
    _earliest: float = 0.0
    _is_measured: bool = True    # in the current job

    def begin(self, num_bytes: int) -> None:
        """Start to wait for the first snapshot of a job with at least so many bytes."""
        self.num_bytes = max(self.num_bytes, num_bytes)
        if not self._is_measured and self.bytes_per_s < _BYTES_PER_S:
            # a single slow copy on a busy machine must not end snapshots in all later jobs
            self.bytes_per_s *= 2.0
        self._is_measured = False
        self._wait(self.num_bytes / self.bytes_per_s)

    def is_due(self) -> bool:
        now = self.clock()
        if now < self._earliest:
            return False
        left_s = self._wait_work_s - (self.work_clock() - self._work_since)
        # the clock of work is a system call, which is slow after each minibatch
        self._earliest = now + left_s
        return left_s <= 0.0

    def taken(self, num_bytes: int, seconds: float) -> None:
        """Start to wait for the next snapshot."""
        self.num_bytes, self.bytes_per_s = num_bytes, num_bytes / max(seconds, 1e-9)
        self._is_measured = True
        self._wait(seconds)

    def _wait(self, cost_s: float) -> None:
        self._since, self._work_since = self.clock(), self.work_clock()
        self._wait_work_s = cost_s / self.max_cost
        # work takes at least its time
        self._earliest = self._since + max(self.interval_s, self._wait_work_s)


class Snapshots:
    """The snapshots of one worker, for one job after another."""

    def __init__(self, settings: EngineSettings, device: torch.device, *, is_possible: bool) -> None:
        failure = settings.failure
        # copies from a GPU wait without work of this thread
        work_clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self.timer = SnapshotTimer(failure.snapshot_interval_s, failure.snapshot_cost, work_clock=work_clock)
        # of the next job; None: no snapshots
        self.memory: SnapshotMemory | None = None
        # whether the worker was asked to end, so that another one continues the job
        self.is_leaving: Callable[[], bool] = lambda: False
        self._num_workers = settings.cluster.num_workers
        self._limits_memory = failure.snapshots == "auto"
        self._is_possible = is_possible

    def of(self, job: Job, start: Vector, state: JobState) -> JobSnapshots | None:
        """Begin a job; None if it takes no snapshots."""
        memory, self.memory = self.memory, None
        if memory is None or not self._is_possible:
            return None
        # an optimizer often has as much state as there are parameters
        self.timer.begin(2 * start.nbytes)
        return JobSnapshots(self, job, start, state, memory)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the machine has memory for the snapshots of all workers."""
        return not self._limits_memory or NUM_BLOCKS * num_bytes * self._num_workers <= MOST_MEMORY * free_memory()


class JobSnapshots:
    """The snapshots of one attempt at a job."""

    def __init__(self, worker: Snapshots, job: Job, start: Vector, state: JobState, memory: SnapshotMemory) -> None:
        self.job, self.state = job, state
        self._worker, self._start, self._memory = worker, start, memory
        # mapped for writing; a new mapping costs a page fault per 4 kB
        self._blocks: dict[int, Block] = {}
        self._last = NUM_BLOCKS - 1    # block
        # time for minibatches in the attempts that this one continues
        self.earlier_s = 0.0
        self._began = time.perf_counter()
        self._is_off = False

    @cached_property
    def identity(self) -> bytes:
        """Hash of everything that determines the result of the job, except the attempt."""
        job, content = self.job, hashlib.blake2b(digest_size=16)
        fields = (job.outer_iter, job.job, job.pieces, job.lr, job.lr_factor, job.progress, job.returns, job.send,
                  job.keep_fisher, job.keep_own, job.excluded, digest(self._start), job.start.codec,
                  digest(job.start.own.read()) if job.start.codec and job.start.own else 0,
                  # the same arithmetic
                  self.state.device.type, torch.__version__, torch.get_num_threads())
        content.update(repr(fields).encode())
        for name, state in sorted((job.start.fisher or {}).items()):
            content.update(name.encode())
            for key, value in sorted(state.items()):
                content.update(key.encode() + np.asarray(value).tobytes())
        return content.digest()

    def restore(self) -> int:
        """Continue from the newest valid snapshot; return the minibatches done, 0 without one."""
        found = []
        for index in range(NUM_BLOCKS):
            header = Header.decode(self._memory.block(index)[:HEADER_BYTES].tobytes())
            if header is not None and header.identity == self.identity:
                found.append((header.num_minibatches, index))
        for number, index in sorted(found, reverse=True):
            values = unpack(self._memory.block(index))
            if values is not None:
                self.state.load(values["state"])
                self._last, self.earlier_s = index, values["seconds"]
                return number
        return 0

    def is_due(self, should_stop: bool) -> bool:
        """Whether it is time for a snapshot, or this worker was asked to end."""
        return (should_stop and self._worker.is_leaving()) or (self._worker.timer.is_due() and self._memory.is_ready())

    def take(self, num_minibatches: int) -> None:
        """Take a snapshot; without memory, only warn."""
        if self._is_off:
            return
        began = self._worker.timer.work_clock()
        seconds = self.earlier_s + time.perf_counter() - self._began
        packed = Packed.of({"state": self.state.values(), "seconds": seconds})
        index = (self._last + 1) % NUM_BLOCKS
        try:
            if index not in self._blocks or len(self._blocks[index]) < packed.num_bytes:
                if len(self._memory.block(index)) < packed.num_bytes and not self._worker.has_room(packed.num_bytes):
                    raise OSError("not enough free memory")
                self._blocks[index] = self._memory.room(index, packed.num_bytes)
        except OSError as error:
            self._is_off = True
            warn(f"no snapshots of this job: {packed.num_bytes / 1e6:.0f} MB are not available "
                 f"({error.strerror or error}); after a fault it starts at its beginning.")
            return
        packed.write(self._blocks[index], self.identity, num_minibatches)
        self._memory.written(index, self._blocks[index][:packed.num_bytes], is_last=self._worker.is_leaving())
        self._last = index
        self._worker.timer.taken(packed.num_bytes, self._worker.timer.work_clock() - began)


def remaining(pieces: Sequence[WorkItem], done: int, numbers: Callable[[WorkItem], range]) -> tuple[WorkItem, ...]:
    """The work items of a job after `done` minibatches; `numbers` returns those of an item."""
    left: list[WorkItem] = []
    for piece in pieces:
        size = len(numbers(piece))
        if done < size:
            left.append(replace(piece, first=piece.first + done) if done else piece)
        done = max(0, done - size)
    return tuple(left)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that can be allocated without swapping, page cache included."""
    import psutil
    available = float(psutil.virtual_memory().available)
    try:
        limit, used = (float((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        # no such limit: "max"
        return available
    return min(available, max(0.0, limit - used))
