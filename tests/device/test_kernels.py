"""The Triton kernels compute what the torch operations compute, and compile for a GPU.

Both need Triton but no GPU; `make test-all` installs Triton next to the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.kernels import CASES, KERNELS

ROOT = Path(__file__).parents[2]
# where `make test-all` installs it; other tests run without it
TRITON = Path(sys.prefix) / "triton"
# of fast memory per block on the smallest of the two processors
SHARED_BYTES = 160 * 1024
SKIPPED = ("step, nan, None", "step, inf, None", "step, 0.0, False")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not TRITON.is_dir() and importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-all")]


def _run(what: str, tmp_path: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(TRITON)])
    done = subprocess.run([sys.executable, "-m", "tests.device.kernels", what], cwd=ROOT, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)})
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def test_kernels_in_the_interpreter_compute_what_torch_does(tmp_path: Path) -> None:
    """Sums of up to 4,100 float32 products in another order; float64 in updates."""
    found = _run("interpret", tmp_path)
    assert found.keys() == CASES.keys()
    for case, result in found.items():
        assert result["worst"] < (1e-13 if case.startswith("update") else 1e-5), (case, result)
        assert result["nan"], (case, result)
        assert result["moved"] == (case not in SKIPPED), (case, result)


def test_kernels_compile_for_two_processors(tmp_path: Path) -> None:
    found = _run("compile", tmp_path)
    assert found.keys() == {name for names in KERNELS.values() for name in names}
    for name, sizes in found.items():
        for shared, code in sizes.values():
            assert shared <= SHARED_BYTES and code > 0, (name, sizes)
