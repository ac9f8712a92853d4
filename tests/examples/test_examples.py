"""The scripts of examples/ run, in small, and print what plain torch gives beside them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_HANGS_S = 500


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_at_most_80_lines(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.slow
def test_the_language_model_trains_on_two_workers(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run([sys.executable, str(EXAMPLES / "language_model.py"), "2", "1"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=_HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    ours, plain = (float(found) for found in re.findall(r"valid/loss (\d+\.\d+)$", done.stdout, re.MULTILINE))
    # uniform guesses among 128 characters have 4.85
    assert ours < 2.5
    assert plain < 2.5
