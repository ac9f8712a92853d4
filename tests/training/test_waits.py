"""Inside a job on a GPU the worker's own code never waits for the device."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "objective"), [("sgd", "ce"), ("ngsgd", "ce"), ("sgd", "lfmmi"), ("sgd", "smbr")])
def test_no_minibatch_makes_the_worker_wait(tmp_path: Path, kind: str, objective: str) -> None:
    """A separate process, as the device needs; ngsgd.optim has its own tests."""
    done = subprocess.run([sys.executable, "-m", "tests.training.waits_of_a_job", kind, objective, str(tmp_path)],
                          cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["waits"]) >= 4 and math.isfinite(found["objf"])
    # the first one also sends the transitions of the objective
    own = [place for step in found["waits"][1:] for place in step
           if any(f" ngsgd/{package}/" in place for package in ("training", "tasks", "sequence", "models", "data"))]
    assert own == []
