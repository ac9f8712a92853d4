"""Files of a folder of prepared data: read in place, or fetched into the cache of the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ngsgd.counting import counted
from ngsgd.data.fetching.node_cache import NodeCache, default_folder
from ngsgd.data.fetching.source import PREFIX, FileSource, UnsoundFileError, is_digest, is_sound
from ngsgd.data.storage import ArrayFile
from ngsgd.errors import DataError
from ngsgd.files import sha256
from ngsgd.object_storage.client import ObjectStore

T = TypeVar("T")

# a file can be removed between its fetch and its use, by another process that needs room
_TRIES = 5


class LocalFiles:
    """The files of a folder that this process sees, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def root(self, name: str) -> Path:
        """Return the path of an index, or of a file that the index does not list."""
        return self.folder / name

    def path(self, name: str, digest: str) -> Path:
        """Return the path of a file with this SHA-256, for the life of this object.

        Raises UnsoundFileError if it is missing or damaged.
        """
        path = self.folder / name
        if not is_sound(path, digest):
            raise UnsoundFileError(f"{path} is missing or does not match its checksum; remove {self.folder} and run again.")
        return path

    def arrays(self, name: str, digest: str) -> ArrayFile:
        """Return the mapped arrays of a file with this SHA-256; raises as `path`."""
        return ArrayFile(self.path(name, digest))

    def prefetch(self, digests: Sequence[str]) -> None:
        """Fetch files in the background, unless they are here; errors are ignored."""


@dataclass(frozen=True)
class SharedFolder:
    """A folder of the coordinator that workers read."""

    path: str
    roots: Mapping[str, str]  # name -> SHA-256 of the index and of the files that it does not list


@dataclass(frozen=True)
class RemoteData:
    """Access to folders that this node does not see; picklable."""

    folders: tuple[SharedFolder, ...]
    source: FileSource
    max_bytes: int
    progress: Callable[[], object] = lambda: None  # while bytes arrive; stays in this process

    def __reduce__(self) -> tuple[type[RemoteData], tuple[object, ...]]:
        return RemoteData, (self.folders, self.source, self.max_bytes)

    def files(self, folder: str) -> Files:
        """Files of a folder: fetched if it is one of these folders, else read in place."""
        for one in self.folders:
            if one.path == folder:
                return FetchedFiles(one, self.source, NodeCache(default_folder(), self.max_bytes), self.progress)
        return LocalFiles(Path(folder))


