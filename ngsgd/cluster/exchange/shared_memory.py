"""Parameter vectors in memory that the processes of one machine share.

The coordinator owns anonymous files (memfd), and workers open them under /proc. No copy passes
through a pipe, and no file has a name. After the last process ends, however it ends, the kernel
frees the memory.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ngsgd.errors import ClusterError
from ngsgd.training.parameter_vector import Vector

# maximum number of mapped vectors per process: a new mapping costs a page fault per 4 kB
_MAX_MAPPED = 256
_mapped: OrderedDict[tuple[str, int], Vector] = OrderedDict()


@dataclass(frozen=True)
class SharedRef:
    """A shared vector, by the path under which every process of this user can open it."""

    path: str
    # descriptors are reused: the path alone might lead to another vector
    inode: int
    size: int       # elements
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
            _mapped[key] = self._open()
            if len(_mapped) > _MAX_MAPPED:
                _mapped.popitem(last=False)
        _mapped.move_to_end(key)
        return _mapped[key]

    def _open(self) -> Vector:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ClusterError(f"shared memory {self.path} cannot be opened ({error.strerror}); "
                               "check that the coordinator runs on this machine.") from error
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise ClusterError(f"shared memory {self.path} belongs to another vector; check "
                                   "that the coordinator runs on this machine.")
            return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.float32)
        finally:
            os.close(descriptor)


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
        descriptor = _descriptor(ref)
        if descriptor in self._refs and descriptor not in self._free:
            self._free.append(descriptor)

    def discard(self, ref: SharedRef) -> None:
        """Never reuse a vector: an abandoned process may still write to it."""
        descriptor = _descriptor(ref)
        if self._refs.pop(descriptor, None) is not None:
            self._free = [free for free in self._free if free != descriptor]
            _mapped.pop((ref.path, ref.inode), None)
            os.close(descriptor)

    def close(self) -> None:
        for ref in list(self._refs.values()):
            self.discard(ref)


def _descriptor(ref: SharedRef) -> int:
    return int(ref.path.rpartition("/")[2])
