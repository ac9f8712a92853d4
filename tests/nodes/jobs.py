"""A cluster with a token, by the commands of docs/cluster.md: submit, follow, stop, resume."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_OK, EXIT_RUN_FAILED, ClusterError
from tests.integration.service import events, final_hash
from tests.nodes.lab import PORT, SETTINGS, Lab

_PROGRAM = str(Path(sys.executable).parent / "ngsgd")
# long enough to be lost, recovered and stopped in, one after another
_LONG = [*(setting for setting in SETTINGS if "num_epochs" not in setting), "schedule.num_epochs=20"]
_STRANGER = ["env", "-u", "RAY_AUTH_TOKEN", "-u", "RAY_AUTH_MODE", "HOME=/nonexistent"]
_COMMAND_S = 300.0


def by_the_documented_commands(cluster: Lab, _: str) -> dict[str, Any]:
    """With the token alone a run is followed, loses a node, is stopped and resumed."""
    settings = [f"output_dir={cluster.output_dir}", *_LONG]
    refusals = [_says(cluster, ClusterError.exit_code, *words, by=_STRANGER)
                for words in (["submit", "--job-name", "stranger", *settings], ["status", "--dashboard-url", "http://127.0.0.1:8265"])]
    assert all("refuses this token" in said for said in refusals), refusals
    head = f"{cluster.network.nodes[0].address}:{PORT}"
    looked = ["doctor", "--quiet", "--address", head, "--output-dir", str(cluster.output_dir)]
    refused = _says(cluster, EXIT_RUN_FAILED, *looked, by=_STRANGER)
    assert " could not be joined: its head answers, but rejects this process" in refused, refused
    seen = json.loads(_says(cluster, EXIT_OK, *looked, "--json"))
    assert [one["verdict"] for one in seen if one["what"] == "node"] == ["ok"] * len(cluster.network.nodes), seen
    _says(cluster, EXIT_OK, "submit", "--program", _PROGRAM, "--job-name", "night", "name=night", *settings)
    run = cluster.wait_for(4, "night")
    assert "night" in _says(cluster, EXIT_OK, "status", "--dashboard-url", "http://127.0.0.1:8265")
    with _followed(cluster, "night") as follower:
        began, before = time.monotonic(), len(events(run, "outer_iteration"))
        cluster.node_with_worker("night").kill_program("raylet")
        # the run has continued without it
        cluster.wait_for(before + 2, "night")
        recovered_s = time.monotonic() - began
        assert "night STOPPED" in _says(cluster, EXIT_OK, "stop", "night")
        assert follower.wait(_COMMAND_S) == EXIT_RUN_FAILED
    before = len(events(run, "outer_iteration"))
    assert "iter" in (cluster.logs / "follow.log").read_text(), "the job's lines were not followed"
    # two nodes are left, with a CPU each
    words = ["--job-name", "night2", "--resume", str(run), "--workers", "2", "--follow"]
    _says(cluster, EXIT_OK, "submit", "--program", _PROGRAM, *words)
    assert "SUCCEEDED" in _says(cluster, EXIT_OK, "status", str(run))
    assert 0 < before < len(events(run, "outer_iteration")), "there was nothing to go on with"
    assert final_hash(run) == _of_one_process(cluster, settings), f"{run} has other bits than one process"
    return {"outer iterations before the stop": before, "in all": len(events(run, "outer_iteration")),
            "seconds until two more after the loss": recovered_s,
            "incidents": [line["message"] for line in events(run, "incident")]}


@contextlib.contextmanager
def _followed(cluster: Lab, job: str) -> Iterator[subprocess.Popen[bytes]]:
    process = cluster.network.nodes[0].spawn([sys.executable, "-m", "ngsgd", "logs", "--follow", job],
                                             cluster.logs / "follow.log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _says(cluster: Lab, code: int, *words: str, by: list[str] | None = None) -> str:
    """Output of a command on the head, once it has ended with that exit code."""
    log = cluster.logs / "command.log"
    log.write_text("")
    process = cluster.network.nodes[0].spawn([*(by or []), sys.executable, "-m", "ngsgd", *words], log)
    ended = process.wait(_COMMAND_S)
    said = log.read_text()
    assert ended == code, f"ngsgd {' '.join(words)} ended with {ended}:\n{said[-2000:]}"
    return said


def _of_one_process(cluster: Lab, settings: list[str]) -> str:
    words = ["train", "name=alone", *settings, "cluster=in_process", "--quiet"]
    _says(cluster, EXIT_OK, *words)
    run = cluster.run("alone")
    assert run
    return final_hash(run)
