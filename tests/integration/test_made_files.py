"""Files that ngsgd writes for clusters are run, and the commands that it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ngsgd.launcher import cli
from tests.docs.pages import FENCE
from tests.integration.machines import DOCKER, ROOT, Machines, end_processes, machines, of_image, pods
from tests.tiers import HANGS_S

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray")]  # one Ray at a time

_PROGRAM = str(Path(sys.executable).parent / "ngsgd")
# a variable of each kind that ngsgd would set or pass on itself
_OF_THE_JOB = {"OMP_WAIT_POLICY": "ACTIVE", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
               "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}


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


def _manifest(name: str, *words: str) -> dict[str, Any]:
    """Two workers with a CPU each."""
    text = _submitted("--to", "kubernetes", "--job-name", name, "--nodes", "2", "--cpus-per-node", "1", *words)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _run_job(containers: Machines, manifest: dict[str, Any], name: str,
             variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command of KubeRay's submitter pod, with variables that a user adds to runtimeEnvYAML."""
    environment = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]
    runtime = json.dumps({"env_vars": {**environment, **variables}})
    return containers.call("head", "ray", "job", "submit", "--address", containers.url, "--submission-id", name,
                           "--runtime-env-json", runtime, "--", *shlex.split(manifest["spec"]["entrypoint"]))


@pytest.mark.entry("Ra1", "train in a Ray job whose runtime environment sets `NCCL_*`, `GLOO_*` or `OMP_*` variables, such as the "
                   "job of `ngsgd submit cluster=kubernetes`", "works",
                   "the job's values win, also in the workers; the entry point of the manifest trains to its end on a local Ray")
