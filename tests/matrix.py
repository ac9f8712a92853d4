"""Run the numerical tests under each code path that processor, threads and compiler select.

`make test-matrix` prints one line per cell and fails if any cell fails. Cells differ in environment
variables only, so that `--print` gives a command to repeat one by hand.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

# every test of these compares numbers; other folders run processes, services and files
FOLDERS = ("tests/ops", "tests/optim", "tests/preconditioners", "tests/curvature", "tests/hypergrad", "tests/models",
           "tests/sequence")
_AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_NO_COMPILER = {"CXX": "/nonexistent"}
_EMPTY_CACHE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Cell:
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    has_kernels: bool = True


CELLS = (
    Cell("default, 1 thread"),
    Cell("default, 2 threads", threads=2),
    Cell("AVX2, 1 thread", _AVX2),
    Cell("AVX2, 2 threads", _AVX2, threads=2),
    Cell("no compiler, 1 thread", _NO_COMPILER, has_kernels=False),
    Cell("no compiler, 2 threads", _NO_COMPILER, threads=2, has_kernels=False),
    # MKL ignores MKL_ENABLE_INSTRUCTIONS on AMD processors; this path runs on every maker's
    Cell("MKL's path for any processor", {"MKL_CBWR": "COMPATIBLE"}),
    # which of two products or kernels is faster is decided by the maker: tests/conftest.py reads
    # this variable
    Cell("products of the other maker", {"NGSGD_TEST_VENDOR": "other"}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, help="tests to run (default: the numerical folders)")
    parser.add_argument("--cell", action="append", metavar="TEXT", help="only the cells whose name contains this text")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to share (default: all)")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the commands")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if not options.cell or any(text in cell.name for text in options.cell)]
    command = [sys.executable, "-m", "pytest", "-m", "not (end_to_end or faults or services)",
               "-p", "no:cacheprovider", *options.paths]
    if options.only_print:
        for cell in cells:
            settings = _environment(cell, Path("/tmp/empty")).items()
            print(*(f"{name}={shlex.quote(value)}" for name, value in settings),
                  shlex.join(command))
        return 0
    free, first = threading.Semaphore(options.cores), threading.Lock()
    with (tempfile.TemporaryDirectory(prefix="ngsgd-matrix-") as scratch,
          ThreadPoolExecutor(len(CELLS)) as pool):
        run = partial(_passes, command, Path(scratch), free, first, options.cores)
        return int(not all([*pool.map(run, cells)]))


def _passes(command: list[str], scratch: Path, free: threading.Semaphore, first: threading.Lock,
            num_cores: int, cell: Cell) -> bool:
    """Run a cell when there are cores for it; print its line, and its output if it failed."""
    folder = scratch / str(CELLS.index(cell))
    folder.mkdir()
    num_used = min(cell.threads, num_cores)
    # one cell at a time takes its cores
    with first:
        for _ in range(num_used):
            free.acquire()
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | _environment(cell, folder),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", check=False)
    free.release(num_used)
    text, passed = done.stdout, done.returncode == 0
    summary = text.strip().splitlines()[-1] if text.strip() else f"exit code {done.returncode}"
    print(f"{'ok' if passed else 'FAILED':8}{cell.name:32}{time.monotonic() - began:5.0f} s   "
          f"{summary}", flush=True)
    if not passed:
        print(text, flush=True)
    return passed


def _environment(cell: Cell, folder: Path) -> dict[str, str]:
    # torch's compiler takes code of its cache whatever ATEN_CPU_CAPABILITY is
    found = cell.environment | {"OMP_NUM_THREADS": str(cell.threads), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # no kernel that was compiled before: the compiler would not be missed
    return found if cell.has_kernels else found | {_EMPTY_CACHE: str(folder / "cache")}


if __name__ == "__main__":
    sys.exit(main())
