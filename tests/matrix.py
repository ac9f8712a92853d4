"""Run the numerical tests under each code path that a processor, a thread count or a missing
compiler selects.

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
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

# every test of these compares numbers; other folders run processes, services and files
FOLDERS = ("tests/ops", "tests/optim", "tests/preconditioners", "tests/curvature", "tests/hypergrad", "tests/models",
           "tests/sequence")
_AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
_NO_COMPILER = {"CXX": "/nonexistent"}
_EMPTY_CACHE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Cell:
    """One combination: environment variables and the threads of torch."""

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
    Cell("products of the other maker", {"NGSGD_TEST_VENDOR": "other"}),
)


@dataclass
class _Run:
    cell: Cell
    process: subprocess.Popen[str]
    log: Path
    began: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, help="tests to run (default: the numerical folders)")
    parser.add_argument("--cell", action="append", metavar="TEXT", help="only the cells whose name contains this text")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to share (default: all)")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the commands")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if not options.cell or any(text in cell.name for text in options.cell)]
    if options.only_print:
        for cell in cells:
            print(_as_text(cell, options.paths))
        return 0
    with tempfile.TemporaryDirectory(prefix="ngsgd-matrix-") as scratch:
        return int(not _run_all(cells, options.paths, options.cores, Path(scratch)))


def _run_all(cells: list[Cell], paths: list[str], cores: int, scratch: Path) -> bool:
    """Run as many cells at a time as there are cores for; the result is whether all passed."""
    waiting, running, passed = deque(cells), list[_Run](), True
    while waiting or running:
        used = sum(run.cell.threads for run in running)
        while waiting and (not running or used + waiting[0].threads <= cores):
            running.append(_start(waiting.popleft(), paths, scratch))
            used += running[-1].cell.threads
        time.sleep(0.2)
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            passed &= _report(run)
    return passed


def _start(cell: Cell, paths: list[str], scratch: Path) -> _Run:
    folder = scratch / str(CELLS.index(cell))
    folder.mkdir()
    log = folder / "log.txt"
    with log.open("w") as file:
        environment = os.environ | _environment(cell, folder)
        process = subprocess.Popen(_command(paths), env=environment, stdout=file, stderr=file, text=True)
    return _Run(cell, process, log, time.monotonic())


def _report(run: _Run) -> bool:
    """Print the cell's line, and all of its output if it failed."""
    text = run.log.read_text(errors="replace")
    passed = run.process.returncode == 0
    summary = text.strip().splitlines()[-1] if text.strip() else f"exit code {run.process.returncode}"
    print(f"{'ok' if passed else 'FAILED':8}{run.cell.name:32}{time.monotonic() - run.began:5.0f} s   {summary}", flush=True)
    if not passed:
        print(text, flush=True)
    return passed


def _environment(cell: Cell, folder: Path) -> dict[str, str]:
    # torch's compiler takes code of its cache for the same processor whatever ATEN_CPU_CAPABILITY
    # is
    found = cell.environment | {"OMP_NUM_THREADS": str(cell.threads), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # no kernel that was compiled before: the compiler would not be missed
    return found if cell.has_kernels else found | {_EMPTY_CACHE: str(folder / "cache")}


def _command(paths: list[str]) -> list[str]:
    selection = "not (end_to_end or faults or services)"
    return [sys.executable, "-m", "pytest", "-m", selection, "-p", "no:cacheprovider", *paths]


def _as_text(cell: Cell, paths: list[str]) -> str:
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in _environment(cell, Path("/tmp/empty")).items())
    return f"{settings} {shlex.join(_command(paths))}"


if __name__ == "__main__":
    sys.exit(main())
