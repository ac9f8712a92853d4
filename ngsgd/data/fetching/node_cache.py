"""A cache of fetched files, shared by the processes of a node.

A file has its SHA-256 as name. It is written under a temporary name, verified and renamed. Readers
hold a shared lock while they use a file, and writers an exclusive one, so a file without a lock can
be removed: it is either unused, or the rest of a killed process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ngsgd.data.fetching.source import FileSource, UnsoundFileError, checked_digest, note_sound
from ngsgd.errors import NodeCacheError
from ngsgd.files import cache_folder, sha256

_LOCK = ".lock"
# between two looks at a file that another process fetches
_POLL_S = 0.05
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_folder() -> Path:
    """The folder of the cache of this user."""
    return cache_folder("archives")


class NodeCache:
    """Files by SHA-256, of at most `max_bytes` bytes together, in a folder for this user only.

    The least recently used files are removed, but none that is in use.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def found(self, digest: str) -> Path | None:
        """Return the path of a file if it is here, and mark it as used."""
        path = self.folder / checked_digest(digest)
        try:
            # the time of the last change is part of the state that was verified
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except OSError:
            return None
        return path

    def remove(self, digest: str) -> None:
        """Remove a damaged file; a process that reads it keeps its content."""
        with contextlib.suppress(OSError):
            (self.folder / checked_digest(digest)).unlink()

    def fetch(self, digest: str, source: FileSource, progress: Callable[[], object]) -> Path:
        """Return the path of a file, which is copied from the source unless it is here.

        `progress` is called while bytes arrive, here or in another process of the node. Raises
        UnsoundFileError if the source does not have it, or it arrived damaged, NodeCacheError if
        there is no room for it, and the errors of the source.
        """
        final = self.folder / checked_digest(digest)
        part = self.folder / f".{digest}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while not final.exists():
                with _claimed(part) as descriptor:
                    if descriptor is None:
                        # the progress of the other process counts as that of this one
                        before = _changed(part)
                        time.sleep(_POLL_S)
                        if _changed(part) != before:
                            progress()
                    elif not final.exists():
                        self._copy(descriptor, digest, source, progress)
                        part.rename(final)
                        note_sound(final)
        except OSError as error:
            what = "is full" if error.errno in _FULL else f"could not be written ({error.strerror or error})"
            raise NodeCacheError(f"the disk of {self.folder}, the cache of prepared data on {os.uname().nodename}, {what}; free "
                                 "disk space, or set XDG_CACHE_HOME to a folder on another disk before Ray starts "
                                 "there.") from error
        return final

    def _copy(self, descriptor: int, digest: str, source: FileSource, progress: Callable[[], object]) -> None:
        """Fill the claimed file; it is removed if this fails."""
        part = self.folder / f".{digest}.tmp"
        try:
            size = source.size(digest)
            if size is None:
                raise UnsoundFileError(f"{source.where} has no file with the SHA-256 {digest}")
            os.ftruncate(descriptor, 0)
            self._reserve(descriptor, size)
            received = 0
            for content in source.parts(digest, size):
                received += len(content)
                if received > size:
                    break
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view):]
                progress()
            if received == size and sha256(part) == digest:
                return
            raise UnsoundFileError(f"the file with the SHA-256 {digest} from {source.where} arrived damaged")
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _reserve(self, descriptor: int, size: int) -> None:
        """Allocate the bytes of a file; remove others until they fit."""
        if size > self.max_bytes:
            raise NodeCacheError(f"a file of the prepared data has {size / 1e9:.3g} GB, and the cache {self.folder} on "
                                 f"{os.uname().nodename} is limited to {self.max_bytes / 1e9:.3g} GB; raise data.node_cache_gb.")
        # one process at a time, or two would count on the same bytes
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make_room(size)
            if size:
                os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(lock)

    def _make_room(self, size: int) -> None:
        files: list[tuple[Path, os.stat_result]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and path.name != _LOCK:
                    files.append((path, status))
        files.sort(key=lambda one: one[1].st_atime_ns)
        used = sum(status.st_size for _, status in files)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        excess = used + size - min(self.max_bytes, used + free)
        for path, status in files:
            if excess <= 0:
                return
            if _removed(path):
                excess -= status.st_size
        if excess > 0 and free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        if excess > 0:
            raise NodeCacheError(f"the cache {self.folder} on {os.uname().nodename} is limited to {self.max_bytes / 1e9:.3g} GB, "
                                 f"and files that workers use leave no room for one of {size / 1e9:.3g} GB; raise "
                                 "data.node_cache_gb, or run fewer workers on this node.")


@contextmanager
def _claimed(part: Path) -> Iterator[int | None]:
    """Provide a file to write, locked; None while another process writes it."""
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        is_mine = False
        # the process that held the lock may have renamed or removed the file meanwhile
        with contextlib.suppress(FileNotFoundError):
            is_mine = _locks(descriptor) and os.path.samestat(os.fstat(descriptor), part.stat())
        yield descriptor if is_mine else None
    finally:
        os.close(descriptor)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _removed(path: Path) -> bool:
    """Remove a file that no process uses; False if one does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        if not _locks(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)
