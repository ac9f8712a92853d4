"""A folder in object storage: each commit is a manifest of files, which are stored by digest.

Keys below the URL of the folder:

- `head.json`: the lease, with key and SHA-256 of the newest manifest;
- `manifests/FENCE-NUMBER.json`: path -> key, SHA-256 and size of each file and each part of a log;
- `objects/FENCE-SHA256`: the content of a file, or of a part of a log.

Each holder of the lease writes only keys with its own fencing number. So it cannot remove what a
later holder wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from ngsgd.errors import CheckpointError, ObjectStorageError
from ngsgd.files import make_directories, new_file, open_regular, parse_json, sealed, sha256, unsealed
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.lease import Lease, read_head

OBJECTS, MANIFESTS = "objects", "manifests"
_LOCAL = ("lock", "process.json")  # files of one machine, not of the run
_LOG_SUFFIXES = (".jsonl", ".log")
# a part of a log is merged with the previous part if that is less than this many times larger
_GROWTH = 2
# size, time of the last change in ns, and inode: they change with the content of a file
_State = tuple[int, int, int]
_TAIL_BYTES = 4096  # the end of the stored part of a log, which must not have changed
_NUM_CONNECTIONS = 4
_TRIES = 3  # of a file that changes while it is stored
_KEY = re.compile(rf"(?:{OBJECTS}|{MANIFESTS})/(\d+)-[0-9a-f]+(?:\.json)?")


@dataclass(frozen=True)
class Part:
    """An object: a complete file, or a part of a log."""

    key: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The files of one commit."""

    number: int = 0
    files: Mapping[str, Part] = field(default_factory=dict)
    # append-only files; their content is all parts in order
    logs: Mapping[str, Sequence[Part]] = field(default_factory=dict)

    def keys(self) -> set[str]:
        return {part.key for part in (*self.files.values(), *itertools.chain(*self.logs.values()))}


@dataclass
class _Log:
    """The stored parts of a log, and the end of their content."""

    parts: list[Part] = field(default_factory=list)
    tail: bytes = b""

    def added(self, path: Path) -> bytes:
        """Return the lines that are not stored yet, and remove the parts that they replace."""
        with open_regular(path) as file:
            start = sum(part.num_bytes for part in self.parts)
            file.seek(max(0, start - len(self.tail)))
            if file.read(len(self.tail)) != self.tail:
                # the stored end changed: all of it is stored again
                self.parts, start = [], 0
            file.seek(start)
            content = file.read()
            # a line may be incomplete
            if (end := start + content.rfind(b"\n") + 1) == start:
                return b""
            # so that the number of parts grows with the logarithm of the size
            while self.parts and self.parts[-1].num_bytes <= _GROWTH * (end - start):
                start -= self.parts.pop().num_bytes
            file.seek(start)
            content = file.read(end - start)
        self.tail = content[-_TAIL_BYTES:]
        return content


def read_manifest(store: ObjectStore, key: str, digest: str) -> Manifest:
    """Read a manifest and check its digest; raise CheckpointError if it is missing or damaged."""
    found = store.get(key)
    try:
        if found is None:
            raise ValueError("it does not exist")
        if hashlib.sha256(found[0]).hexdigest() != digest:
            raise ValueError("its checksum does not match")
        about = unsealed("stored run", parse_json(found[0].decode("utf-8")))
        files = {_checked(path): _part(part) for path, part in about["files"].items()}
        logs = {_checked(path): [_part(part) for part in parts] for path, parts in about["logs"].items()}
        return Manifest(int(about["number"]), files, logs)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{store.url}/{key} is damaged ({error}); restore it from a backup, or start a new run.") from error


def newest_manifest(store: ObjectStore) -> Manifest | None:
    """The manifest that head.json names; None before a commit; raises as `read_manifest`."""
    head = read_head(store)
    while head and head.manifest:
        try:
            return read_manifest(store, head.manifest, head.manifest_sha256)
        except CheckpointError:
            before, head = head, read_head(store)
            # two later commits removed it
            if head is None or head.manifest == before.manifest:
                raise
    return None


