"""Our own C++, compiled where it is first needed if there is a compiler; whoever asks has torch operations to fall back on.

What is built is kept in ~/.cache/ngsgd (or $XDG_CACHE_HOME/ngsgd), by source, flags and what the processor can do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_VECTORS = {"AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
            "AVX2": ("-mavx2", "-mfma")}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_TIMEOUT_S = 120
ADDRESS, NUMBER, REAL, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int   # of arguments
_forbidden = threading.Event()
_own = threading.local()


@contextlib.contextmanager
def in_torch_operations() -> Iterator[None]:
    """Within it our own C++ is not used where torch operations would do, in any thread."""
    was_set = _forbidden.is_set()
    _forbidden.set()
    try:
        yield
    finally:
        if not was_set:
            _forbidden.clear()


def is_allowed() -> bool:
    """Whether we are outside of `in_torch_operations`."""
    return not _forbidden.is_set()


def address(x: Tensor | None) -> int | None:
    """Where the numbers lie; None stands for a null pointer."""
    return None if x is None else x.data_ptr()


def work_memory(size: int) -> Tensor:
    """So many float32 numbers for one call of our C++, kept from call to call, for each thread its own."""
    kept: Tensor | None = getattr(_own, "kept", None)
    if kept is None or kept.numel() < size:
        kept = _own.kept = torch.empty(size, dtype=torch.float32)
    return kept


def capability() -> str:
    """The vector instructions that torch, too, goes by: AVX512, AVX2 or another name."""
    return torch.backends.cpu.get_cpu_capability()


@functools.cache
def is_made_by(vendor: str) -> bool:
    """Whether the processor names this maker: "GenuineIntel", "AuthenticAMD"; False where that is not told."""
    try:
        return vendor in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The functions of a C++ file; None where it cannot be compiled or loaded.

    With "-fopenmp" loops run on torch's own threads, by the library that is in the process already.
    """
    flags = (*_FLAGS, *flags, *_VECTORS.get(capability(), ()))
    made_of = hashlib.sha256(b"\0".join([source.read_bytes(), *map(str.encode, flags)])).hexdigest()[:16]
    try:
        path = _folder() / f"{source.stem}-{made_of}.so"
        return _loaded(path) or _compiled(source, flags, path)
    except (OSError, RuntimeError, subprocess.SubprocessError):   # RuntimeError: nobody's home is known
        return None


def threaded(source: Path, **types: tuple[Any, ...]) -> Any:
    """`library` or None; its loops run on torch's threads.  For each function the types of its result, or None, and arguments."""
    found = library(source, "-fopenmp", "-ffp-contract=fast")
    if found is not None:
        for name, (result, *arguments) in types.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    return found


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ngsgd"


def _loaded(path: Path) -> ctypes.CDLL | None:
    """None if it is not there or damaged, and is to be made anew."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compiled(source: Path, flags: tuple[str, ...], path: Path) -> ctypes.CDLL:
    """Into a file of its own first: workers that start together may all compile, and one killed leaves nothing half made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = f"{folder}/made.o", f"{folder}/linked.so"
        # linked without -fopenmp, which would bring a second set of threads; -z now: what is missing shows at once
        for command in ([compiler, *flags, "-c", str(source), "-o", made], [compiler, "-shared", "-Wl,-z,now", made, "-o", linked]):
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        os.replace(linked, path)
    return ctypes.CDLL(str(path))
