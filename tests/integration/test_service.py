"""End to end, as a user runs it: data, workers, averaging, decoding, a stop, a kill, a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from ngsgd.training.storage.audit import audit
from tests.integration.service import WER_LINE, Service, events, final_hash, wers
from tests.tiers import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
# one Ray at a time: this file starts one as a command does
pytestmark = pytest.mark.same_process("ray")


@pytest.fixture(scope="module")
def whole_run(service: Service) -> Path:
    """A run that nobody disturbed."""
    done = service.call("cluster=in_process", "name=whole")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert wers(done.stdout).keys() == {"valid", "test"}, done.stdout
    (run,) = service.runs("whole")
    return run


@pytest.mark.end_to_end
def test_a_run_writes_all_documented_files(whole_run: Path) -> None:
    for name in ("config.yaml", "events.jsonl", "ledger.jsonl", "final/model.safetensors", "final/model.json",
                 "decode/wer.json", "decode/test.per_utt.txt", "learning_curve.png"):
        assert (whole_run / name).stat().st_size > 0, name
    assert audit(whole_run / "ledger.jsonl") == []
    (report,) = events(whole_run, "finished")
    for path in report["files"].values():
        assert Path(path).exists(), path
    steps = events(whole_run, "outer_iteration")
    assert steps[-1]["valid"]["objf"] > steps[0]["valid"]["objf"]
    priors = json.loads((whole_run / "final/model.json").read_text())["priors"]
    assert sum(priors) == pytest.approx(1.0)
    assert not list(whole_run.parent.rglob("*.tmp"))


def _stopped(service: Service, number: signal.Signals, outer_iter: int) -> Path:
    """The folder of a run that got that signal after that outer iteration."""
    process = service.start("cluster=in_process", f"name={number.name}")
    run = service.wait_for_outer_iteration(outer_iter, number.name, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    assert f"ngsgd resume {run}" in err
    assert "Traceback" not in err
    return run


@pytest.mark.slow
def test_sigterm_stops_a_run_that_can_be_resumed(service: Service) -> None:
    _stopped(service, signal.SIGTERM, 1)


@pytest.mark.end_to_end
def test_ctrl_c_stops_a_run_and_resuming_gives_the_bits_of_the_complete_run(service: Service, whole_run: Path) -> None:
    run = _stopped(service, signal.SIGINT, 3)
    assert WER_LINE.search(service.output(str(run), command="resume"))
    assert final_hash(run) == final_hash(whole_run)
    assert audit(run / "ledger.jsonl") == []


@pytest.mark.faults
def test_a_coordinator_killed_outright_can_be_resumed(service: Service, whole_run: Path) -> None:
    process = service.start("cluster=in_process", "name=killed")
    run = service.wait_for_outer_iteration(2, "killed", process)
    process.kill()
    process.communicate()
    assert service.call(str(run), command="resume").returncode == 0
    assert final_hash(run) == final_hash(whole_run)
    assert audit(run / "ledger.jsonl") == []


@pytest.mark.faults
def test_a_ray_worker_killed_in_the_middle_costs_nothing(service: Service, whole_run: Path) -> None:
    process = service.start("cluster=ray", "name=ray")
    run = service.wait_for_outer_iteration(1, "ray", process)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True)
               if any("RayWorker" in word for word in child.cmdline())]
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, err
    assert f"process {workers[0].pid} on" in out + err
    assert "retried" in out + err
    assert audit(run / "ledger.jsonl") == []
    assert final_hash(run) == final_hash(whole_run)
    assert not [worker for worker in workers if worker.is_running()]


_COMMAND = """
import sys
from ngsgd.launcher.cli import main
code = main(sys.argv[1:])
print("ray" in sys.modules)
sys.exit(code)
"""


@pytest.mark.entry("Nc15")
@pytest.mark.services
def test_the_default_command_starts_no_ray_and_has_the_results_of_ray(tmp_path: Path) -> None:
    models = []
    for words, kind, has_ray in (([], "local", "False"), (["cluster=ray"], "ray", "True")):
        settings = ["task=tests.tasks.blobs:make_task", f"task.search_path={ROOT}", "tracking.kind=none", "schedule.num_epochs=2",
                    "cluster.threads_per_worker=1", f"output_dir={tmp_path}", f"name={kind}", *words]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        done = subprocess.run([sys.executable, "-c", _COMMAND, "train", *settings], capture_output=True, text=True, check=False,
                              env={**environment, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, timeout=HANGS_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == has_ray
        [run] = tmp_path.glob(f"{kind}-*")
        assert yaml.safe_load((run / "config.yaml").read_text())["cluster"]["kind"] == kind
        assert {one["worker"] for record in events(run, "outer_iteration") for one in record["jobs"]} == {0, 1}
        models.append(final_hash(run))
    assert models[0] == models[1]
