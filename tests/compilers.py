"""Compilers that fail, wait or hang, for tests of the C++ kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ngsgd.ops import fisher_projection, nonlinearities
from ngsgd.ops.kernels import native

_BODIES = {"works": 'exec c++ "$@"',
           "fails": 'echo "small.cpp:1: error: no such thing" >&2; exit 3',
           "hangs once": 'test "$(wc -l < "$calls")" -gt 1 || exec sleep 100000; exec c++ "$@"'}


def compiler(folder: Path, kind: str) -> Path:
    """Write a compiler that counts its calls (`num_calls`)."""
    path = folder / "cxx.sh"
    path.write_text(f"#!/bin/sh\ncalls={folder}/calls\necho x >> $calls\n{_BODIES[kind]}\n")
    path.chmod(0o755)
    return path


def num_calls(folder: Path) -> int:
    path = folder / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def forget() -> None:
    for one in (native.library, fisher_projection.load_library, fisher_projection.workspace_size, nonlinearities.load_library):
        one.cache_clear()


@contextmanager
def only(path: Path, folder: Path) -> Iterator[None]:
    """Use this compiler and empty caches, in this process and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        (folder / "tmp").mkdir(exist_ok=True)
        patch.setenv("CXX", str(path))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("TMPDIR", str(folder / "tmp"))
        patch.setattr("tempfile.tempdir", str(folder / "tmp"))
        forget()
        try:
            yield
        finally:
            forget()
