"""Shared memory for snapshots of jobs: anonymous files of the coordinator, which workers enlarge.

They take no memory until a worker writes a snapshot, and survive the worker.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ngsgd.errors import ClusterError
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.book import SnapshotBook, takes_snapshots
from ngsgd.training.snapshots.job_snapshots import NUM_BLOCKS
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block, Header


@dataclass(frozen=True)
class SharedSnapshotMemory:
    """Blocks of one job, by the paths under which every process of this user can open them."""

    paths: tuple[str, ...]
    # descriptors are reused: a path alone might lead to other memory
    inodes: tuple[int, ...]

    def room(self, index: int, num_bytes: int) -> Block:
        """Return a block for writing; raise OSError if there is not enough memory."""
        descriptor = self._open(index)
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                # reserves the memory: a missing page would end the process later
                os.posix_fallocate(descriptor, 0, num_bytes)
            return _mapped(descriptor)
        finally:
            os.close(descriptor)

    def block(self, index: int) -> Block:
        """Return a block for reading; empty if nothing was written."""
        descriptor = self._open(index)
        try:
            return _mapped(descriptor)
        finally:
            os.close(descriptor)

    def _open(self, index: int) -> int:
        path = self.paths[index]
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ClusterError(f"shared memory {path} cannot be opened ({error.strerror}); check that the "
                               "coordinator runs on this machine.") from error
        if os.fstat(descriptor).st_ino != self.inodes[index]:
            os.close(descriptor)
            raise ClusterError(f"shared memory {path} has another use by now; check that the coordinator runs "
                               "on this machine.")
        return descriptor


def _mapped(descriptor: int) -> Block:
    if os.fstat(descriptor).st_size == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.uint8)


class SharedSnapshotStore:
    """The snapshot memory of a coordinator on this machine."""

    def __init__(self) -> None:
        self._free: list[SharedSnapshotMemory] = []
        self._all: set[SharedSnapshotMemory] = set()

    def allocate(self) -> SharedSnapshotMemory:
        """Return memory without a snapshot; it is empty or has the size of an earlier one."""
        if self._free:
            return self._free.pop()
        descriptors = [os.memfd_create("ngsgd-snapshot", os.MFD_CLOEXEC) for _ in range(NUM_BLOCKS)]
        memory = SharedSnapshotMemory(tuple(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors),
                                      tuple(os.fstat(descriptor).st_ino for descriptor in descriptors))
        self._all.add(memory)
        return memory

    def release(self, memory: SharedSnapshotMemory) -> None:
        """Clear the snapshots and return the memory for reuse; no process may still write to it."""
        if memory in self._all and memory not in self._free:
            for descriptor in _descriptors(memory):
                if os.fstat(descriptor).st_size:
                    os.pwrite(descriptor, bytes(HEADER_BYTES), 0)
            self._free.append(memory)

    def discard(self, memory: SharedSnapshotMemory) -> None:
        """Never reuse memory: an abandoned process may still write to it."""
        if memory in self._all:
            self._all.remove(memory)
            self._free = [free for free in self._free if free != memory]
            for descriptor in _descriptors(memory):
                os.close(descriptor)

    def newest(self, memory: SharedSnapshotMemory) -> int:
        """Minibatches of the newest snapshot; 0 without one. Its content is not checked."""
        headers = [Header.decode(os.pread(descriptor, HEADER_BYTES, 0)) for descriptor in _descriptors(memory)]
        return max((header.num_minibatches for header in headers if header is not None), default=0)

    def close(self) -> None:
        """Free all memory once no worker uses it."""
        for memory in list(self._all):
            self.discard(memory)


def _descriptors(memory: SharedSnapshotMemory) -> list[int]:
    return [int(Path(path).name) for path in memory.paths]


def snapshot_book(settings: EngineSettings) -> SnapshotBook[SharedSnapshotMemory]:
    """Snapshots in shared memory if the settings permit them."""
    return SnapshotBook(SharedSnapshotStore() if takes_snapshots(settings) else None)
