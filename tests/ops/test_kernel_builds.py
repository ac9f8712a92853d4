"""C++ kernels are compiled once, by one process, for as long as it takes; a problem is reported."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ngsgd.cluster.fingerprint import kernels, why_no_kernels
from ngsgd.errors import NgsgdWarning
from ngsgd.ops import nonlinearities
from ngsgd.ops.kernels import native
from tests import compilers
from tests.tiers import HANGS_S

KERNELS = Path(native.__file__).parent
# its numbers are bitwise identical to those of torch operations
_SAME_BITS = "reversible_momentum.cpp"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.cpp"
    path.write_text("extern \"C\" int answer() { return 42; }\n")
    return path


@pytest.fixture
def fails(tmp_path: Path) -> Iterator[None]:
    """No kernel can be compiled."""
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path):
        yield


def test_every_kernel_is_part_of_the_fingerprint() -> None:
    assert {path.name for path in KERNELS.glob("*.cpp")} == {*kernels(), _SAME_BITS}


def test_threads_that_start_together_compile_once(source: Path, tmp_path: Path) -> None:
    with compilers.only(compilers.compiler(tmp_path, "works"), tmp_path):
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(native.library(source))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_S)
    assert [library.answer() for library in found] == [42] * 3
    # to compile, and to link
    assert compilers.num_calls(tmp_path) == 2


def test_a_compilation_has_no_limit_of_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    run = subprocess.run

    def recorded(*arguments: Any, **options: Any) -> Any:
        limits.append(options.get("timeout"))
        return run(*arguments, **options)
    monkeypatch.setattr("subprocess.run", recorded)
    with compilers.only(compilers.compiler(tmp_path, "works"), tmp_path):
        assert native.library(source) is not None
    assert limits == [None, None]


def test_a_compiler_may_have_arguments(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compilers.only(compilers.compiler(tmp_path, "works"), tmp_path):
        monkeypatch.setenv("CXX", f"{tmp_path / 'cxx.sh'} -O1")
        assert native.library(source) is not None


def test_the_line_is_shown_once(fails: None) -> None:
    lines: list[str] = []
    assert why_no_kernels(lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("path", ["cxx.sh", "missing", "small.cpp"])
def test_a_problem_is_reported_with_its_reason(path: str, source: Path, tmp_path: Path) -> None:
    compilers.compiler(tmp_path, "fails")
    with compilers.only(tmp_path / path, tmp_path):
        reason = why_no_kernels(lambda _line: None)
    assert path in reason and "nonlinearities.cpp" in reason


def test_a_loop_of_a_user_is_warned(fails: None) -> None:
    with pytest.warns(NgsgdWarning, match=r"nonlinearities\.cpp"):
        assert not nonlinearities.is_native()


@pytest.mark.slow
def test_the_variable_asks_for_torch_operations() -> None:
    script = "from ngsgd.ops.kernels import native; assert not native.is_allowed()"
    with native.in_torch_operations():
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 1


@pytest.mark.faults
def test_the_lock_of_a_killed_process_is_free(source: Path, tmp_path: Path) -> None:
    script = f"from pathlib import Path; from ngsgd.ops.kernels import native; native.library(Path({str(source)!r}))"
    with compilers.only(compilers.compiler(tmp_path, "hangs once"), tmp_path):
        holder = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, process_group=0)
        assert holder.stderr
        # the line comes before the lock
        assert holder.stderr.readline()
        while not compilers.num_calls(tmp_path):
            assert holder.poll() is None
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(native.library(source)))
        waiting.start()
        waiting.join(0.5)
        assert not found and compilers.num_calls(tmp_path) == 1
        holder.kill()
        waiting.join(HANGS_S)
        subprocess.run(["pkill", "-g", str(holder.pid)], check=False)
        holder.wait()
    assert [library.answer() for library in found] == [42]


@pytest.mark.slow
def test_processes_that_start_together_compile_once(source: Path, tmp_path: Path) -> None:
    script = ("from pathlib import Path; from ngsgd.ops.kernels import native; "
              f"assert native.library(Path({str(source)!r})).answer() == 42")
    with compilers.only(compilers.compiler(tmp_path, "works"), tmp_path):
        processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
        assert [process.wait(timeout=HANGS_S) for process in processes] == [0, 0]
    assert compilers.num_calls(tmp_path) == 2
    assert [path.suffix for path in (tmp_path / "cache" / "ngsgd" / "kernels").iterdir()] == [".so"]


def test_a_process_that_does_not_end_is_not_waited_for(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PATIENCE_S", 0.0)
    with compilers.only(compilers.compiler(tmp_path, "works"), tmp_path):
        assert native.library(source) is not None
