"""Runs handed to clusters: the submitted job is correct, checked in advance, and shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, ClusterError, ConfigError
from ngsgd.files import sealed
from ngsgd.launcher import cli
from ngsgd.launcher.ray import jobs as ray_jobs
from ngsgd.launcher.reports.progress import final_lines, iteration_line
from ngsgd.training.worker import choose_device
from tests.launcher.records import TEST_ERRORS, Command, final_report, outer_iteration
from tests.tiers import HANGS_S

ROOT = Path(__file__).resolve().parents[3]


class Jobs:
    """A JobSubmissionClient that remembers."""

    def __init__(self) -> None:
        self.submitted: list[dict[str, Any]] = []
        self.states = ["RUNNING", "STOPPED"]
        self.stopped: list[str] = []
        self.refusals = 0
        self.log = "said\n"

    def submit_job(self, **what: Any) -> str:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("Request failed with status code 500: No available agent to submit job, please try again later")
        self.submitted.append(what)
        return str(what["submission_id"])

    def get_job_status(self, job: str) -> Any:
        if job != "night":
            raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")
        return SimpleNamespace(value=self.states.pop(0) if len(self.states) > 1 else self.states[0])

    def get_job_logs(self, job: str) -> str:
        return self.log

    def get_job_info(self, job: str) -> Any:
        [found] = self.list_jobs()
        return found

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)

    def list_jobs(self) -> list[Any]:
        return [SimpleNamespace(submission_id="night", job_id=None, status=SimpleNamespace(value="RUNNING"), message="m",
                                entrypoint="ngsgd train", start_time=1, end_time=None)]


@pytest.fixture
def run(tmp_path: Path) -> None:
    """A run whose name is that of a job."""
    folder = tmp_path / "runs" / "night-20260101-200000"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Jobs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_jobs, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    fake = Jobs()
    monkeypatch.setattr(ray_jobs, "connect", lambda door: fake)
    return fake


def test_a_ray_job_gets_absolute_paths_and_time_to_stop(jobs: Jobs, tmp_path: Path, command: Command) -> None:
    jobs.refusals = 2   # a head that has just started
    reported = command("submit", "--job-name", "night", "--dashboard-url", "head:8265", "seed=3",
                   "output_dir=here").out
    [sent] = jobs.submitted
    assert sent["entrypoint"] == f"ngsgd train output_dir={tmp_path}/here seed=3 cluster=ray cluster.address=auto"
    assert int(sent["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
    assert "--address http://head:8265 --submission-id night" in reported
    assert "logs --follow --dashboard-url http://head:8265 night" in reported


@pytest.mark.parametrize("to", [[], ["--to", "slurm"], ["--to", "kubernetes", "--claim", "c"]])
def test_a_resumed_run_joins_the_cluster_of_its_job(to: list[str], command: Command) -> None:
    words = command("submit", *to, "--dry-run", "--resume", "/shared/runs/x", "--workers", "3",
                    "--allow-other-bits").out.split()
    at = words.index("/shared/runs/x")
    assert words[at + 1:at + 6] == ["--address", "auto", "--workers", "3", "--allow-other-bits"]


@pytest.mark.parametrize(("words", "reported"), [
    (["sede=3"], "seed=3"),
    (["cluster.address=x:1"], "cluster.address"),
    (["cluster=local"], "cluster.address and cluster=local."),
    (["--to", "slurm", "cluster=kubernetes"], "--to"),
    (["--resume", "runs/x", "seed=1"], "--resume"),
    (["--resume", "runs/x", "cluster=slurm"], "--to slurm"),
    (["--nodes", "8"], "--nodes"),
    (["--time=2:00:00", "seed=3"], "--time"),
    (["--workers", "3"], "cluster.num_workers=3"),
    (["cluster=slurm", "--token-file", "t"], "--token-file"),
    (["cluster=kubernetes", "--claim", "c", "--sbatch=--mem=3G"], "--sbatch"),
    (["--resume", "runs/x", "--config-dir", "conf"], "--config-dir"),
    (["--to", "slurm", "--nodes", "0"], "--nodes is 0"),
    (["--to", "slurm", "--sbatch=mem 3"], "--sbatch is 'mem 3'"),
    (["--to", "slurm", "--job-name", "a b"], "letters"),
    (["--program", "'ngsgd", "--dry-run"], "--program"),
    (["--to", "slurm", "--time", "foo", "--dry-run"], "--time is 'foo'"),
    (["--to", "slurm", "--dry-run", "--nodes", "2", "--cpus-per-node", "4", "cluster.num_workers=16"], "cluster.num_workers is 16"),
    (["--to", "slurm", "--dry-run", "--cpus-per-node", "4", "cluster.threads_per_worker=8"], "--cpus-per-node"),
    (["--to", "kubernetes", "--dry-run", "--claim", "c", "--cpus-per-node", "1", "cluster.num_workers=3"],
     "cluster.num_workers is 3"),
    (["cluster=kubernetes", "--claim", "c", "--setup", "module load x"], "--setup"),
    (["--to", "kubernetes", "output_dir=/shared/runs"], "--claim is missing"),
    (["--to", "kubernetes", "--claim", "c", "output_dir=runs"], "/runs"),
    (["--to", "kubernetes", "--claim", "c", "--resume", "/data/runs/x"], "/data/runs/x"),
    (["--to", "kubernetes", "--claim", "c", "--mount", "/data", "output_dir=/shared/runs"], "/data"),
    (["--to", "kubernetes", "--claim", "c", "--job-name", "Night_1", "output_dir=/shared/runs"], "47 "),
])
def test_mistakes_are_reported_before_anything_is_sent(words: list[str], reported: str, jobs: Jobs,
                                                   command: Command) -> None:
    assert reported in command("submit", *words, code=2).err
    assert jobs.submitted == []


def test_status_logs_and_stop_of_ray_jobs(jobs: Jobs, command: Command) -> None:
    found = json.loads(command("status", "--dashboard-url", "head:8265", "--json").out)
    assert found[0]["state"] == "RUNNING"
    assert command("logs", "night").out == "said\n"
    assert command("stop", "night").out == "night STOPPED\n" and jobs.stopped == ["night"]
    assert "nigth" in command("stop", "nigth", code=2).err


@pytest.mark.entry("Nc16", "`ngsgd status --dashboard-url URL JOB` on a machine that does not see the folder of the run", "works",
                   "the newest epoch and objective of the job, and the WER after its end, from the log of the job, as text and "
                   "with `--json`")
def test_status_of_a_ray_job_has_its_progress_and_its_wer(jobs: Jobs, command: Command) -> None:
    words = ("status", "--dashboard-url", "head:8265", "night")
    assert command(*words).out.splitlines() == [f"{'night':40} {'RUNNING':10} ngsgd train"], "no outer iteration yet"
    jobs.log = "said\n" + iteration_line(outer_iteration(2, valid_objf=-1.25)) + "\n"
    assert "epoch " in command(*words).out and "valid -1.250" in command(*words).out
    jobs.log += "\n".join(final_lines(final_report()))
    assert f"result     {TEST_ERRORS}" in command(*words).out.splitlines()
    [found] = json.loads(command(*words, "--json").out)
    assert (found["progress"]["valid"], found["wer_percent"]) == ("-1.250", pytest.approx(TEST_ERRORS.wer, abs=0.01))


@pytest.mark.parametrize("words", [["status"], ["status", "night"], ["status", "runs"], ["logs", "night"], ["stop", "night"]])
@pytest.mark.usefixtures("run")
def test_a_token_without_a_ray_cluster_is_refused(words: list[str], jobs: Jobs, command: Command) -> None:
    captured = command(*words, "--token-file", "token", code=2)
    assert "--token-file" in captured.err and captured.out == ""
    assert jobs.stopped == []


@pytest.mark.usefixtures("run")
def test_a_dashboard_url_selects_the_job_and_not_a_run_of_its_name(jobs: Jobs, command: Command) -> None:
    command("stop", "night")
    assert jobs.stopped == []
    command("stop", "--dashboard-url", "head:8265", "night")
    assert jobs.stopped == ["night"]
    assert command("logs", "--dashboard-url", "head:8265", "night").out == "said\n"


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_an_unknown_run_without_ray_is_a_mistake(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str) -> None:
        raise ClusterError(address)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr("ngsgd.launcher.commands.cluster.jobs.require_dashboard", missing)
    assert cli.main([command, "nosuchrun"]) == ConfigError.exit_code


@pytest.mark.parametrize(("status", "code"), [("KILLED", EXIT_INTERRUPTED), ("FAILED", EXIT_RUN_FAILED)])
def test_logs_of_a_failed_run_end_with_its_error(status: str, code: int, tmp_path: Path,
                                                 command: Command) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "closed", "status": status}) + "\n")
    (tmp_path / "error.json").write_text(json.dumps(sealed("error", {"exit_code": 3, "message": "the cause"})))
    assert "the cause" in command("logs", "--follow", str(tmp_path), code=code).out


def test_the_name_of_a_job_is_used_once(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(**_what: Any) -> str:
        raise RuntimeError("Request failed with status code 500: Job with submission_id night already exists.")

    monkeypatch.setattr(jobs, "submit_job", exists)
    assert cli.main(["submit", "--job-name", "night"]) == ConfigError.exit_code


@pytest.mark.parametrize(("said", "reported"), [
    ("Request failed with status code 401: Unauthorized", "refuses"),
    ("Failed to connect to Ray at address: http://x", "answers")])
def test_errors_of_ray_become_one_message(said: str, reported: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch,
                                          command: Command) -> None:
    def refuse() -> None:
        raise ConnectionError(said)

    monkeypatch.setattr(jobs, "list_jobs", refuse)
    assert reported in command("status", "--dashboard-url", "head:8265", code=5).err


def test_a_token_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the environment")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "elsewhere")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (tmp_path / "token").write_text("x" * 32)
    ray_jobs.use_token(ray_jobs.JobServer("http://head:8265", str(tmp_path / "token")))
    assert "RAY_AUTH_TOKEN" not in os.environ and os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")


def _slurm(command: Command, *words: str) -> str:
    return command("submit", "--to", "slurm", "--dry-run", "--job-name", "night", *words).out


def test_the_slurm_script_is_sound_shell(command: Command, tmp_path: Path) -> None:
    text = _slurm(command, "--nodes", "3", "--gpus-per-node", "2", "--partition", "gpu", "--sbatch=--mem=32G",
                  "output_dir=/shared/runs", "name=mine")
    for line in ("--mem=32G", "--nodes=3", "--gpus-per-node=2", "--partition=gpu", "--requeue", "--signal=B:TERM@120"):
        assert f"#SBATCH {line}\n" in text
    assert "ngsgd train output_dir=/shared/runs " in text
    assert ' --continue name=mine-"$SLURM_JOB_ID" cluster=ray cluster.address=auto &' in text, "a requeued job keeps its number"
    assert "--continue name=night-" in _slurm(command), "without name= that of the job"
    assert "python -m ngsgd train " in _slurm(command, "--program", "python -m ngsgd")
    lines = ["module load python/3.11", "export PATH=/opt/venv/bin:$PATH", "set -u"]
    assert "\n".join(lines) in _slurm(command, "--setup", lines[0], "--program", "/opt/venv/bin/ngsgd")
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", str(tmp_path / "job.sh")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("words", "num_workers", "num_threads"), [
    (["--nodes", "4", "--cpus-per-node", "8"], 4, 8),
    (["--nodes", "4", "--cpus-per-node", "8", "--gpus-per-node", "2"], 8, 4),
    (["--nodes", "2", "--cpus-per-node", "8", "--gpus-per-node", "4", "cluster.ranks_per_worker=4"], 2, 2),
    (["--nodes", "3", "--cpus-per-node", "4", "cluster.num_workers=12"], 12, 1),
    (["--nodes", "3", "--cpus-per-node", "4", "cluster.num_workers=2", "cluster.threads_per_worker=3"], 2, 3)])
def test_workers_and_threads_follow_the_machines_unless_given(words: list[str], num_workers: int, num_threads: int,
                                                              command: Command) -> None:
    text = _slurm(command, *words)
    assert re.findall(r"cluster\.num_workers=(\d+)", text) == [str(num_workers)]
    assert re.findall(r"cluster\.threads_per_worker=(\d+)", text) == [str(num_threads)]


@pytest.mark.parametrize(("place", "more"), [("slurm", []), ("kubernetes", ["--claim", "runs"]), ("ray", [])])
def test_the_cluster_group_selects_the_scheduler(place: str, more: list[str], command: Command) -> None:
    words = ["--dry-run", "--job-name", "night", "output_dir=/shared/runs", "seed=1", *more]
    by_group = command("submit", f"cluster={place}", *words).out
    by_flag = command("submit", "--to", place, *words).out
    assert re.sub(r"\d{14}", "", by_group) == re.sub(r"\d{14}", "", by_flag), "but for the time"
    assert re.findall(r"cluster=(\w+)", by_group) == ["ray"], "within the job"


@pytest.mark.parametrize(("kind", "word", "begins"), [
    ("", "", "ray job submit"), ("slurm", "", "#!/bin/bash"), ("slurm", "cluster=ray", "ray job submit"),
    ("local", "cluster=ray", "ray job submit"), ("local", "", "")])
def test_a_recipe_selects_the_scheduler_unless_the_command_line_does(kind: str, word: str, begins: str, tmp_path: Path,
                                                                     command: Command) -> None:
    (tmp_path / "recipe").mkdir()
    cluster = f"cluster: {{kind: {kind}}}\n" if kind else ""
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\nseed: 3\n{cluster}")
    found = command("submit", "--config-dir", str(tmp_path), "--dry-run", "recipe=mine", *word.split(), code=0 if begins else 2)
    assert found.out.startswith(begins) and bool(found.out) == bool(begins)
    assert "cluster.kind=local" in found.err or begins


@pytest.mark.entry("Nc15")
@pytest.mark.parametrize("variable", ["", "10.0.0.1:6379", "http://head:8265"])
def test_a_job_joins_its_own_cluster_whatever_this_shell_uses(variable: str, command: Command,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    for words in ([], ["data.store=s3://bucket/data", "cluster.exchange=object_store"]):
        reported = command("submit", "--dry-run", "seed=3", *words).out
        assert reported.startswith("ray job submit --address http://127.0.0.1:8265 ")
        assert reported.rstrip().endswith(" cluster=ray cluster.address=auto")


def test_train_names_the_command_for_a_cluster(command: Command) -> None:
    assert "ngsgd submit cluster=slurm" in command("train", "cluster=slurm", code=2).err


_STAND_INS = {
    "scontrol": 'case "$1 $2" in "show hostnames") echo node1; echo node2;; "show job") echo "JobState=$STATE PreemptTime=None";; '
                '*) echo "$@" >> "$LOG";; esac',
    # a step runs here, without srun's own flags; a node's Ray sleeps until it is ended
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "ray": 'echo "ray $*" >> "$LOG.ray"; case $1 in status) echo " 1 node_a"; echo " 1 node_b";; *) exec sleep 600;; esac',
    "ngsgd": 'trap "exit 130" TERM; echo "ngsgd $*" >> "$LOG"; for i in $(seq 3000); do sleep 0.1; done',
    "hostname": 'case $1 in --ip-address) echo 127.0.1.1;; *) echo "fd00::2 10.0.0.1 192.168.0.1 ";; esac',
}


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_a_warned_slurm_job_saves_queues_again_and_resumes_but_a_cancelled_one_ends(
        state: str, tmp_path: Path, command: Command) -> None:
    """The script itself, with stand-ins for Slurm, Ray and ngsgd."""
    text = _slurm(command, f"output_dir={tmp_path}/runs")
    tools, log = tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    for name, body in _STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(stat.S_IRWXU)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(log), "STATE": state, "SLURM_JOB_ID": "77",
                   "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    process = subprocess.Popen(["bash", "-c", text], env=environment, start_new_session=True)
    try:
        _wait_for(log, "ngsgd")
        process.terminate()
        assert process.wait(timeout=HANGS_S) == (0 if state == "RUNNING" else 130)
    finally:
        subprocess.run(["bash", "-c", f"kill -- -{process.pid}"], capture_output=True, check=False)
    assert "--node-ip-address=10.0.0.1 --port=20077" in Path(f"{log}.ray").read_text(), "the others cannot reach a loopback address"
    lines = log.read_text().splitlines()
    assert lines[0].startswith(f"ngsgd train output_dir={tmp_path}/runs ")
    assert lines[0].endswith(" --continue name=night-77 cluster=ray cluster.address=auto")
    assert lines[1:] == (["requeue 77"] if state == "RUNNING" else [])


def _wait_for(file: Path, word: str) -> None:
    import time

    for _ in range(600):   # a shared machine
        if file.exists() and word in file.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{word} did not come into {file}")


# Kubernetes: the fields of KubeRay's RayJob (v1) that the manifest uses, and no other, written from
# its documentation, with the rules by which its operator refuses a job
def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Of these fields only."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_CONTAINER = _object(
    "name image", name=_TEXT, image={"type": "string", "minLength": 1},
    env={"type": "array", "items": _object("name value", name=_TEXT, value=_TEXT)},
    volumeMounts={"type": "array", "items": _object("name mountPath", name=_TEXT, mountPath={"type": "string", "pattern": "^/"})},
    securityContext=_object(allowPrivilegeEscalation={"const": False}), resources=_object(requests=_TEXTS, limits=_TEXTS))
_VOLUME = _object("name", name=_TEXT, emptyDir=_object(medium={"const": "Memory"}),
                  persistentVolumeClaim=_object("claimName", claimName={"type": "string", "minLength": 1}))
_POD = _object("spec", spec=_object(
    "containers", terminationGracePeriodSeconds=_COUNT, volumes={"type": "array", "items": _VOLUME},
    securityContext=_object(runAsNonRoot={"const": True}, runAsUser={"type": "integer", "minimum": 1}, fsGroup=_COUNT),
    containers={"type": "array", "minItems": 1, "items": _CONTAINER}))
_RAY_CLUSTER = _object(
    # tokens need a version of Ray that can be compared
    "rayVersion headGroupSpec", rayVersion={"type": "string", "pattern": r"^\d+\.\d+(\.\d+)?$"},
    authOptions=_object(mode={"enum": ["disabled", "token"]}),
    headGroupSpec=_object("template", rayStartParams=_TEXTS, template=_POD),
    # without the autoscaler both limits are required
    workerGroupSpecs={"type": "array", "items": _object(
        "groupName minReplicas maxReplicas template", groupName=_TEXT, replicas=_COUNT, minReplicas=_COUNT, maxReplicas=_COUNT,
        rayStartParams=_TEXTS, template=_POD)})
_RAY_JOB = _object(
    "apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata=_object("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}, namespace=_TEXT,
                     labels=_TEXTS),
    spec=_object("rayClusterSpec", entrypoint=_TEXT, shutdownAfterJobFinishes={"type": "boolean"}, backoffLimit=_COUNT,
                 ttlSecondsAfterFinished=_COUNT, runtimeEnvYAML=_TEXT, rayClusterSpec=_RAY_CLUSTER))


@pytest.mark.entry("Nc12")
@pytest.mark.parametrize("name", ["1night", "-night", "night-", "n" * 48, "Night", "n.1"])
def test_a_name_that_kuberay_refuses_is_refused_here(name: str, command: Command) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert "--job-name" in command("submit", "--to", "kubernetes", "--claim", "c", f"--job-name={name}", "output_dir=/shared/runs",
                                   code=2).err
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(name, _RAY_JOB["properties"]["metadata"]["properties"]["name"])
    for allowed in ("n", "night-1", "n" * 47, "n1"):
        manifest = _manifest(command, "--claim", "c", "--job-name", allowed, "output_dir=/shared/runs")
        jsonschema.validate(manifest, _RAY_JOB)


@pytest.mark.parametrize("kind", ["ray", "kubernetes"])
def test_mlflows_variables_go_with_a_job_without_their_login(kind: str, jobs: Jobs, command: Command,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"MLFLOW_EXPERIMENT_NAME": "e", "MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_RUN_ID": "12"}
    secret = {"MLFLOW_TRACKING_URI": "https://me:secret-word@host", "MLFLOW_TRACKING_PASSWORD": "secret-word"}
    for name, value in {**given, **secret}.items():
        monkeypatch.setenv(name, value)

    def sent(*words: str) -> tuple[dict[str, str], str]:
        if kind == "kubernetes":
            found = command("submit", "--to", "kubernetes", "--claim", "c", "--job-name", "night", "--dry-run", *words)
            return yaml.safe_load(yaml.safe_load(found.out)["spec"]["runtimeEnvYAML"])["env_vars"], found.out + found.err
        found = command("submit", "--job-name", "night", *words)
        return jobs.submitted[-1]["runtime_env"]["env_vars"], found.out + found.err
    variables, printed = sent("output_dir=/shared/runs")
    assert {name: value for name, value in variables.items() if name.startswith("MLFLOW_")} == {
        **given, "MLFLOW_TRACKING_URI": "https://host"}
    assert "MLFLOW_TRACKING_USERNAME" in printed and "secret-word" not in printed + str(jobs.submitted)
    # a run keeps its own
    assert not [name for name in sent("--resume", "/shared/runs/x")[0] if name.startswith("MLFLOW_")]


def test_the_kubernetes_manifest_fits_the_schema(command: Command) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    words = ["--nodes", "3", "--gpus-per-node", "1", "--claim", "runs", "--image", "r/ngsgd:1"]
    manifest = _manifest(command, *words, "output_dir=/shared/runs", "seed=1")
    jsonschema.validate(manifest, _RAY_JOB)
    spec = manifest["spec"]
    assert re.fullmatch(r"ngsgd train output_dir=/shared/runs seed=1 cluster\.num_workers=3 cluster\.device=cuda "
                        r"cluster\.threads_per_worker=4 --continue name=night-\d{14} cluster=ray cluster.address=auto",
                        spec["entrypoint"]), "a retry finds its run by a name that no other submission has"
    assert spec["backoffLimit"] == 3
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "60"
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    assert (group["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (3, "1")
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


@pytest.mark.entry("Nc12")
@pytest.mark.parametrize("found", ["not installed", "2.53.0"])
def test_a_version_of_ray_that_has_no_tokens_is_an_error(found: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("schedulers.kubernetes", "ray.probe"):
        monkeypatch.setattr(f"ngsgd.launcher.{module}.version", lambda package: found)
    said = command("submit", "--to", "kubernetes", "--claim", "c", "--dry-run", "output_dir=/shared/runs", code=2)
    assert "Ray" in said.err and said.out == ""


def _manifest(command: Command, *words: str) -> dict[str, Any]:
    words = ("--to", "kubernetes", "--dry-run", "--job-name", "night", *words)
    found: dict[str, Any] = yaml.safe_load(command("submit", *words).out)
    return found


@pytest.mark.entry("Nc12", "submit a run to Kubernetes with `output_dir=s3://BUCKET/runs` and no `--claim`", "works",
                   "the manifest mounts no volume. The run is published to the bucket. `--gpus-per-node` takes the image "
                   "`ngsgd:VERSION-cuda` and sets `cluster.device=cuda`, so that a worker without CUDA ends with a ConfigError; "
                   "the image holds all extras")
@pytest.mark.parametrize("words", [["output_dir=s3://bucket/runs"], ["--resume", "s3://bucket/runs/night-20260101-200000"]])
def test_a_run_in_object_storage_needs_no_claim(words: list[str], command: Command) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    manifest = _manifest(command, *words)
    jsonschema.validate(manifest, _RAY_JOB)
    assert words[-1] in manifest["spec"]["entrypoint"].split(), "a URL is no path of this machine"
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert [volume["name"] for volume in pod["volumes"]] == ["shm"]
        assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == ["shm"]
    refused = command("submit", "--to", "kubernetes", "--dry-run", "--mount", "/data", *words, code=2)
    assert "--mount" in refused.err
    claimed = _manifest(command, "--claim", "speech", *words)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert "speech" in json.dumps(claimed["volumes"]), "the data may be on a volume"


@pytest.mark.parametrize("to", ["ray", "slurm", "kubernetes"])
def test_the_url_of_a_run_to_resume_is_kept(to: str, command: Command) -> None:
    run = "s3://bucket/runs/night-20260101-200000"
    reported = command("submit", "--to", to, "--dry-run", "--resume", run).out
    assert f"resume {run} --address auto" in reported


@pytest.mark.entry("Nc12")
def test_gpus_of_a_job_are_used_or_an_error(command: Command) -> None:
    pages = (ROOT / "docs" / "kubernetes.md").read_text() + (ROOT / "docker" / "Dockerfile").read_text()
    [built] = {tag.rpartition("/")[2] for tag in re.findall(r"docker build .*-t (\S+) .*TORCH_INDEX", pages)}
    gpus = ["--gpus-per-node", "1"]
    for words, image, devices in (([], built.removesuffix("-cuda"), []), (gpus, built, ["cuda"]),
                                  ([*gpus, "--image", "r/mine", "cluster.device=auto"], "r/mine", ["auto"])):
        spec = _manifest(command, "output_dir=s3://bucket/runs", *words)["spec"]
        [container] = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
        assert (container["image"], re.findall(r"cluster\.device=(\w+)", spec["entrypoint"])) == (image, devices)
    assert "cluster.device=cuda" in _slurm(command, *gpus)


@pytest.mark.entry("Nc12")
@pytest.mark.parametrize(("is_built", "named"), [(False, "TORCH_INDEX"), (True, "cluster.device")])
def test_a_worker_without_cuda_names_the_cause(is_built: bool, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    with pytest.raises(ConfigError, match=named):
        choose_device("cuda")


@pytest.mark.entry("Nc12")
def test_the_image_has_all_extras() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    [installed] = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "docker" / "build-steps.sh").read_text())
    # a site of pages and a checkout of the tests are for developers
    assert set(installed.split(",")) == extras - {"docs", "dev"}


def test_docker_files_are_sound() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert set(services) == {"head", "worker", "mlflow"}
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["cap_drop"] == ["ALL"]
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    assert lines.index("USER 1000:1000") < lines.index('ENTRYPOINT ["entrypoint.sh"]')
    assert all("@sha256:" in line for line in lines if line.startswith("FROM ")), "a build can be repeated"
    for script in (ROOT / "docker").glob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        if shutil.which("shellcheck"):
            assert subprocess.run(["shellcheck", str(script)], check=False).returncode == 0, script
    entry = ["bash", str(ROOT / "docker" / "entrypoint.sh")]
    refused = subprocess.run([*entry, "head"], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert refused.returncode == 2 and "openssl rand" in refused.stderr
    assert subprocess.run([*entry, "true"], check=False).returncode == 0
