"""Just-in-time compilation of C++ kernels.

Callers fall back to torch operations without a compiler.

Libraries are cached in ~/.cache/ngsgd/kernels (or $XDG_CACHE_HOME/ngsgd/kernels), by source, flags
and processor capability. The last 32 bytes of a file are the SHA-256 of the bytes before. A file
that does not match is rebuilt, because the loader could fail on it with SIGBUS. A folder or file
that belongs to another user, or that others can write to, is not used, because loading a library
runs its code. Each process then builds its libraries in a temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngsgd.files import cache_folder, new_file

_VECTORS = {"AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
            "AVX2": ("-mavx2", "-mfma")}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_THREADED = ("-fopenmp", "-ffp-contract=fast")
_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size
_WRITABLE_BY_OTHERS = 0o022
# Signatures of compilers in the section .comment.
_COMPILER = re.compile(rb"(?:GCC: \([^)\0]*\) [\w.]+|[\w ]*clang version [\w.]+)")
# compilers of the libraries loaded by this process, by name
_compilers: dict[str, str] = {}
# types of arguments
ADDRESS, NUMBER, REAL, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_forbidden = threading.Event()
_own = threading.local()


@contextlib.contextmanager
def in_torch_operations() -> Iterator[None]:
    """Disable the C++ kernels inside the context, in all threads, if torch operations are
    equivalent.
    """
    was_set = _forbidden.is_set()
    _forbidden.set()
    try:
        yield
    finally:
        if not was_set:
            _forbidden.clear()


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
    """Return whether the processor vendor is, for example, "GenuineIntel".

    False if it is unknown.
    """
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
    cache = _cache_folder()
    kept = cache / name if cache else None
    try:
        return (kept and _loaded(kept)) or _compiled(source, flags, name, kept)
    except (OSError, subprocess.SubprocessError):
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


def _cache_folder() -> Path | None:
    """Return the cache folder; None if the home folder is unknown."""
    try:
        return cache_folder("kernels")
    except RuntimeError:
        return None


def _is_private(path: Path) -> bool:
    """Return whether the path belongs to this user and only this user can write to it."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


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


def _compiled(source: Path, flags: tuple[str, ...], name: str, kept: Path | None) -> ctypes.CDLL:
    """Compile in a temporary folder, because workers may compile concurrently.

    Cache the library if safe.
    """
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="ngsgd-kernels-") as folder:
        made, linked = f"{folder}/made.o", Path(folder, name)
        # Linked without -fopenmp, which would add a second thread pool; -z now reports missing
        # symbols immediately.
        for command in ([compiler, *flags, "-c", str(source), "-o", made],
                        [compiler, "-shared", "-Wl,-z,now", made, "-o", str(linked)]):
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        content = linked.read_bytes()
        return _load(kept if kept and _keep(content, kept) else linked, content, name)


def _keep(content: bytes, kept: Path) -> bool:
    """Write a library and its checksum durably.

    False if the folder is not private or not writable.
    """
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(kept.parent):
            return False
        with new_file(kept, mode=0o644) as temporary:
            temporary.touch(mode=0o700)
            temporary.write_bytes(content + hashlib.sha256(content).digest())
    except OSError:
        return False
    return True