@pytest.mark.parametrize("variables", [{}, _OF_THE_JOB], ids=["as made", "of the job"])
def test_the_entry_point_of_a_kubernetes_manifest_trains(variables: dict[str, str], containers: Machines, tmp_path: Path) -> None:
    name = f"kube{len(variables)}"
    manifest = _manifest(name, "--claim", "c", "--mount", str(tmp_path), f"output_dir={tmp_path}/runs", *_settings(tmp_path))
    for pod in pods(manifest):
        given = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert given.items() <= of_image().items(), "the containers here stand for the pods"
    done = _run_job(containers, manifest, name, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    _finished(tmp_path / "runs", name)
    for environment in _seen(tmp_path):
        assert environment.items() >= {"OMP_WAIT_POLICY": "PASSIVE", **variables}.items()


@pytest.mark.entry("Nc12")
def test_a_manifest_without_a_claim_trains_into_object_storage(containers: Machines, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    from tests.object_storage.service import running

    credentials: dict[str, str] = {}
    with running(credentials.__setitem__):
        manifest = _manifest("stored", "output_dir=s3://bucket/runs", *_settings(tmp_path))
        # a Secret of the pods, in docs/kubernetes.md
        more = {**credentials, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = _run_job(containers, manifest, "stored", more)
        assert done.returncode == 0, done.stdout + done.stderr
        more["XDG_CACHE_HOME"] = str(tmp_path / "other machine")
        listed = containers.call("head", _PROGRAM, "status", "s3://bucket/runs", "--json", **more)
        [run] = json.loads(listed.stdout)
        assert run["is_finished"], listed.stdout
    assert len(_seen(tmp_path)) >= 2


def _exported(containers: Machines, run: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values of a run by metric, as Prometheus reads them after the first iteration."""
    [targets] = containers.folder.glob("ray/prom_metrics_service_discovery.json")
    deadline = time.monotonic() + HANGS_S
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    while "ray_ngsgd_workers_participation" not in found:
        assert time.monotonic() < deadline, "no metrics came"
        time.sleep(0.5)
        found = {}
        for target in {one for group in json.loads(targets.read_text()) for one in group["targets"]}:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=HANGS_S) as answer:
                lines = re.findall(r"^(ray_ngsgd_\w+)\{(.*)\} (\S+)$", answer.read().decode(), re.MULTILINE)
                for name, text, value in lines:
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
                    # those of jobs that ended stay for a while
                    if labels["run"].startswith(f"{run}-"):
                        found.setdefault(name, []).append((labels, float(value)))
    return found


@pytest.mark.entry("Nc17", "train on a Ray cluster that was joined, and open its dashboard or Prometheus", "works",
                   "objective, participation, seconds by phase, workers and bytes of parameters are metrics of Ray, with the name "
                   "of the run as a label. A Ray that a run starts for itself has none")
def test_a_submitted_ray_job_trains_and_its_printed_commands_work(containers: Machines, tmp_path: Path) -> None:
    words = ["--dashboard-url", containers.url, "--program", _PROGRAM, "--job-name", "night", "name=night",
             *_settings(tmp_path, "cluster.num_workers=2", "cluster.threads_per_worker=1", f"output_dir={tmp_path}/runs")]
    report = containers.call("head", _PROGRAM, "submit", *words)
    assert report.returncode == 0, report.stderr
    [equivalent] = re.findall(r"^equivalent: (.*)$", report.stdout, re.MULTILINE)
    assert equivalent == containers.call("head", _PROGRAM, "submit", "--dry-run", *words).stdout.strip()
    figures = _exported(containers, "night")
    [follow] = re.findall(r"^follow it with: (.*)$", report.stdout, re.MULTILINE)
    followed = containers.call("head", *shlex.split(follow))
    assert followed.returncode == 0, followed.stdout + followed.stderr
    run = _finished(tmp_path / "runs", "night")
    # on a machine that does not see the folder of the run
    status = ("status", "--dashboard-url", containers.url, "night")
    assert re.search(r"^progress   iter \d+/\d+, epoch [\d.]+/2, .*valid [\d.]+", containers.call("head", _PROGRAM, *status).stdout,
                     re.MULTILINE)
    [job] = json.loads(containers.call("head", _PROGRAM, *status, "--json").stdout)
    assert job["state"] == "SUCCEEDED" and job["progress"]["epoch"] == "2.00/2"
    assert {labels["run"] for found in figures.values() for labels, _ in found} == {run.name}
    assert [value for _, value in figures["ray_ngsgd_workers_participation"]] == [1.0]
    # training begins with the first worker that is ready
    assert [value for _, value in figures["ray_ngsgd_workers_alive"]] in ([1.0], [2.0])
    assert {"ray_ngsgd_loss_valid", "ray_ngsgd_time_compute_s", "ray_ngsgd_time_average_s"} <= set(figures)
    moved = {labels["direction"] for labels, value in figures["ray_ngsgd_parameter_bytes_total"] if value > 0}
    assert moved == {"sent", "received"}
    # with another name, the command of Ray itself
    again = containers.call("head", *shlex.split(equivalent.replace(" night ", " night2 ").replace("name=night ", "name=night2 ")
                                                 .replace(" --no-wait", "")))
    assert again.returncode == 0, again.stdout + again.stderr
    _finished(tmp_path / "runs", "night2")


def test_the_command_in_compose_reaches_the_head(containers: Machines) -> None:
    [line] = re.findall(r"^# +docker compose .* exec head \\\n# +(.*)$", (DOCKER / "compose.yaml").read_text(), re.MULTILINE)
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert f"exec head {line}\n" in page
    done = containers.call("head", *shlex.split(line), "--dashboard-url", containers.url, "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    assert containers.call("worker", "healthcheck.sh").returncode == 0


def test_the_commands_of_the_cluster_page_train_submit_and_resume(tmp_path: Path) -> None:
    """One after another in a shell, with small settings and one machine for all."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    blocks = [body for _, body in FENCE.findall(page) if re.search(r"^ngsgd (train|submit) ", body, re.MULTILINE)]
    more = shlex.join(_settings(tmp_path, "cluster.threads_per_worker=1"))
    with machines() as found:
        script = ["set -e"]
        for line in "".join(blocks[:2]).replace("num_workers=16", "num_workers=2").splitlines():
            trains = line.startswith(("ngsgd train", "ngsgd submit")) and "--resume" not in line
            here = re.sub(r"/shared/runs/night-\S+", f"$(ls -d {tmp_path}/runs/night-*)", f"{line} {more}" if trains else line)
            here = here.replace("/shared/runs", f"{tmp_path}/runs").replace("http://127.0.0.1:8265", found.url)
            script.append(here.replace("cluster.address=HEAD:6379", f"cluster.address=127.0.0.1:{found.port}"))
        done = subprocess.run(["bash", "-c", "\n".join(script)], env=found.base(), cwd=tmp_path, capture_output=True, text=True,
                              check=False, timeout=HANGS_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert stat.S_IMODE((found.folder / ".ray" / "auth_token").stat().st_mode) == 0o600
        assert len(list((tmp_path / "runs").glob("*/final/model.safetensors"))) == 2, "by hand, and as a job"


_PIP = """\
#!{bash}
# python whose environments are empty, and which reads what it would install
set -e
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit; fi
echo "${{@:4}}" >> {log}
exec {python} "$@" --help >/dev/null
"""


def test_the_build_steps_of_the_image_run(tmp_path: Path) -> None:
    steps, log, fake = str(DOCKER / "build-steps.sh"), tmp_path / "log", tmp_path / "python"
    fake.write_text(_PIP.format(bash=shutil.which("bash"), log=log, python=sys.executable))
    fake.chmod(stat.S_IRWXU)
    environment = {**os.environ, "PYTHON": str(fake), "PYTHONPATH": str(ROOT)}
    subprocess.run([steps, "install", str(tmp_path / "venv"), "https://index"], env=environment, cwd=ROOT, check=True)
    tools, torch, package = log.read_text().splitlines()
    assert torch.endswith("--index-url https://index --no-deps torch") and "--index-url" not in tools + package
    done = subprocess.run([steps, "check", str(Path(sys.executable).parents[1])], env=environment, cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tracking_server_of_compose_becomes_healthy() -> None:
    pytest.importorskip("mlflow")
    with machines() as found:
        found.start("mlflow")


_STAND_INS = {
    "scontrol": 'case "$1 $2" in "show hostnames") echo node1; echo node2 ;; "show job") echo "JobState=RUNNING" ;; esac',
    # a step runs here, without srun's own flags
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1",
}


def test_the_slurm_script_trains_with_stand_ins_for_slurm_alone(tmp_path: Path) -> None:
    text = _submitted("--to", "slurm", "--job-name", "night", "--nodes", "2", "--cpus-per-node", "1", "--program", _PROGRAM,
                      "--setup", "export OMP_WAIT_POLICY=ACTIVE", f"output_dir={tmp_path}/runs", *_settings(tmp_path))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in _STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(stat.S_IRWXU)
    # the port and the folder of Ray follow from it
    job = str(os.getpid())
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                   "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1",
                   "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", text], env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        assert process.wait(timeout=HANGS_S) == 0, (tmp_path / "log").read_text()
    finally:
        # Slurm ends the other steps with the job; the second node's Ray waits a minute for its head
        end_processes(f"/tmp/ngsgd-{job}")
        shutil.rmtree(f"/tmp/ngsgd-{job}", ignore_errors=True)
    assert _finished(tmp_path / "runs", "night").name.startswith(f"night-{job}")
    assert {environment["OMP_WAIT_POLICY"] for environment in _seen(tmp_path)} == {"ACTIVE"}, "the value of --setup wins"
