"""A copy of the objects below a URL in a folder of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ngsgd.counting import counted
from ngsgd.errors import DataError
from ngsgd.files import new_file, read_json, write_text
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.urls import cache_root

_INDEX, _LOCK = ".objects.json", ".lock"

# size in bytes, and ETag
State = tuple[int, str]


def mirrored(store: ObjectStore, report: Callable[[str], object]) -> Path:
    """Return a folder with a copy of all objects; only those that changed are copied.

    The list of keys, the sizes and the ETags are compared with the last copy. Files without an
    object are removed.

    Args:
        store: the objects below a URL.
        report: receives one line if objects are copied.

    Raises:
        DataError: there are no objects, a key is no path, or the folder cannot be written.
        ObjectStorageError: the objects cannot be read.
    """
    folder = cache_root("sources", store.url)
    found = store.states()
    # consoles write empty objects for folders
    folders = {parent.as_posix() for key in found for parent in PurePosixPath(key).parents}
    wanted = {key: state for key, state in found.items() if state[0] or key.rstrip("/") not in folders}
    if not wanted:
        raise DataError(f"there are no objects below {store.url}/; check the URL, which must be that of a folder.")
    for key in wanted:
        _check(key, store.url)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder / _LOCK):
            _update(store, folder, wanted, report)
    except OSError as error:
        raise DataError(f"the copy of {store.url} in {folder} could not be written ({error.strerror or error}); free disk space, "
                        "or set XDG_CACHE_HOME to a folder on another disk.") from error
    return folder


def _update(store: ObjectStore, folder: Path, wanted: dict[str, State], report: Callable[[str], object]) -> None:
    here = {key: state for key, state in _known(folder).items() if _size(folder / key) == state[0]}
    missing = [key for key, state in wanted.items() if here.get(key) != state]
    if missing:
        total = sum(wanted[key][0] for key in missing)
        report(f"copying {len(missing)} of {counted(len(wanted), 'file')} ({total / 1e6:.3g} MB) from {store.url} to {folder}")
    try:
        for key in missing:
            _copy(store, key, folder / key, wanted[key][0])
            here[key] = wanted[key]
    finally:
        # a later process continues with the others
        write_text(folder / _INDEX, json.dumps(here))
    kept = {*wanted, _INDEX, _LOCK}
    for path in [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]:
        if path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def _copy(store: ObjectStore, key: str, path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        store.download(key, temporary)
        found = temporary.stat().st_size
        if found != size:
            raise DataError(f"{store.url}/{key} has {found} bytes instead of {size}; it was replaced during the copy. Run again.")


def _known(folder: Path) -> dict[str, State]:
    """The objects of the last copy; empty if that is not known."""
    try:
        return {str(key): (int(size), str(e_tag)) for key, (size, e_tag) in read_json(folder / _INDEX).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _check(key: str, url: str) -> None:
    """Raise DataError if a key does not name a file below the folder."""
    path = PurePosixPath(key)
    is_file = path.parts and not path.is_absolute() and ".." not in path.parts and path.as_posix() == key and "\0" not in key
    if not is_file or key in (_INDEX, _LOCK):
        raise DataError(f"{url} contains the key {key!r}, which is no name of a file; remove that object.")


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return -1


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
