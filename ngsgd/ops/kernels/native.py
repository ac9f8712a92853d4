"""Just-in-time compilation of C++ kernels.

Callers fall back to torch operations without a compiler, or if NGSGD_KERNELS is torch. `problems`
has the reasons. In a run the coordinator decides for all processes (`in_torch_operations`).

Libraries are cached in ~/.cache/ngsgd/kernels (or $XDG_CACHE_HOME/ngsgd/kernels), by source, flags
and processor capability; if that folder cannot be used, in a private folder for temporary files.
One process compiles, and the others wait for it. The last 32 bytes of a file are the SHA-256 of
the bytes before. A file that does not match is rebuilt, because the loader could fail on it with
SIGBUS. A folder or file that belongs to another user, or that others can write to, is not used,
because loading a library runs its code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import warn
from ngsgd.files import cache_folder, new_file
from ngsgd.shared_work import turn

_VECTORS = {"AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
            "AVX2": ("-mavx2", "-mfma")}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_THREADED = ("-fopenmp", "-ffp-contract=fast")
# "torch" in this variable: no C++ kernels in this process and those that it starts
VARIABLE = "NGSGD_KERNELS"
COMPILING = "compiling C++ kernels (once, about 10 s)"
# time after which the process that compiles is not waited for: it may be stopped or hang. Two
# processes that compile at once make the same library
PATIENCE_S = 600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = 0o022
# Signatures of compilers in the section .comment.
_COMPILER = re.compile(rb"(?:GCC: \([^)\0]*\) [\w.]+|[\w ]*clang version [\w.]+)")
# compilers of the libraries loaded by this process, by name
_compilers: dict[str, str] = {}
# C++ file -> why this process cannot use it
problems: dict[str, str] = {}
# types of arguments
ADDRESS, NUMBER, REAL, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_forbidden = threading.Event()
if os.environ.get(VARIABLE) == "torch":
    _forbidden.set()
_own = threading.local()


def print_line(line: str) -> None:
    """Print to stderr, if it is open."""
    # a closed stream is no reason not to compile
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr:
            print(line, file=sys.stderr, flush=True)


@dataclass
class _Console:
    """Takes the line of a compilation; `warn` is None where the caller reports `problems`."""

    report: Callable[[str], object] = print_line
    warn: Callable[[str], None] | None = warn
    has_announced: bool = False


_console = _Console()


@contextlib.contextmanager
def reported_to(report: Callable[[str], object]) -> Iterator[None]:
    """Send the line of a compilation to `report`; the caller reports `problems`."""
    before = vars(_console).copy()
    vars(_console).update(vars(_Console(report, None)))
    try:
        yield
    finally:
        vars(_console).update(before)


@contextlib.contextmanager
def in_torch_operations() -> Iterator[None]:
    """Use equivalent torch operations, not C++ kernels, in all threads and new processes."""
    was_set, before = _forbidden.is_set(), os.environ.get(VARIABLE)
    use_torch_operations()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
        if not was_set:
            _forbidden.clear()


def use_torch_operations() -> None:
    """Disable the C++ kernels in this process, and those that it starts."""
    _forbidden.set()
    os.environ[VARIABLE] = "torch"


def is_allowed() -> bool:
    """Return whether the call is outside `in_torch_operations`."""
    return not _forbidden.is_set()


def address(x: Tensor | None) -> int | None:
    """Return the address of the data; None is a null pointer."""
    return None if x is None else x.data_ptr()


def work_memory(size: int) -> Tensor:
    """Return float32 work memory for one kernel call, reused by later calls in the same thread."""
    kept: Tensor | None = getattr(_own, "kept", None)
    if kept is None or kept.numel() < size:
        kept = _own.kept = torch.empty(size, dtype=torch.float32)
    return kept


def capability() -> str:
    """Return the vector instructions that torch uses: AVX512, AVX2 or another name."""
    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def is_made_by(vendor: str) -> bool:
    """Return whether the processor vendor is, for example, "GenuineIntel"; False if unknown."""
    try:
        return vendor in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the functions of a C++ file; None if it cannot be compiled or loaded.

    With "-fopenmp" loops run on torch's threads, through the library that the process has already
    loaded.
    """
    flags = _all_flags(flags)
    name = f"{source.stem}-{made_of(source, *flags)[:16]}.so"
    problems.pop(source.name, None)
    if found := next((one for folder in _folders() if (one := _loaded(folder / name))), None):
        return found
    if not _console.has_announced:
        _console.has_announced = True
        _console.report(COMPILING)
    try:
        folder = _writable_folder()
        # an ended process keeps no lock; on a file system without locks each one compiles
        with turn(folder, PATIENCE_S) if folder else contextlib.nullcontext():
            return (folder and _loaded(folder / name)) or _compiled(source, flags, name, folder)
    except (OSError, subprocess.SubprocessError) as error:
        problems[source.name] = _reason(error)
        return None


