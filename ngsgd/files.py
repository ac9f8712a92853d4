"""Atomic files: written under a temporary name, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

# `write` and `fsync` raise these without the name of the file
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# in the error message of safetensors
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def cache_folder(purpose: str) -> Path:
    """The folder of this user for files that can be made again; RuntimeError without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ngsgd" / purpose


def sha256(path: Path) -> str:
    """Hex digest of the content of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named_in(folder: Path, name: str) -> Path:
    """Path of a file that a table or a manifest in `folder` names.

    Relative names start in the folder, and never in the working directory.
    """
    path = Path(name)
    # expanduser raises for the name of an unknown user, which is a plain file name here
    with contextlib.suppress(RuntimeError):
        path = path.expanduser()
    return folder / path


def keep_digest(path: Path, digest: str = "") -> None:
    """Write the SHA-256 of a file, computed here unless given, to NAME.sha256 next to it."""
    write_text(path.with_suffix(".sha256"), (digest or sha256(path)) + "\n")


def matches_digest(path: Path) -> bool:
    """Whether a file matches the SHA-256 of `keep_digest`; False without one, as in a partial copy.
    """
    kept = path.with_suffix(".sha256")
    return kept.exists() and read_regular_text(kept, max_bytes=1024).strip() == sha256(path)


def make_directories(path: Path) -> None:
    """Create a directory and its parents so that they survive a power failure."""
    missing = [path, *path.parents]
    missing = missing[:next((i for i, one in enumerate(missing) if one.is_dir()), len(missing))]
    path.mkdir(parents=True, exist_ok=True)
    try:
        for made in missing:
            fsync(made.parent)
    except OSError:
        # a later process would take an existing directory for a synced one
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
        raise


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Provide a directory to fill, renamed to `final` on success and removed on an error.

    A full or failing disk raises OSError, even if the writing library raises another exception.
    """
    with _filled(final, _replace) as temporary:
        yield temporary


@contextmanager
def shared_directory(final: Path, index: str) -> Iterator[Path]:
    """Provide a directory like `new_directory`, for content that is determined by its name.

    If another process finishes first, its directory is kept, since others may be reading it. A
    directory without the file `index` is incomplete, and is replaced.
    """
    def place(temporary: Path, final: Path) -> None:
        if (final / index).exists():
            shutil.rmtree(temporary)
        else:
            _replace(temporary, final)
    with _filled(final, place) as temporary:
        yield temporary


