"""End to end, as a user runs it: data, workers, averaging, decoding, a stop, a kill, a resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from ngsgd.training.storage.audit import audit
from tests.integration.service import WER_LINE, Service, events, final_hash, wers
from tests.tiers import HANGS_S

# one Ray at a time: this file starts one as a command does
pytestmark = pytest.mark.same_process("ray")

# a command that takes longer hangs, on a slow and busy machine, too


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("service"))


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


@pytest.mark.slow
def test_plain_sgd_runs_too(service: Service) -> None:
    done = service.call("cluster=in_process", "optimizer=sgd", "model=pnorm", "model.hidden_dim=60", "name=sgd",
                        "schedule.num_epochs=1")
    assert done.returncode == 0, done.stderr
    assert WER_LINE.search(done.stdout)


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
    done = service.call(str(run), command="resume")
    assert done.returncode == 0, done.stderr
    assert WER_LINE.search(done.stdout)
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
