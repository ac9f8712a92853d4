"""Runs in object storage: a working folder on this machine, published after each commit."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ngsgd.errors import CheckpointError, ConfigError, NgsgdError, ObjectStorageError
from ngsgd.files import make_directories, read_regular_text, write_text
from ngsgd.object_storage.client import ObjectStore, is_url
from ngsgd.object_storage.folder import StoredFolder, fetch, newest_manifest
from ngsgd.object_storage.lease import Lease, reserve
from ngsgd.training.storage.lock import RunLock, holder_of

# file of a working folder that contains the URL of the run
_URL = ".object-storage"


class StoredLock(RunLock):
    """The lock of a working folder and the lease of its run."""

    def __init__(self, lock: RunLock, folder: StoredFolder) -> None:
        super().__init__(lock.path, lock.purpose, lock.fence)
        self._lock = lock
        self._folder = folder
        self.fence = max(lock.fence, folder.lease.fence)

    def acquire(self) -> None:
        """Nothing: the lock is held before this object exists."""

    def release(self) -> None:
        """Nothing: `locked` releases the lock."""

    def require_held(self) -> None:
        """Raise RunLockedError if another process has taken the lock or the lease since."""
        self._lock.require_held()
        self._folder.lease.require_held()

    def committed(self) -> None:
        """Publish the working folder."""
        self._folder.publish()

    def stop_requested(self) -> bool:
        """Whether `ngsgd stop URL` was called."""
        return self._folder.lease.stop_requested()


def local_root(output_dir: str) -> Path:
    """The folder of this machine for an output directory: itself, or a cache if it is a URL."""
    if not is_url(output_dir):
        return Path(output_dir)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ngsgd" / "object-storage" / hashlib.sha256(output_dir.rstrip("/").encode()).hexdigest()[:16]


def url_of(folder: Path) -> str:
    """URL of the run that a folder is the working folder of; empty for other folders."""
    try:
        return read_regular_text(folder / _URL, max_bytes=4096).strip()
    except (OSError, ValueError):
        return ""


def check_output_url(url: str) -> None:
    """Raise an error unless objects can be written there, and conditional writes work.

    Raises:
        ConfigError: the URL is not valid, or the service has no conditional writes.
        ObjectStorageError: the bucket cannot be reached, or access is denied.
    """
    store = ObjectStore(f"{url.rstrip('/')}/.check-{os.urandom(8).hex()}", retry_s=20.0)
    try:
        if not reserve(store) or reserve(store):
            raise ConfigError(f"the service of {url} ignores the condition of a write (If-None-Match), so it cannot keep two "
                              "coordinators apart; use another service.")
        with Lease(store, "check") as lease:
            lease.renew()
    finally:
        with contextlib.suppress(ObjectStorageError):
            store.delete(list(store.keys()))


def reserved(folder: Path, output_url: str) -> bool:
    """Reserve the name of a new run; False if there is such a run."""
    url = f"{output_url.rstrip('/')}/{folder.name}"
    if not reserve(ObjectStore(url)):
        return False
    write_text(folder / _URL, url + "\n")
    return True


@contextlib.contextmanager
def locked(folder: Path, lock: RunLock, report: Callable[[str], None]) -> Iterator[StoredLock]:
    """Hold the lease of a run; make its working folder current, and publish it at the end.

    Raises:
        RunLockedError: another process holds the lease.
        ObjectStorageError: the store cannot be used.
    """
    store = ObjectStore(url_of(folder))
    with Lease(store, lock.purpose, report=report) as lease:
        stored = StoredFolder(store, folder, lease)
        if lease.head.manifest:
            fetch(store, stored.manifest, folder, remove_others=True)
            stored.remove_abandoned()
        try:
            yield StoredLock(lock, stored)
        except BaseException:
            # error.json, too; the first error is the one to report
            with contextlib.suppress(NgsgdError, OSError):
                stored.publish()
            raise
        stored.publish()


def fetched(url: str) -> Path:
    """Return the working folder of a run, with the files of its newest commit.

    Raises:
        ConfigError: there is no such run.
        CheckpointError: an object is damaged.
        ObjectStorageError: the store cannot be used.
    """
    output_url, _, name = url.rstrip("/").rpartition("/")
    folder = local_root(output_url) / name
    if holder_of(folder / "lock"):
        # a process of this machine writes to it
        return folder
    store = ObjectStore(url)
    manifest = newest_manifest(store)
    if manifest is None:
        raise ConfigError(f"{url} is not a run; ngsgd status {output_url} lists the runs there.")
    make_directories(folder)
    write_text(folder / _URL, store.url + "\n")
    try:
        fetch(store, manifest, folder, remove_others=True)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} could not be written ({error.strerror}); free disk space, or set "
                              "XDG_CACHE_HOME to another folder.") from error
    return folder
