"""Parameter vectors and snapshots in memory that the processes of one machine share.

The coordinator owns anonymous files (memfd), and workers open them under /proc. After the last
process ends, however it ends, the kernel frees the memory.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ngsgd.errors import ClusterError
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.book import SnapshotBook, takes_snapshots
from ngsgd.training.snapshots.job_snapshots import NUM_BLOCKS
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block, Header

# maximum number of mapped vectors per process: a new mapping costs a page fault per 4 kB
_MAX_MAPPED = 256
_mapped: OrderedDict[tuple[str, int], Vector] = OrderedDict()


def _opened(path: str, inode: int) -> int:
    """Return a descriptor; raise ClusterError if the memory is not accessible or another one."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(f"shared memory {path} cannot be opened ({error.strerror}); check that "
                           "the coordinator runs on this machine.") from error
    # descriptors are reused: the path alone might lead to other memory
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise ClusterError(f"shared memory {path} has another use by now; check that the coordinator runs on this machine.")
    return descriptor


def _descriptor(path: str) -> int:
    return int(path.rpartition("/")[2])


@dataclass(frozen=True)
class SharedRef:
    """A shared vector, by the path under which every process of this user can open it."""

    path: str
    inode: int
    size: int  # elements
    is_here = True

    def read(self) -> Vector:
        """Return the vector without a copy."""
        return self.map()[:self.size]

    def map(self) -> Vector:
        """Map the complete memory for reading and writing.

        Raises:
            ClusterError: the memory is not accessible, as on another machine.
        """
        key = (self.path, self.inode)
        if key not in _mapped:
            descriptor = _opened(self.path, self.inode)
            try:
                _mapped[key] = np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.float32)
            finally:
                os.close(descriptor)
            if len(_mapped) > _MAX_MAPPED:
                _mapped.popitem(last=False)
        _mapped.move_to_end(key)
        return _mapped[key]


class SharedVectors:
    """The shared vectors of the coordinator, all of one size; released ones are reused."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[int] = []
        self._refs: dict[int, SharedRef] = {}

    def allocate(self) -> SharedRef:
        """Return a vector with arbitrary content."""
        if self._free:
            return self._refs[self._free.pop()]
        descriptor = os.memfd_create("ngsgd", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(self.size, 1) * 4)
        except OSError:
            os.close(descriptor)
            raise
        ref = SharedRef(f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino, self.size)
        self._refs[descriptor] = ref
        return ref

    def release(self, ref: SharedRef) -> None:
        """Return a vector for reuse; no process may still write to it."""
        descriptor = _descriptor(ref.path)
        if descriptor in self._refs and descriptor not in self._free:
            self._free.append(descriptor)

    def discard(self, ref: SharedRef) -> None:
        """Never reuse a vector: an abandoned process may still write to it."""
        descriptor = _descriptor(ref.path)
        if self._refs.pop(descriptor, None) is not None:
            self._free = [free for free in self._free if free != descriptor]
            _mapped.pop((ref.path, ref.inode), None)
            os.close(descriptor)

    def close(self) -> None:
        for ref in list(self._refs.values()):
            self.discard(ref)


@dataclass(frozen=True)
class SharedSnapshotMemory:
    """Blocks of one job, by the paths under which every process of this user can open them.

    They take no memory until a worker writes a snapshot, and survive the worker.
    """

    paths: tuple[str, ...]
    inodes: tuple[int, ...]

    def room(self, index: int, num_bytes: int) -> Block:
        """Return a block of that size for writing; raise OSError if there is too little memory."""
        descriptor = _opened(self.paths[index], self.inodes[index])
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                # reserves the memory: a missing page would end the process later
                os.posix_fallocate(descriptor, 0, num_bytes)
            if os.fstat(descriptor).st_size == 0:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.uint8)
        finally:
            os.close(descriptor)

    def block(self, index: int) -> Block:
        """Return a block for reading; empty if nothing was written."""
        return self.room(index, 0)

    def is_ready(self) -> bool:
        return True

    def written(self, index: int, block: Block, *, is_last: bool) -> None:
        """Nothing: the block is where it stays."""


class SharedSnapshotStore:
    """The snapshot memory of a coordinator on this machine."""

    def __init__(self) -> None:
        self._free: dict[SharedSnapshotMemory, None] = {}
        self._all: set[SharedSnapshotMemory] = set()

    def allocate(self) -> SharedSnapshotMemory:
        """Return memory without a snapshot; it is empty or has the size of an earlier one."""
        if self._free:
            return self._free.popitem()[0]
        descriptors = [os.memfd_create("ngsgd-snapshot", os.MFD_CLOEXEC) for _ in range(NUM_BLOCKS)]
        memory = SharedSnapshotMemory(tuple(f"/proc/{os.getpid()}/fd/{one}" for one in descriptors),
                                      tuple(os.fstat(one).st_ino for one in descriptors))
        self._all.add(memory)
        return memory

    def release(self, memory: SharedSnapshotMemory) -> None:
        """Clear the snapshots and return the memory for reuse; no process may still write to it."""
        if memory in self._all and memory not in self._free:
            for descriptor in map(_descriptor, memory.paths):
                if os.fstat(descriptor).st_size:
                    os.pwrite(descriptor, bytes(HEADER_BYTES), 0)
            self._free[memory] = None

    def discard(self, memory: SharedSnapshotMemory) -> None:
        """Never reuse memory: an abandoned process may still write to it."""
        if memory in self._all:
            self._all.remove(memory)
            self._free.pop(memory, None)
            for descriptor in map(_descriptor, memory.paths):
                os.close(descriptor)

    def newest(self, memory: SharedSnapshotMemory) -> int:
        """Minibatches of the newest snapshot; 0 without one. Its content is not checked."""
        contents = (os.pread(_descriptor(path), HEADER_BYTES, 0) for path in memory.paths)
        found = (Header.decode(content) for content in contents)
        return max((header.num_minibatches for header in found if header is not None), default=0)

    def close(self) -> None:
        """Free all memory once no worker uses it."""
        for memory in list(self._all):
            self.discard(memory)


def snapshot_book(settings: EngineSettings) -> SnapshotBook[SharedSnapshotMemory]:
    """Snapshots in shared memory if the settings permit them."""
    return SnapshotBook(SharedSnapshotStore() if takes_snapshots(settings) else None)