class StoredFolder:
    """Publishes the folder `path` of this machine under a lease, which this process holds."""

    def __init__(self, store: ObjectStore, path: Path, lease: Lease) -> None:
        self.store, self.path, self.lease = store, path, lease
        head = lease.head
        self.manifest = read_manifest(store, head.manifest, head.manifest_sha256) if head.manifest else Manifest()
        self._logs: dict[str, _Log] = {}
        self._known: dict[str, tuple[_State, Part]] = {}
        self._unused: list[str] = []

    def publish(self) -> None:
        """Commit the current content of the folder; raises as `Lease.commit`."""
        self.lease.require_held()
        names = sorted(_files_in(self.path))
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as connections:
            files = self._store_files([name for name in names if not name.endswith(_LOG_SUFFIXES)], connections)
            logs = self._store_logs([name for name in names if name.endswith(_LOG_SUFFIXES)], connections)
        manifest = Manifest(self.manifest.number + 1, files, logs)
        content = json.dumps(sealed("stored run", asdict(manifest))).encode()
        key = f"{MANIFESTS}/{self.lease.fence:06d}-{manifest.number:08d}.json"
        self.store.put(key, content)
        before = self.lease.head.manifest
        self.lease.commit(key, hashlib.sha256(content).hexdigest())
        # one commit later, so that a process that reads the previous manifest finds its objects;
        # a file may have an earlier content again
        used = manifest.keys()
        self.store.delete([key for key in self._unused if key not in used])
        self._unused = [*sorted(self.manifest.keys() - used), *([before] if before else [])]
        self.manifest = manifest

    def remove_abandoned(self) -> None:
        """Let the next commit remove what killed processes left, and earlier commits."""
        used = {*self.manifest.keys(), self.lease.head.manifest}
        found = [*self.store.keys(OBJECTS), *self.store.keys(MANIFESTS)]
        self._unused += [key for key in found
                         if key not in used and (match := _KEY.fullmatch(key)) and int(match[1]) < self.lease.fence]

    def _store_files(self, names: Sequence[str], connections: Executor) -> dict[str, Part]:
        """Store the files that changed; equal files are stored once."""
        known, self._known = self._known, {}
        by_digest = {part.sha256: part for part in (*self.manifest.files.values(), *(part for _, part in known.values()))}
        stored = {part.key for part in by_digest.values()}
        changing = list(names)
        for _ in range(_TRIES):
            read = {name: one for name in changing if (one := self._read(name, known.get(name), by_digest)) is not None}
            new = {part.key: name for name, (_, part) in read.items() if part.key not in stored}
            uploads = connections.map(self._upload, new, new.values(), [read[name][0] for name in new.values()])
            is_stored = dict(zip(new, uploads, strict=True))
            changing = [name for name, (_, part) in read.items() if not is_stored.get(part.key, True)]
            self._known |= {name: one for name, one in read.items() if name not in changing}
            # a file that another thread writes at this time is read again
            if not changing:
                break
        # the next commit contains the new content
        earlier = {name: self.manifest.files[name] for name in changing if name in self.manifest.files}
        return {**earlier, **{name: part for name, (_, part) in self._known.items()}}

    def _read(self, name: str, known: tuple[_State, Part] | None, by_digest: Mapping[str, Part]) -> tuple[_State, Part] | None:
        """The state and the part of a file; None if it was removed."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path / name) as file:
            state = _state(file)
            if known and known[0] == state:
                return known
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return state, by_digest.get(digest) or Part(self._key(digest), digest, state[0])
        return None

    def _upload(self, key: str, name: str, state: _State) -> bool:
        """Store a file; False if it is not the one that was read, or changed meanwhile."""
        with contextlib.suppress(FileNotFoundError), open_regular(self.path / name) as file:
            if _state(file) == state:
                self.store.upload(key, file)
                return _state(file) == state
        return False

    def _store_logs(self, names: Sequence[str], connections: Executor) -> dict[str, Sequence[Part]]:
        new: dict[str, bytes] = {}
        for name in names:
            log = self._logs.setdefault(name, _Log())
            if content := log.added(self.path / name):
                digest = hashlib.sha256(content).hexdigest()
                log.parts.append(Part(self._key(digest), digest, len(content)))
                new[log.parts[-1].key] = content
        try:
            list(connections.map(lambda key: self.store.put(key, new[key]), new))
        except ObjectStorageError:
            # store all of it again
            self._logs = {}
            raise
        return {name: tuple(self._logs[name].parts) for name in names}

    def _key(self, digest: str) -> str:
        return f"{OBJECTS}/{self.lease.fence:06d}-{digest}"


def fetch(store: ObjectStore, manifest: Manifest, path: Path,
          wanted: Callable[[str], bool] = lambda name: True, *, remove_others: bool = False) -> None:
    """Write the files of a manifest to a folder; files that are there already are kept.

    Args:
        store: the objects of the folder.
        manifest: a commit.
        path: the folder, which is created.
        wanted: selects files by their path within the folder.
        remove_others: remove files that the manifest does not contain.

    Raises:
        CheckpointError: an object does not have its digest.
        ObjectStorageError: an object cannot be read.
        OSError: the folder cannot be written.
    """
    make_directories(path)
    contents = {**{name: (part,) for name, part in manifest.files.items()}, **manifest.logs}
    for name in _files_in(path) if remove_others else ():
        if name not in contents:
            (path / name).unlink()
            # a checkpoint without files would be a damaged one
            if (path / name).parent.parent not in (path, path.parent):
                with contextlib.suppress(OSError):
                    (path / name).parent.rmdir()
    for name, parts in contents.items():
        if wanted(name):
            _fetch_file(store, parts, path / name)


def _fetch_file(store: ObjectStore, parts: Sequence[Part], path: Path) -> None:
    if len(parts) == 1 and path.is_file() and path.stat().st_size == parts[0].num_bytes and sha256(path) == parts[0].sha256:
        return
    make_directories(path.parent)
    with new_file(path) as temporary:
        for number, part in enumerate(parts):
            if number == 0:
                digest = store.download(part.key, temporary)
            else:
                with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".") as more:
                    digest = store.download(part.key, Path(more.name))
                    with temporary.open("ab") as file:
                        shutil.copyfileobj(more, file)
            if digest != part.sha256:
                raise CheckpointError(f"{store.url}/{part.key} is damaged: its checksum does not match; restore an earlier "
                                      "version of this object, or start a new run.")


def _files_in(folder: Path) -> Iterator[str]:
    """Yield the paths of all regular files that belong to the run."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(parent, name)
            is_file = not name.startswith(".") and not path.is_symlink() and path.is_file()
            if is_file and (relative := path.relative_to(folder).as_posix()) not in _LOCAL:
                yield relative


def _state(file: BufferedReader) -> _State:
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns, about.st_ino


def _checked(name: str) -> str:
    """Return a path of a manifest; raise ValueError if it leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or path.as_posix() != name or "\0" in name:
        raise ValueError(f"it contains the path {name!r}")
    return name


def _part(about: Mapping[str, Any]) -> Part:
    part = Part(str(about["key"]), str(about["sha256"]), int(about["num_bytes"]))
    if not _KEY.fullmatch(part.key):
        raise ValueError(f"it contains the key {part.key!r}")
    return part
