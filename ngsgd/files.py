"""Files that are whole or absent: written under a temporary name, fsynced, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

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


# Files from others: bounded, regular, and checked -----------------------------------------------------

MAX_TEXT_BYTES = 256 << 20   # default limit of a file that is read into memory at once
DIGEST = "sha256_of_index"   # key of an index file's own digest


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    A FIFO, socket, device or folder is refused before it is opened, because reading one may block forever or never end.

    Raises:
        OSError: the file cannot be read, or is not a regular file.  `strerror` gives the reason.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # a FIFO may have taken its place since: open without blocking and look again
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than the limit.  `strerror` gives the reason.
    """
    with open_regular(path) as file:
        # the size is not passed to read(), which would allocate that much
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than the limit of {max_bytes} bytes", str(path))
    return content


def read_regular_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a regular UTF-8 file of at most `max_bytes` bytes.

    Raises:
        OSError: as `read_regular_bytes`.
        UnicodeDecodeError: the content is not UTF-8 (a ValueError).
    """
    return read_regular_bytes(path, max_bytes).decode("utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON; every defect, nesting beyond Python's recursion limit included, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def read_json(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Parse a regular JSON file.  Raises OSError or ValueError and nothing else."""
    return parse_json(read_regular_text(path, max_bytes))


def digest_of_json(tree: Any) -> str:
    """SHA-256 of the canonical form: sorted keys, no spaces."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an index with its own digest under the key `DIGEST`."""
    # tuples and integer keys become what they will be when the file is read
    content: dict[str, Any] = json.loads(json.dumps(tree))
    return {**content, DIGEST: digest_of_json(content)}


def unsealed(tree: Any) -> tuple[dict[str, Any], bool]:
    """Return (content without the digest, whether there was a digest).

    Files written before digests were introduced have none.

    Raises:
        ValueError: the tree is not a JSON object, or does not match its digest.
    """
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    content = {key: value for key, value in tree.items() if key != DIGEST}
    if DIGEST in tree and digest_of_json(content) != tree[DIGEST]:
        raise ValueError("does not match its digest")
    return content, DIGEST in tree


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """SHA-256 of NumPy arrays by name: names, types, shapes and content, whatever their order."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()
