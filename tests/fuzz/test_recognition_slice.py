"""A small part of the campaigns of damaged recordings and bundles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "cases"), [("audio", 24), ("bundles", 36)])
def test_every_damage_ends_with_words_or_one_message(
    campaign: str, cases: int, tmp_path: Path
) -> None:
    path, root = tmp_path / "results.json", Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", campaign, "--cases", str(cases), "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env=environment,
    )
    assert path.exists(), done.stdout + done.stderr
    found = json.loads(path.read_text())[campaign]
    assert found["problems"] == {} and found["cases"] >= cases
