"""Files that are whole or absent: written under a temporary name, fsynced, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in the message of safetensors' own error


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    if final.exists():  # an older version
        shutil.rmtree(final)
    temporary.rename(final)


@contextmanager
def _filled(final: Path, place: Callable[[Path, Path], None]) -> Iterator[Path]:
    """A directory beside `final` that `place` gives its name."""
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.rglob("*"):
            _fsync(path)
        place(temporary, final)
        _fsync(final.parent)
    except BaseException as error:  # Ctrl-C too must leave nothing behind
        shutil.rmtree(temporary, ignore_errors=True)
        code = _OS_ERROR.search(str(error)) if type(error).__name__ == "SafetensorError" else None
        if code:
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(final)) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` in one step."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A path to write to; the file takes the name `final` when the block ends well, and is removed when it does not."""
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        _fsync(temporary)
        temporary.rename(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of an append-only log; a last line that a crash cut short is left out."""
    return parse_json_lines(path.read_text(encoding="utf-8"))


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """All whole lines."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