def threaded(source: Path, **types: tuple[Any, ...]) -> Any:
    """Return `library` with typed functions, or None; its loops run on torch's threads.

    Args:
        source: the C++ file.
        types: for each function the types of its result, or None, and arguments.
    """
    found = library(source, *_THREADED)
    if found is not None:
        for name, (result, *arguments) in types.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    elif _console.warn:
        _console.warn(f"{source.name} is not used ({problems.get(source.name)}): torch operations compute instead, which take "
                      "longer and round differently; install a C++ compiler, such as g++, or name one in CXX.")
    return found


def made_of(source: Path, *flags: str) -> str:
    """Return the SHA-256 of a source and the compiler flags."""
    return hashlib.sha256(b"\0".join([source.read_bytes(), *map(str.encode, flags)])).hexdigest()


def origin(source: Path) -> str:
    """Return source, flags and compiler of a loaded library, which determine its numbers."""
    made = made_of(source, *_all_flags(_THREADED))[:16]
    return f"{made} {_compilers.get(f'{source.stem}-{made}.so', 'unknown compiler')}"


def _all_flags(flags: tuple[str, ...]) -> tuple[str, ...]:
    return (*_FLAGS, *flags, *_VECTORS.get(capability(), ()))


def _folders() -> Iterator[Path]:
    """Yield the folders of libraries, the preferred one first."""
    # without a home folder
    with contextlib.suppress(RuntimeError):
        yield cache_folder("kernels")
    # without a folder for temporary files
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"ngsgd-kernels-{os.geteuid()}"


def _writable_folder() -> Path | None:
    """Make the first folder that only this user can write to; None if there is none."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(folder):
                with tempfile.TemporaryFile(dir=folder):
                    return folder
    return None


def _is_private(path: Path) -> bool:
    """Return whether the path belongs to this user and only this user can write to it."""
    found = path.stat()
    # a link in the folder for temporary files may be anybody's
    return found.st_uid == path.lstat().st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def _loaded(kept: Path) -> ctypes.CDLL | None:
    """Load a cached library; None if it is missing, damaged or not trustworthy."""
    try:
        if not (_is_private(kept.parent) and _is_private(kept)):
            return None
        stored = kept.read_bytes()
        content, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        return _load(kept, content, kept.name)
    except OSError:
        return None


def _load(path: Path, content: bytes, name: str) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    # The first signature is that of the C library's start files; the last one is of this code.
    signatures = _COMPILER.findall(content)
    _compilers[name] = signatures[-1].decode() if signatures else "unknown compiler"
    return found


def _compiled(source: Path, flags: tuple[str, ...], name: str, folder: Path | None) -> ctypes.CDLL:
    """Compile in a temporary folder, without a limit of time, and cache the library if possible."""
    named = os.environ.get("CXX") or "c++"
    compiler = [named] if shutil.which(named) else shlex.split(named)
    with tempfile.TemporaryDirectory(prefix="ngsgd-kernels-") as temporary:
        made, linked = f"{temporary}/made.o", Path(temporary, name)
        # Linked without -fopenmp, which would add a second thread pool; -z now reports missing
        # symbols immediately.
        for command in ([*compiler, *flags, "-c", str(source), "-o", made],
                        [*compiler, "-shared", "-Wl,-z,now", made, "-o", str(linked)]):
            subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        content = linked.read_bytes()
        return _load(folder / name if folder and _keep(content, folder / name) else linked, content, name)


def _keep(content: bytes, kept: Path) -> bool:
    """Write a library and its checksum durably; False if there is no room."""
    try:
        with new_file(kept, mode=0o644) as temporary:
            temporary.touch(mode=0o700)
            temporary.write_bytes(content + hashlib.sha256(content).digest())
    except OSError:
        return False
    return True


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    """Return why a file was not compiled, in one line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or b"").decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
        return f"{error.cmd[0]} ended with {error.returncode}: {first.strip()[:200]}"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} was not found"
    return f"{type(error).__name__}: {error}"[:200]
