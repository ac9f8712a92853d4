"""Files that are whole or absent: written under a temporary name, fsynced, renamed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in the message of safetensors' own error


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object in canonical form: sorted keys, no white space."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def make_directories(path: Path) -> None:
    """Create a directory and its parents so that they survive a power cut."""
    missing = [path, *path.parents]
    missing = missing[:next((i for i, one in enumerate(missing) if one.is_dir()), len(missing))]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        fsync(made.parent)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A directory to fill; it takes the name `final` when the block ends well, and is removed when it does not.

    A full or failing disk raises OSError, whatever the library that wrote calls it.
    """
    with _filled(final, _replace) as temporary:
        yield temporary


@contextmanager
def shared_directory(final: Path, index: str) -> Iterator[Path]:
    """As `new_directory`, for content that its name decides: who comes second keeps what is there, as others may be reading it.

    What is there without the file `index` is not whole, and is replaced.
    """
    def place(temporary: Path, final: Path) -> None:
        if (final / index).exists():
            shutil.rmtree(temporary)
        else:
            _replace(temporary, final)
    with _filled(final, place) as temporary:
        yield temporary


def _replace(temporary: Path, final: Path) -> None:
    if final.is_dir() and not final.is_symlink():  # an older version
        shutil.rmtree(final)
    elif final.is_symlink() or final.exists():
        final.unlink()
    temporary.rename(final)


@contextmanager
def _filled(final: Path, place: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A directory beside `final` that `place` gives its name."""
    make_directories(final.parent)
    temporary = _temporary_name(final)
    temporary.mkdir()
    owned = _own(temporary)
    try:
        yield temporary
        for path in temporary.rglob("*"):
            fsync(path)
        fsync(temporary)
        place(temporary, final)
        fsync(final.parent)
    except BaseException as error:  # Ctrl-C too must leave nothing behind
        shutil.rmtree(temporary, ignore_errors=True)
        code = _OS_ERROR.search(str(error)) if type(error).__name__ == "SafetensorError" else None
        if code:
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(final)) from error
        raise
    finally:
        os.close(owned)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` in one step."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A path to write to; the file takes the name `final` when the block ends well, and is removed when it does not."""
    temporary = _temporary_name(final)
    temporary.touch()
    owned = _own(temporary)
    try:
        yield temporary
        fsync(temporary)
        temporary.rename(final)
        fsync(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(owned)


def _temporary_name(final: Path) -> Path:
    return final.with_name(f".{final.name[:200]}.{uuid.uuid4().hex[:8]}.tmp")


def _own(temporary: Path) -> int:
    """Locks a temporary file or directory for as long as its writer lives; returns the descriptor that holds the lock."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    # a file system without locks loses only the automatic removal
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_abandoned(directory: Path) -> None:
    """Remove temporary files and directories whose writer was killed; those of a living writer stay."""
    for path in directory.glob(".*.tmp"):
        # the writer may rename or remove it at this moment
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


class JsonLines:
    """An append-only log of JSON objects, one per line, that never keeps half a line.

    A write that fails takes back what it wrote; a line that a killed process left unfinished is removed when the
    log is opened again.  One process at a time may append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if is_new:
            fsync(path.parent)
        self._remove_unfinished_line()

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one line.  It survives the death of this process; `sync` makes it survive a power cut."""
        line = (json.dumps(values) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        try:
            # a nearly full disk takes a part of the line first
            while line:
                line = line[os.write(self._descriptor, line):]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Flush all lines to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _remove_unfinished_line(self) -> None:
        size = end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - 65536)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        if end < size:
            os.ftruncate(self._descriptor, end)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of an append-only log; lines that a crash cut short or that hold anything else are skipped."""
    return parse_json_lines(path.read_text(encoding="utf-8", errors="replace"))


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """All lines that hold a JSON object."""
    return [line for line in map(_parsed, text.split("\n")) if isinstance(line, dict)]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