class FetchedFiles:
    """Files of a folder of the coordinator, copied from `source` to the cache of this node.

    `progress` is called while bytes arrive.
    """

    def __init__(self, folder: SharedFolder, source: FileSource, cache: NodeCache,
                 progress: Callable[[], object] = lambda: None) -> None:
        self.folder, self.source, self.cache, self._progress = folder, source, cache, progress
        # descriptors whose lock keeps small files in the cache
        self._kept: dict[str, int] = {}
        self._lock = threading.Lock()
        # by the thread that fetches the files of the newest request, one after another
        self._wanted: list[str] = []
        self._is_fetching = False

    def __del__(self) -> None:
        for descriptor in self._kept.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def root(self, name: str) -> Path:
        if name not in self.folder.roots:
            raise UnsoundFileError(f"{self.folder.path} has no {name} for this node; resume the run.")
        return self.path(name, self.folder.roots[name])

    def path(self, name: str, digest: str) -> Path:
        def keep(path: Path) -> Path:
            if path.name not in self._kept:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    # another process may have removed the file before it was locked
                    if not os.path.samestat(os.fstat(descriptor), path.stat()):
                        raise FileNotFoundError(path)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._kept[path.name] = descriptor
            return path
        return self._used(name, digest, keep)

    def arrays(self, name: str, digest: str) -> ArrayFile:
        # the map keeps the lock, until it is freed
        return self._used(name, digest, lambda path: ArrayFile(path, is_locked=True))

    def prefetch(self, digests: Sequence[str]) -> None:
        wanted = [digest for digest in digests if self.cache.found(digest) is None]
        with self._lock:
            self._wanted = wanted
            if wanted and not self._is_fetching:
                self._is_fetching = True
                threading.Thread(target=self._fetch_wanted, name="ngsgd-fetch", daemon=True).start()

    def _fetch_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._is_fetching = False
                    return
                digest = self._wanted.pop(0)
            # the job that needs the file fetches it again, and reports the error
            with contextlib.suppress(Exception):
                self.cache.fetch(digest, self.source, self._progress)

    def _used(self, name: str, digest: str, use: Callable[[Path], T]) -> T:
        """Use a verified file of the cache; a damaged one is fetched again once."""
        is_again = False
        for _ in range(_TRIES):
            try:
                path = self.cache.found(digest) or self.cache.fetch(digest, self.source, self._progress)
                if is_sound(path, digest):
                    return use(path)
                is_damaged, reason = path.exists(), "it is damaged in the cache of the node"
            except FileNotFoundError:
                continue
            except UnsoundFileError as error:
                is_damaged, reason = True, str(error)
            if is_damaged and is_again:
                break
            is_again = is_again or is_damaged
            self.cache.remove(digest)
        else:
            reason = "other processes of the node removed it again and again; raise data.node_cache_gb"
        raise UnsoundFileError(f"{self.folder.path}/{name} could not be fetched to {os.uname().nodename}: {reason}. If the file of "
                               f"the coordinator is damaged, remove {self.folder.path} there and run again.")


Files = LocalFiles | FetchedFiles


@dataclass(frozen=True)
class Offer:
    """A folder that workers can fetch, and the path of each of its files by SHA-256."""

    folder: SharedFolder
    paths: Mapping[str, Path]


def offer_of(directory: Path, roots: Iterable[str], listed: Mapping[str, str]) -> Offer:
    """Describe a folder of prepared data with an index, which gives the SHA-256 of `listed` files.

    Raises DataError if a file of `roots` (the index, and files that it does not list) cannot be
    read, or the index names a path or no SHA-256.
    """
    try:
        digests = {name: sha256(directory / name) for name in roots}
    except OSError as error:
        raise DataError(f"{directory} cannot be read ({error}); remove it and run again.") from error
    for name, digest in listed.items():
        if Path(name).name != name or name.startswith(".") or not is_digest(digest):
            raise DataError(f"the index of {directory} lists {name!r} with the checksum {digest!r}; remove {directory} and run "
                            "again.")
    paths = {digest: directory / name for name, digest in {**listed, **digests}.items()}
    return Offer(SharedFolder(str(directory), digests), paths)


def publish(offers: Iterable[Offer], store: ObjectStore, report: Callable[[str], object]) -> int:
    """Write the files that a bucket does not have, each as an object named by its SHA-256.

    Returns the number of objects that were written. Raises DataError if a file is damaged, and
    ObjectStorageError if the bucket cannot be written.
    """
    paths = {digest: path for offer in offers for digest, path in offer.paths.items()}
    there = store.sizes(PREFIX)
    missing = {digest: path for digest, path in paths.items() if there.get(PREFIX + digest) != _size(path)}
    if missing:
        total = sum(map(_size, missing.values()))
        report(f"writing {len(missing)} of {counted(len(paths), 'file')} of prepared data ({total / 1e6:.3g} MB) to "
               f"{store.url}/{PREFIX}")
    for digest, path in missing.items():
        if not is_sound(path, digest):
            raise DataError(f"{path} is missing or does not match its checksum; remove {path.parent} and run again.")
        if PREFIX + digest in there:
            # it is incomplete, because its name is not its content
            store.upload(PREFIX + digest, path)
        else:
            store.upload_new(PREFIX + digest, path)
    return len(missing)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # publishing reports it as missing
        return -1
