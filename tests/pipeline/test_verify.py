"""`ngsgd verify`: jobs of a run are repeated from its checkpoints and compared with its ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ngsgd
from ngsgd.cluster.fingerprint import FingerprintFile
from ngsgd.errors import AuditError, CheckpointError, ConfigError
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.pipeline.services import Services
from ngsgd.pipeline.task_run import TaskRun
from ngsgd.runs.verification import Request
from ngsgd.training.verification.repetition import Check, Sample
from tests.tasks import blobs

ALL = Request(Sample.parse("100%"))


def trained(folder: Path, **settings: Any) -> TaskRun:
    given = {"num_epochs": 2, "batch_size": 16, "cluster": "in_process", "output_dir": folder, **settings}
    return ngsgd.train(blobs.make_task, services=Services(), **given)


def change_ledger(run: TaskRun, change: Callable[[dict[str, Any]], None]) -> None:
    lines = read_json_lines(run.folder.ledger)
    for line in lines:
        if line["event"] == "accepted":
            change(line)
    run.folder.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {}, {"outer": "average"}, {"outer": {"kind": "diloco"}}, {"optimizer": {"curvature_state": "keep"}},
    {"optimizer": "sgd", "schedule": {"load_balancing": "speed"}},
    {"outer": {"kind": "bmuf", "overlap": True}}, {"compression": "sparse"},
    {"outer": {"kind": "streaming", "num_fragments": 2, "overlap": True}}],
    ids=["bmuf", "average", "diloco", "kept estimates", "speed", "overlap", "compression", "streaming"])
def test_all_jobs_of_kept_checkpoints_are_identical(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 100}, **settings)
    found = run.verify(ALL)
    assert found.num_repeatable == found.num_counted == found.count("identical") == len(found.checks) > 4
    assert not found.differences
    found.require_equal()


def test_without_its_model_a_job_is_not_repeated(tmp_path: Path) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 1}, combination="none")
    found = run.verify(ALL)
    # those of the first outer iteration start from the initial model
    assert {check.job.outer_iter for check in found.checks} == {0}
    assert found.num_repeatable < found.num_counted
    # without any outer iteration
    run.folder.ledger.unlink()
    with pytest.raises(CheckpointError):
        run.verify(ALL)


def test_models_for_the_final_combination_start_jobs_of_plain_averaging(tmp_path: Path) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 1}, outer="average", optimizer="sgd", combination="mean")
    found = run.verify(ALL)
    assert {check.job.outer_iter for check in found.checks} > {0}
    assert found.count("identical") == len(found.checks)


@pytest.mark.slow
def test_the_worker_of_a_wrong_result_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 100})

    def falsify(line: dict[str, Any]) -> None:
        if line["worker"] == 1:
            line["digest"] = f"{int(line['digest'], 16) ^ 1:016x}"
    change_ledger(run, falsify)
    found = run.verify(ALL)
    assert {check.job.worker for check in found.checks if check.outcome == "differs"} == {1}
    with pytest.raises(AuditError, match="worker 1") as caught:
        found.require_equal()
    assert "worker 0" not in str(caught.value)


@pytest.mark.slow
def test_if_every_worker_differs_machine_or_fingerprint_are_suspected(tmp_path: Path) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 100})
    change_ledger(run, lambda line: line.update(digest="0" * 16))
    with pytest.raises(AuditError, match="all workers"):
        run.verify(ALL).require_equal()
    # then objectives are compared
    file = FingerprintFile(run.folder.fingerprint)
    newest = file.newest()
    assert newest
    file.append(replace(newest, processor="another"), 1, ())
    found = run.verify(ALL)
    assert found.differences and found.count("close") == len(found.checks)
    found.require_equal()


@pytest.mark.slow
def test_a_sample_has_a_size_and_a_seed(tmp_path: Path) -> None:
    run = trained(tmp_path, checkpoint={"num_to_keep": 100})

    def jobs(sample: str, seed: int) -> list[tuple[int, int]]:
        seen: list[Check] = []
        found = run.verify(Request(Sample.parse(sample), seed, seen.append))
        assert tuple(seen) == found.checks
        return [(check.job.outer_iter, check.job.job) for check in seen]
    assert len(jobs("3", 0)) == 3 and jobs("3", 0) == jobs("3", 0) != jobs("3", 1)
    assert len(jobs("1%", 0)) == 1


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "101%", "nan%", "1.5", "many"])
def test_a_wrong_sample_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        Sample.parse(text)


@pytest.mark.slow
def test_the_command_has_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert cli.main(["train", "task=tests.tasks.blobs:make_task", "schedule.num_epochs=1", "cluster=in_process",
                     "tracking.kind=none", f"output_dir={tmp_path}", "cluster.num_workers=2"]) == 0
    (folder,) = tmp_path.glob("*/ledger.jsonl")
    run = str(folder.parent)
    capsys.readouterr()
    assert cli.main(["verify", run, "--sample", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [check["outcome"] for check in found["checks"]] == ["identical", "identical"]
    assert cli.main(["verify", run, "--sample", "everything"]) == 2
    text = folder.read_text()
    folder.write_text(text.replace('"digest": "', '"digest": "f').replace('"digest":"', '"digest":"f'))
    assert cli.main(["verify", run, "--sample", "100%"]) == 5