@contextmanager
def write_errors_named(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError of a full or failing disk that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRORS:
            error.filename = str(path)
        raise


def _replace(temporary: Path, final: Path) -> None:
    if final.is_dir() and not final.is_symlink():  # an older version
        shutil.rmtree(final)
    elif final.is_symlink() or final.exists():
        final.unlink()
    temporary.rename(final)


@contextmanager
def _filled(final: Path, place: Callable[[Path, Path], None]) -> Iterator[Path]:
    """Provide a directory next to `final` that `place` renames."""
    make_directories(final.parent)
    temporary, owned = _temporary(final, Path.mkdir)
    try:
        with write_errors_named(final):
            yield temporary
            for path in temporary.rglob("*"):
                fsync(path)
            fsync(temporary)
            place(temporary, final)
            fsync(final.parent)
    except BaseException as error:
        # Ctrl-C must leave nothing behind either
        shutil.rmtree(temporary, ignore_errors=True)
        code = _OS_ERROR.search(str(error)) if type(error).__name__ == "SafetensorError" else None
        if code:
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(final)) from error
        raise
    finally:
        os.close(owned)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` atomically."""
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_file(final: Path, mode: int = 0o666) -> Iterator[Path]:
    """Provide a path to write to, renamed to `final` on success and removed on an error.

    The file has the permissions `mode` before the umask.
    """
    temporary, owned = _temporary(final, lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)))
    try:
        with write_errors_named(final):
            yield temporary
            fsync(temporary)
            temporary.rename(final)
            fsync(final.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(owned)


def _temporary(final: Path, make: Callable[[Path], object]) -> tuple[Path, int]:
    """Make a temporary file or directory; return it and a descriptor that locks it while open."""
    while True:
        temporary = final.with_name(f".{final.name[:200]}.{uuid.uuid4().hex[:8]}.tmp")
        make(temporary)
        # until it is locked, `remove_abandoned` of another process may take or remove it
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            # a file system without locks loses only the automatic removal
            if take_lock(descriptor) and temporary.exists():
                return temporary, descriptor
            os.close(descriptor)


def take_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, unless another process has locked it: then False.

    On a file system without locks it is True, and each process works as if it was alone.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def remove_abandoned(directory: Path) -> None:
    """Remove temporary files and directories whose writer was killed."""
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
    """An append-only log of JSON objects, one per line, that never keeps an incomplete line.

    A failed write is undone. An incomplete line of a killed process is removed when the log is
    opened again. Only one process at a time may append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._remove_unfinished_line()
            # an earlier process may have ended before it synced its last lines, or the new file
            with write_errors_named(path):
                os.fsync(self._descriptor)
                fsync(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one line; it survives the process, and after `sync` a power failure."""
        line = (json.dumps(values) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        try:
            # a nearly full disk accepts only a part of the line at first
            with write_errors_named(self.path):
                while line:
                    line = line[os.write(self._descriptor, line):]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        """Flush all lines to disk."""
        with write_errors_named(self.path):
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
    """Read all objects of an append-only log; incomplete and other lines are skipped."""
    return [found for line in log_lines(path) for found in parse_json_lines(line)]


def log_lines(path: Path) -> Iterator[str]:
    """Yield the lines of an append-only log in constant memory; cuts lines above `MAX_LINE_BYTES`.
    """
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line.removesuffix(b"\n").decode("utf-8", errors="replace")


def lines_from_end(path: Path) -> Generator[tuple[str, int], None, None]:
    """Yield (line, bytes from its start to the end of the log) from the last to the first line.

    The first one is what follows the last newline: empty unless a line is incomplete. Memory is
    constant, and only the blocks that a caller asks for are read. Of a line above `MAX_LINE_BYTES`
    only an end is left, which is no JSON. Close the generator if you do not read all lines.
    """
    with open_regular(path) as file:
        size = start = os.fstat(file.fileno()).st_size
        ends, length = list[bytes](), 0
        while start:
            stop, start = start, max(0, start - _BLOCK_BYTES)
            file.seek(start)
            first, *lines = file.read(stop - start).split(b"\n")
            place = stop
            for line in reversed(lines):
                place -= len(line) + 1
                text = line + b"".join(reversed(ends))
                ends, length = [], 0
                yield text.decode("utf-8", errors="replace"), size - place - 1
            if length + len(first) <= MAX_LINE_BYTES:
                ends.append(first)
                length += len(first)
        yield b"".join(reversed(ends)).decode("utf-8", errors="replace"), size


def read_log(path: Path) -> str:
    """Read an append-only log; bytes that are not UTF-8 become replacement characters."""
    with open_regular(path) as file:
        return file.read().decode("utf-8", errors="replace")


def last_lines(path: Path, count: int, max_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text that others wrote; at most `max_bytes` of its end are read.

    A line that begins before is cut at its beginning.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - max_bytes))
        return file.read(max_bytes).decode("utf-8", errors="replace").splitlines()[-count:]


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """Parse all lines that contain a JSON object."""
    lines = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            lines.append(parse_json(line))
    return [line for line in lines if isinstance(line, dict)]


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# default limit of a file that is read into memory at once
MAX_TEXT_BYTES = 256 << 20
# a record of an outer iteration has about 1 kB for each job
MAX_LINE_BYTES = 64 << 20
# of a log that is read from its end
_BLOCK_BYTES = 1 << 16
# keys of the digest and of the format in an index file
DIGEST, FORMAT = "sha256_of_index", "format"
# Index -> number of its format. Increase it when the entries or their meaning change: no file of
# another format is read.
FORMATS = {"archives": 2, "arrays": 1, "bundle": 1, "checkpoint": 4, "copies": 1, "corpus": 1, "error": 1,
           "final model": 1, "fingerprint": 1, "i-vectors": 1, "lease": 1, "ledger": 1,
           "prepared data": 1, "results": 1, "sequences": 1, "site": 1, "stored run": 1}


def require_room(directory: Path, num_bytes: float, purpose: str, option: str, error: type[Exception]) -> None:
    """Raise `error`, with ENOSPC as its cause, unless the disk of a folder has so much room."""
    def megabytes(number: float) -> str:
        return f"{number / 1e6:.0f}" if number >= 10e6 or not number else f"{number / 1e6:.2g}"
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise error(f"{directory} has {megabytes(free)} MB free, and {purpose} need {megabytes(num_bytes)} MB; free disk space, or "
                    f"choose another folder with {option}=PATH.") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; raises OSError with the reason as `strerror`.

    A FIFO, socket, device or folder is rejected before it is opened, because reading one may block
    forever.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # a FIFO may have replaced it since: open without blocking and check again
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes` bytes; raises OSError as `open_regular`."""
    with open_regular(path) as file:
        # the size is not passed to read(), which would allocate that much
        content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than the limit of {max_bytes} bytes", str(path))
    return content


def read_regular_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a regular UTF-8 file of at most `max_bytes` bytes.

    Raises OSError as `read_regular_bytes`, or UnicodeDecodeError (a ValueError).
    """
    return read_regular_bytes(path, max_bytes).decode("utf-8")


