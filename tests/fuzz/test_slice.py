"""A small part of every campaign of `make fuzz`, in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import interposer

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(interposer.compiler() is None,
                       reason="no C compiler: the library that injects faults cannot be built"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By campaign: the number of cases, and the problems of each."""
    path = tmp_path_factory.mktemp("fuzz") / "results.json"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", "slice", "--json", str(path)],
                          capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert path.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("campaign", ["crash (kill)", "damage", "power cut", "two resumes"])
def test_nothing_is_lost_or_wrong(results: dict[str, Any], campaign: str) -> None:
    assert results[campaign]["cases"] > 0
    assert results[campaign]["problems"] == {}
