"""Runs of a Python program continue after a change of machine, version or worker number."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import ngsgd
from ngsgd.config import RunConfig, TaskConfig
from ngsgd.config.sections import cluster, schedule
from ngsgd.errors import ArgumentError, ConfigError, FingerprintError, RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.pipeline.run import build_run
from ngsgd.pipeline.services import Services
from ngsgd.runs import trust
from tests.pipeline.test_task_run import StopAfter
from tests.tasks import blobs

SETTINGS: dict[str, Any] = {"num_epochs": 2, "batch_size": 16, "cluster": "in_process"}
ROOT = Path(__file__).resolve().parents[2]


def stopped(folder: Path) -> Path:
    stop = StopAfter()
    with pytest.raises(RunInterrupted):
        ngsgd.train(blobs.make_task, output_dir=folder, **SETTINGS, services=Services(stop=stop, make_trackers=stop.trackers))
    (run,) = folder.iterdir()
    return run


def files_of(run: Path) -> dict[str, str]:
    # those that describe a failure may be new
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(run.rglob("*"))
            if path.is_file() and path.name not in ("error.json", "lock")}


def call_in(text: str) -> str:
    found = re.search(r"ngsgd\.train\(.*?\)(?= in Python)", text, re.DOTALL)
    assert found, text
    return found[0]


@pytest.mark.entry("Nc2", "`ngsgd.train(resume=RUN)` after another version of torch, processor or kernel", "works",
                   "the message lists the differences and has the call with `allow_other_bits=True`, which continues the run and "
                   "records an incident; `ngsgd resume` shows the same call")
def test_a_run_of_another_fingerprint_continues_if_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path)
    before = files_of(run)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(FingerprintError, match=r"(?s)MKL_CBWR.*allow_other_bits=True") as refused:
        ngsgd.train(blobs.make_task, resume=run, services=Services())
    assert "--" not in str(refused.value) and files_of(run) == before
    done = ngsgd.train(blobs.make_task, resume=run, allow_other_bits=True, services=Services())
    assert done.metrics["valid/accuracy"] > 0.7
    assert [event["what"] for event in read_json_lines(run / "events.jsonl") if event["event"] == "incident"] == ["other_bits"]
    assert len(json.loads((run / "fingerprint.json").read_text())["history"]) == 2
    # the newest fingerprint counts
    ngsgd.train(blobs.make_task, resume=run, services=Services())


@pytest.mark.entry("Nc2")
@pytest.mark.parametrize("flags", [[], ["--allow-other-bits", "--trust"]])
@pytest.mark.parametrize("differs", [True, False])
def test_the_command_shows_a_call_that_works(differs: bool, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped(tmp_path / "runs")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if differs:
        monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert cli.main(["resume", str(run), *flags]) == (6 if differs and not flags else 2)
    call = call_in(capsys.readouterr().err)
    assert ("allow_other_bits=True" in call) == (differs or bool(flags)) and ("trust=True" in call) == bool(flags)
    done = eval(call.replace(")", ", services=Services())"), {"ngsgd": ngsgd, "make_task": blobs.make_task, "Services": Services})
    assert done.metrics["valid/accuracy"] > 0.7


def test_arguments_without_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust"):
        ngsgd.train(blobs.make_task, trust=True, output_dir=tmp_path, services=Services(), **SETTINGS)
    with pytest.raises(ArgumentError, match="task"):
        ngsgd.train(output_dir=tmp_path, services=Services(), **SETTINGS)
    assert not list(tmp_path.iterdir())
    # a new run accepts other bits of workers
    assert ngsgd.train(blobs.make_task, output_dir=tmp_path, allow_other_bits=True,
                       services=Services(), **SETTINGS).metrics


def test_a_run_continues_on_another_number_of_workers(tmp_path: Path) -> None:
    run = ngsgd.train(blobs.make_task, resume=stopped(tmp_path), num_workers=5, services=Services())
    records = [event for event in read_json_lines(run.folder.events) if event["event"] == "outer_iteration"]
    assert {len(record["jobs"]) for record in records} == {2} and run.config.cluster.num_workers == 5
    with pytest.raises(ConfigError, match="num_workers"):
        ngsgd.train(blobs.make_task, resume=run.folder.path, num_workers=0, services=Services())


@pytest.mark.entry("Nc2")
def test_a_module_of_a_received_run_is_imported_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    config = RunConfig(task=TaskConfig("tests.tasks.blobs:make_task", search_path=str(ROOT)), output_dir=str(tmp_path / "runs"),
                       cluster=cluster.ClusterConfig("in_process", num_workers=2),
                       schedule=schedule.ScheduleConfig(num_epochs=2.0, minibatch_size=16, num_jobs_initial=2, num_jobs_final=2))
    begun = build_run(config).train()
    run = Path(begun.files["run folder"])
    trust.allowed_modules.clear()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    for refused in (lambda: ngsgd.train(resume=run, services=Services()), lambda: ngsgd.load(run).model):
        with pytest.raises(ConfigError, match=r"trust=True"):
            refused()
    assert ngsgd.load(run, trust=True).model
    trust.allowed_modules.clear()
    assert ngsgd.train(resume=run, trust=True, services=Services()).metrics["valid/accuracy"] > 0.7