def parse_json(text: str) -> Any:
    """Parse JSON; every defect, including excessive nesting, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def read_json(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Parse a regular JSON file; raises only OSError or ValueError."""
    return parse_json(read_regular_text(path, max_bytes))


def digest_of_json(tree: Any) -> str:
    """SHA-256 of the canonical form: sorted keys, no spaces."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(index: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an index of `FORMATS` with the number of its format and its digest."""
    # tuples and integer keys become the types that reading the file gives
    content: dict[str, Any] = json.loads(json.dumps({FORMAT: FORMATS[index], **tree}))
    return {**content, DIGEST: digest_of_json(content)}


def unsealed(index: str, tree: Any) -> dict[str, Any]:
    """Return the content of an index that `sealed` made, without format and digest.

    Raises ValueError if it is not a JSON object, or has no format or digest, or another one.
    """
    if not isinstance(tree, dict):
        raise ValueError("not a JSON object")
    # first: another format may have another digest
    require_format(index, tree)
    content = {key: value for key, value in tree.items() if key != DIGEST}
    if digest_of_json(content) != tree.get(DIGEST):
        raise ValueError("has no digest" if DIGEST not in tree else "does not match its digest")
    del content[FORMAT]
    return content


def require_format(index: str, tree: Mapping[str, Any]) -> None:
    """Raise ValueError unless the content of an index has the format that this version reads."""
    if (found := tree.get(FORMAT)) != FORMATS[index] or type(found) is not type(FORMATS[index]):
        raise ValueError(f"has format {found}, and this version of ngsgd reads {FORMATS[index]}")


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """SHA-256 of NumPy arrays by name: names, types, shapes and content, in any order."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def cache_name(kind: str, *, version: int, **decides: Any) -> str:
    """Return `KIND-DIGEST`, the name of a prepared file: equal names are equal content.

    Args:
        kind: kind of the file, such as "ali".
        version: of the code that makes the file. Increase it if the same inputs would give another
            content, so that old files are not used.
        decides: all other inputs, as values of JSON: the digest of the corpus, which covers data,
            phones, lexicon, silence states and grammar (`Corpus.digest`), and the settings.

    Example:
        >>> cache_name("ali", version=2, corpus="0f3b", settings={"num_passes": 2})
        'ali-4be69944aef0'
    """
    return f"{kind}-{digest_of_json({'kind': kind, 'version': version, **decides})[:12]}"
