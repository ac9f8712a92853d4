"""Runs in object storage: a working folder on this machine, published after each commit.

Only a process that holds the lock of the working folder changes it. A command that only reads has a
copy that no other process uses, so it can undo no commit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ngsgd.errors import CheckpointError, ConfigError, NgsgdError, ObjectStorageError
from ngsgd.files import make_directories, read_regular_text, write_text
from ngsgd.object_storage import mirror
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.folder import StoredFolder, fetch, newest_manifest
from ngsgd.object_storage.lease import Lease, read_head, request_stop, reserve
from ngsgd.object_storage.urls import cache_root, local_root
from ngsgd.training.storage.lock import RunLock

# file of a working folder, or of a copy, that contains the URL of the run
_URL = ".object-storage"
# files that only training and decoding need
_MODELS = ".safetensors"
# a commit may remove the objects of the one before the previous one while they are read
_TRIES = 10
_COPIES = "object-storage-copies"
# the folders of this process for copies, by the folder of all of them
_folders: dict[Path, Path] = {}
_copying = threading.Lock()


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


def url_of(folder: Path) -> str:
    """URL of the run that a folder is the working folder of; empty for other folders."""
    try:
        return read_regular_text(folder / _URL, max_bytes=4096).strip()
    except (OSError, ValueError):
        return ""


def address(folder: Path) -> str:
    """How a user names a run: the URL of a run in object storage, else its folder."""
    return url_of(folder) or str(folder)


def stop(folder: Path) -> bool:
    """Ask the process that trains a run in object storage to stop; False if there is none."""
    return request_stop(ObjectStore(url_of(folder)))


def holder(folder: Path) -> tuple[Mapping[str, Any], float, str]:
    """The holder of the lease or {}, seconds since its last sign of life (about), its command."""
    head = read_head(ObjectStore(url_of(folder)))
    if head is None or head.version is None:
        return {}, math.inf, ""
    return head.holder, max(0.0, time.time() - head.version.written_s), head.purpose


def check_output_url(url: str) -> None:
    """Raise an error unless objects can be written there, and conditional writes work."""
    store = ObjectStore(f"{url.rstrip('/')}/.check-{os.urandom(8).hex()}", retry_s=20.0)
    try:
        # the first answer does not count: a write whose answer was lost is repeated and refused
        reserve(store)
        if reserve(store):
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
    """Hold the lease of a run; make its working folder current, and publish it at the end."""
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


def fetched(url: str, *, with_models: bool = True) -> Path | None:
    """Return a copy of a run with the files of its newest commit, which only this process uses.

    None if there is no such run. `with_models` also fetches checkpoints and models, which `ngsgd
    status` and `logs` do not need.

    Raises:
        ConfigError: the URL is not valid.
        CheckpointError: an object is damaged, or the disk of this machine is full.
        ObjectStorageError: the store cannot be used.
    """
    store = ObjectStore(url)
    if newest_manifest(store) is None:
        return None
    output_url, _, name = store.url.rpartition("/")
    with _copying, _disk_errors_named(store.url):
        folder = copies_of(output_url) / name
        make_directories(folder)
        _fill(store, folder, lambda file: with_models or not file.endswith(_MODELS))
    return folder


def fetched_to_write(url: str) -> Path | None:
    """Return the working folder of a run, to continue it; RunLockedError if a process uses it."""
    store, folder = ObjectStore(url), _working_folder(url)
    if newest_manifest(store) is None:
        return None
    with _disk_errors_named(store.url):
        make_directories(folder)
        with RunLock(folder / "lock", "resume"):
            _fill(store, folder)
    return folder


def _fill(store: ObjectStore, folder: Path, wanted: Callable[[str], bool] = lambda file: True) -> None:
    """Make a folder equal to the newest commit; no other process uses it."""
    write_text(folder / _URL, store.url + "\n")
    for last in (*(False,) * (_TRIES - 1), True):
        if (manifest := newest_manifest(store)) is None:
            return
        try:
            fetch(store, manifest, folder, wanted, remove_others=True)
            return
        except ObjectStorageError:
            if last or newest_manifest(store) == manifest:
                raise


def copies_of(output_url: str) -> Path:
    """Return a folder for copies of the runs below a URL, locked until this process ends."""
    if (root := cache_root(_COPIES, output_url)) not in _folders:
        for number in itertools.count():
            folder = root / str(number)
            make_directories(folder)
            if mirror.locked(folder) is not None:
                break
        # The first one is kept, so that the next command copies only changes.
        mirror.clear_others(folder, kept="0")
        _folders[root] = folder
    return _folders[root]


@contextlib.contextmanager
def _disk_errors_named(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or url} could not be written ({error.strerror}); free disk space, or set "
                              "XDG_CACHE_HOME to another folder.") from error


def known_folder(url: str) -> Path | None:
    """Return the copy of this process, or the working folder of a run; None if there is neither."""
    output_url, _, name = url.rstrip("/").rpartition("/")
    copies = _folders.get(cache_root(_COPIES, output_url))
    for root in (*([copies] if copies else []), local_root(output_url)):
        found = [file.parent.name for file in root.glob(f"*/{_URL}")]
        if known := name if name in found else newest_named(found, name):
            return root / known
    return None


def newest_named(names: Iterable[str], name: str) -> str | None:
    """The newest of the run folders of a name=, which end with the time; None if there is none."""
    stamped = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?")
    return max(filter(stamped.fullmatch, names), default=None)


def with_newest_events(copy: Path) -> Path:
    """Return the folder with the newest events of a run: its copy, or the working folder."""
    # A process of this machine that could not publish left its error in the working folder.
    url = url_of(copy)
    folders = [copy, _working_folder(url)] if url else [copy]
    # event logs only grow; of equals the working folder, which may have an error
    sizes = [log.stat().st_size if (log := folder / "events.jsonl").is_file() else -1 for folder in folders]
    return folders[-1] if sizes[-1] >= max(sizes) and url_of(folders[-1]) == url else copy


def names_of_runs(output_url: str) -> list[str]:
    """Return the names of all runs below a URL."""
    return sorted(ObjectStore(output_url).folders())


def fetched_runs(output_url: str) -> list[Path]:
    """Return copies of all runs below a URL, without models."""
    found = [fetched(f"{output_url.rstrip('/')}/{name}", with_models=False) for name in names_of_runs(output_url)]
    return [folder for folder in found if folder is not None]


def _working_folder(url: str) -> Path:
    output_url, _, name = url.rstrip("/").rpartition("/")
    return local_root(output_url) / name
