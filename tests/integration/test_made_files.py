"""What ngsgd writes for clusters is run: manifest, batch script, containers, commands that it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ngsgd.launcher import cli
from ngsgd.launcher.help import COMMANDS
from tests.integration.machines import DOCKER, ROOT, Machines, machines, of_image, pods
from tests.tiers import HANGS_S

# one Ray at a time
pytestmark = [pytest.mark.services, pytest.mark.same_process("ray")]

_PROGRAM = str(Path(sys.executable).parent / "ngsgd")
# a variable of each kind that ngsgd would set or pass on itself
_OF_THE_JOB = {"OMP_WAIT_POLICY": "ACTIVE", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}


def _settings(folder: Path, *more: str) -> list[str]:
    (folder / "seen").mkdir()
    return ["task=tests.tasks.environment:make_task", f"task.search_path={ROOT}", f"task.args={{folder: {folder / 'seen'}}}",
            "tracking.kind=none", "schedule.num_epochs=2", "schedule.minibatch_size=16", *more]


def _submitted(*words: str) -> str:
    """What `ngsgd submit --dry-run` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["submit", "--dry-run", *words]) == 0
    return printed.getvalue()


def _seen(folder: Path) -> list[dict[str, str]]:
    """The environments of the workers."""
    found = [json.loads(file.read_text()) for file in (folder / "seen").iterdir()]
    assert len(found) >= 2, "two workers trained"
    return found


def _finished(folder: Path, name: str) -> Path:
    [run] = (path.parent for path in folder.glob(f"{name}-*/config.yaml"))
    assert (run / "final" / "model.safetensors").is_file()
    return run


@pytest.fixture(scope="module")
def containers() -> Iterator[Machines]:
    """A head and a worker of docker/compose.yaml."""
    with machines() as found:
        found.start("head")
        found.start("worker")
        yield found


def _run_job(containers: Machines, manifest: dict[str, Any], name: str) -> subprocess.CompletedProcess[str]:
    """The command of KubeRay's submitter pod."""
    runtime = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])
    return containers.call("head", "ray", "job", "submit", "--address", containers.url, "--submission-id", name, "--runtime-env-json",
                           json.dumps(runtime), "--", *shlex.split(manifest["spec"]["entrypoint"]))


@pytest.mark.entry("Ra1", "train in a Ray job whose runtime environment sets `NCCL_*`, `GLOO_*` or `OMP_*` variables, such as the "
                   "job of `ngsgd submit cluster=kubernetes`", "works",
                   "the job's values win, also in the workers; the entry point of the manifest trains to its end on a local Ray")
@pytest.mark.parametrize("variables", [{}, _OF_THE_JOB], ids=["as made", "of the job"])
def test_the_entry_point_of_a_kubernetes_manifest_trains(variables: dict[str, str], containers: Machines, tmp_path: Path) -> None:
    name = f"kube{len(variables)}"
    manifest = yaml.safe_load(_submitted("--to", "kubernetes", "--job-name", name, "--nodes", "2", "--cpus-per-node", "1", "--claim", "c",
                                         "--mount", str(tmp_path), f"output_dir={tmp_path}/runs", *_settings(tmp_path)))
    for pod in pods(manifest):
        given = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert given.items() <= of_image().items(), "the containers here stand for the pods"
    runtime = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])
    runtime["env_vars"] |= variables
    manifest["spec"]["runtimeEnvYAML"] = yaml.safe_dump(runtime)
    done = _run_job(containers, manifest, name)
    assert done.returncode == 0, done.stdout + done.stderr
    _finished(tmp_path / "runs", name)
    for environment in _seen(tmp_path):
        assert environment.items() >= {"OMP_WAIT_POLICY": "PASSIVE", **variables}.items()
