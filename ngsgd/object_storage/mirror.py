"""A copy of the objects below a URL in a folder of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from ngsgd.counting import counted
from ngsgd.errors import DataError
from ngsgd.files import new_file, read_json, sealed, take_lock, unsealed, write_text
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.urls import cache_root

_INDEX, _LOCK = ".objects.json", ".lock"

State = tuple[int, str]  # size in bytes, and ETag
_held: dict[Path, int] = {}  # descriptors of the locks of folders that this process reads


def mirrored(store: ObjectStore, report: Callable[[str], object]) -> Path:
    """Return a folder with a copy of all objects; only those that changed are copied and reported.

    The list of keys, the sizes and the ETags are compared with the last copy. Files without an
    object are removed. This process may read the folder until it ends: others copy objects that
    change into another folder.

    Raises:
        DataError: there are no objects, a key is no path, or the folder cannot be written.
        ObjectStorageError: the objects cannot be read.
    """
    root = cache_root("sources", store.url)
    found = store.states()
    # consoles write empty objects for folders
    folders = {parent.as_posix() for key in found for parent in PurePosixPath(key).parents}
    wanted = {key: state for key, state in found.items() if state[0] or key.rstrip("/") not in folders}
    if not wanted:
        raise DataError(f"there are no objects below {store.url}/; check the URL, which must be that of a folder.")
    for key in wanted:
        path = PurePosixPath(key)
        is_file = path.parts and not path.is_absolute() and ".." not in path.parts
        if not is_file or path.as_posix() != key or "\0" in key or key in (_INDEX, _LOCK):
            raise DataError(f"{store.url} contains the key {key!r}, which is no name of a file; remove that object.")
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = next(one for one in _candidates(root, wanted) if _is_current(store, one, wanted, report))
        clear_others(folder)
    except OSError as error:
        raise DataError(f"the copy of {store.url} in {root} could not be written ({error.strerror or error}); free disk space, "
                        "or set XDG_CACHE_HOME to a folder on another disk.") from error
    return folder


def _candidates(root: Path, wanted: dict[str, State]) -> Iterator[Path]:
    """Yield numbered folders: first those that are a copy already."""
    existing = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
    yield from sorted((root / str(number) for number in existing), key=lambda folder: _known(folder) != wanted)
    yield from (root / str(number) for number in itertools.count() if number not in existing)


def _is_current(store: ObjectStore, folder: Path, wanted: dict[str, State], report: Callable[[str], object]) -> bool:
    """Update a folder that no other process reads; lock it if it is a copy of the objects then."""
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder not in _held:
        _held[folder] = _opened(folder)
    is_current = False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(_held[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
            _update(store, folder, wanted, report)
        # waits for a process that copies; it may have copied other objects
        fcntl.flock(_held[folder], fcntl.LOCK_SH)
        is_current = _known(folder) == wanted
    finally:
        if not is_current:
            os.close(_held.pop(folder))
    return is_current


def clear_others(folder: Path, kept: str = "") -> None:
    """Remove the content of the other folders, except `kept`, that no process has locked."""
    for other in filter(Path.is_dir, folder.parent.iterdir()):
        if other not in (folder, folder.parent / kept, *_held) and (descriptor := locked(other)) is not None:
            for path in other.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                # another process may wait for this lock
                elif path.name != _LOCK:
                    path.unlink(missing_ok=True)
            os.close(descriptor)


def locked(folder: Path) -> int | None:
    """Lock a folder of copies; return the descriptor, None if another process uses the folder."""
    # on a file system without locks two readers may disturb each other, but no training
    if take_lock(descriptor := _opened(folder)):
        return descriptor
    os.close(descriptor)
    return None


def _opened(folder: Path) -> int:
    # the file is never removed: two processes could lock two files of this name
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _update(store: ObjectStore, folder: Path, wanted: dict[str, State], report: Callable[[str], object]) -> None:
    here = {key: state for key, state in _known(folder).items() if key in wanted}
    if missing := [key for key, state in wanted.items() if here.get(key) != state]:
        total = sum(wanted[key][0] for key in missing)
        report(f"copying {len(missing)} of {counted(len(wanted), 'file')} ({total / 1e6:.3g} MB) from {store.url} to {folder}")
    try:
        for key in missing:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            with new_file(folder / key) as temporary:
                store.download(key, temporary)
                if (found := temporary.stat().st_size) != wanted[key][0]:
                    raise DataError(f"{store.url}/{key} has {found} bytes instead of "
                                    f"{wanted[key][0]}; it was replaced during the copy. Run again.")
            here[key] = wanted[key]
    finally:
        # a later process continues with the others
        write_text(folder / _INDEX, json.dumps(sealed("copies", {"objects": here})))
    kept = {*wanted, _INDEX, _LOCK}
    for path in [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]:
        if path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def _known(folder: Path) -> dict[str, State]:
    """The objects whose copies are complete; empty if that is not known."""
    try:
        objects = unsealed("copies", read_json(folder / _INDEX))["objects"]
        found = {str(key): (int(size), str(e_tag)) for key, (size, e_tag) in objects.items()}
        return {key: state for key, state in found.items() if _size(folder / key) == state[0]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return -1
