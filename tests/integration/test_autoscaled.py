"""Runs on a Ray cluster that Ray's autoscaler fills, and whose machines and workers are lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import HANGS_S

pytestmark = [pytest.mark.services, pytest.mark.slow]


def played(scenario: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What a run of this scenario found; its model must be that of a run in one process."""
    done = subprocess.run([sys.executable, "-m", "tests.integration.autoscaled", scenario, str(folder), *arguments],
                          capture_output=True, text=True, check=False, timeout=2 * HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["struck"] and found["num_jobs"] >= 12
    assert found["model"] == found["complete"] and not found["problems"]
    # every sample counted, once
    assert found["participation"] == 1.0 and found["frames"] == found["complete_frames"] > 0
    return found


def test_a_cluster_at_zero_grows_and_shrinks_again(tmp_path: Path) -> None:
    found = played("scale", tmp_path)
    # the first may come before it is asked how many there are
    said = re.compile(r"have room for [0-3] of 4 workers, each of which takes 1 CPU; more machines are asked for")
    assert any(said.search(line) for line in found["lines"]), found["lines"]
    # the head, and machines that `scale` has seen end
    assert len(found["nodes"]) >= 2 and found["incidents"] == [], found["incidents"]


def test_a_drained_node_costs_no_result(tmp_path: Path) -> None:
    found = played("drain", tmp_path)
    # in its job, or between two
    assert {what for what, _ in found["incidents"]} & {"job_continued", "worker_replaced"}, found["incidents"]


def test_a_worker_that_gets_sigterm_costs_no_result(tmp_path: Path) -> None:
    found = played("sigterm", tmp_path)
    # in its job, or between two, where the next one may have been sent already
    assert {what for what, _ in found["incidents"]} & {"job_continued", "worker_replaced", "worker_died"}, found["incidents"]


def test_the_loss_of_all_machines_is_waited_for(tmp_path: Path) -> None:
    found = played("loss", tmp_path, "20")
    lost = {message[:len("worker 0")] for what, message in found["incidents"] if what in ("worker_died", "worker_replaced")}
    assert lost == {"worker 0", "worker 1"}, found["incidents"]
    assert any(line.startswith("waiting for workers (0 of 2), until ") for line in found["lines"])
