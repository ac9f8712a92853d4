"""Trackers besides MLflow: TensorBoard, W&B, functions and objects; none can end training."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ngsgd
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError, MissingExtraError
from ngsgd.launcher import trackers
from ngsgd.pipeline.services import Services
from ngsgd.runs.config_file import to_yaml
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord, Tracker
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import final_report, outer_iteration
from tests.tasks import blobs

KINDS = ("tensorboard", "wandb")


class Calls(Tracker):
    """A tracker of the user, with all four methods."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.seen.append(("outer_iteration", record.outer_iter))

    def incident(self, incident: Incident) -> None:
        self.seen.append(("incident", incident.what))

    def finished(self, report: FinalReport) -> None:
        self.seen.append(("finished", report.frames_processed))

    def close(self, status: str) -> None:
        self.seen.append(("close", status))


def feed(tracker: Tracker, *, first: int = 0, status: str = "FINISHED") -> None:
    for number in (first, first + 1):
        tracker.outer_iteration(outer_iteration(number))
    tracker.incident(Incident("worker_died", "x", 1))
    if status == "FINISHED":
        tracker.finished(final_report())
    tracker.close(status)


def of_kind(kind: str, tmp_path: Path, **tracking: str) -> tuple[RunFolder, Tracker, list[str]]:
    config, said = RunConfig(output_dir=str(tmp_path), name="one"), list[str]()
    config = replace(config, tracking=replace(config.tracking, kind=kind, **tracking))  # type: ignore[arg-type]
    found = sorted(tmp_path.glob("one-*"))
    folder = RunFolder(found[0]) if found else RunFolder.create(config, to_yaml(config))
    return folder, trackers.of_kind(config, folder, said.append), said


# ------------------------------------------------------------------------------- of the user
def test_functions_and_objects_receive_every_record_of_a_run(tmp_path: Path) -> None:
    calls, figures = Calls(), list[tuple[int, Mapping[str, float]]]()
    run = ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, num_epochs=2, services=Services(),
                      trackers=[calls, lambda found, step: figures.append((step, found))])
    kinds = [kind for kind, _ in calls.seen]
    num_outer_iters = kinds.count("outer_iteration")
    assert num_outer_iters >= 2 and kinds[-2:] == ["finished", "close"] and calls.seen[-1] == ("close", "FINISHED")
    assert len(figures) == num_outer_iters + 1
    steps = [step for step, _ in figures]
    assert steps == sorted(steps) and steps[0] > 0
    assert figures[-1][1]["result/valid_loss"] == run.metrics["valid/loss"]
    assert all(math.isfinite(found["1_loss/valid"]) for _, found in figures[:-1])


def test_a_resumed_run_counts_what_was_before(tmp_path: Path) -> None:
    config, found = RunConfig(), list[Mapping[str, float]]()
    config = replace(config, cluster=replace(config.cluster, price_per_hour=3600.0))
    records = [replace(outer_iteration(number), elapsed_s=100.0 * (number + 1)) for number in (0, 1)]
    [sound] = trackers.of_user([lambda figures, _: found.append(figures)], config, tmp_path, pytest.fail)
    for record in records:
        sound.outer_iteration(record)
    log = EventLog(tmp_path / "events.jsonl")
    log.outer_iteration(records[0])
    [resumed] = trackers.of_user([lambda figures, _: found.append(figures)], config, tmp_path, pytest.fail)
    resumed.outer_iteration(records[1])
    log.close("FINISHED")
    assert found[2] == found[1] and found[1]["workers/cost"] > found[0]["workers/cost"] > 0.0


def test_a_resumed_run_passes_the_rest_to_its_trackers(tmp_path: Path) -> None:
    class Stop(Calls):
        def outer_iteration(self, record: OuterIterationRecord) -> None:
            super().outer_iteration(record)
            if record.outer_iter == 1:
                raise KeyboardInterrupt

    first, rest = Stop(), Calls()
    with pytest.raises(ngsgd.errors.RunInterrupted):
        ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, num_epochs=2, services=Services(),
                    trackers=[first])
    assert first.seen[-1] == ("close", "KILLED")
    [folder] = [path.parent for path in tmp_path.glob("*/config.yaml")]
    ngsgd.train(blobs.make_task, resume=folder, services=Services(), trackers=[rest])
    seen = [number for kind, number in rest.seen if kind == "outer_iteration"]
    assert seen and seen == list(range(seen[0], seen[0] + len(seen))) and seen[0] in (1, 2)


@pytest.mark.parametrize("method", ["outer_iteration", "incident", "finished", "close"])
def test_a_tracker_that_raises_is_reported_once_and_training_continues(method: str, tmp_path: Path) -> None:
    class Broken(Calls):
        pass

    def fail(self: Calls, value: object) -> None:
        self.seen.append((method, value))
        raise ValueError("board-17")
    setattr(Broken, method, fail)
    broken, sound, said = Broken(), Calls(), list[str]()
    for tracker in trackers.of_user([broken, sound], RunConfig(), tmp_path, said.append):
        feed(tracker)
    assert [kind for kind, _ in broken.seen].count(method) == 1 and broken.seen[-1][0] == method
    assert len(sound.seen) == 5
    assert len(said) == 1 and "board-17" in said[0] and "Broken" in said[0]


@pytest.mark.parametrize("wrong", [3, "mlflow", Calls, SimpleNamespace(outer_iteration=print, close=print)])
def test_what_is_no_tracker_is_an_error_before_anything_starts(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"trackers\[1\]"):
        ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, trackers=[print, wrong])
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------- of packages
@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_is_missing_is_named_before_anything_starts(
        tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == kind else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"ngsgd\[trackers\]"):
        ngsgd.train(blobs.make_task, cluster="in_process", output_dir=tmp_path, tracking=kind)
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_the_curves_of_a_run_and_of_its_continuation(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, tracker, said = of_kind("tensorboard", tmp_path)
    feed(tracker, status="KILLED")
    feed(of_kind("tensorboard", tmp_path)[1], first=2)
    found = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert [point.step for point in found.Scalars("1_objf/valid")] == [32000, 64000, 96000, 128000]
    assert found.Scalars("2_wer/test")[0].value == pytest.approx(3.1)
    [settings] = found.Tensors("settings/text_summary")[:1]
    assert b"optimizer.max_change" in settings.tensor_proto.string_val[0]
    assert said == []


def test_wandb_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    folder, tracker, said = of_kind("wandb", tmp_path, experiment_name="ours")
    feed(tracker)
    assert len(said) == 1 and "WANDB_PROJECT" in said[0]
    [log] = folder.path.glob("wandb/offline-run-*/*.wandb")
    steps, summary, project = list[int](), dict[str, Any](), ""
    # its process writes after `finish` has returned
    while not any(record.WhichOneof("record_type") == "exit" for record in wandb_records(log)):
        time.sleep(0.05)
    for record in wandb_records(log):
        project = record.run.project or project
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "1_objf/valid" in items:
            steps.append(items["_step"])
        summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
    assert (project, steps, summary["2_wer/test"]) == ("ours", [32000, 64000], 3.1)


def wandb_records(log: Path) -> Iterator[Any]:
    """The records of an offline run: a log of LevelDB, blocks of 32 kB with parts of messages."""
    from wandb.proto import wandb_internal_pb2

    content, place, message = log.read_bytes(), 7, b""
    while place + 7 <= len(content):
        # the checksum comes first; no part is smaller than its header
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        message = message * (kind in (3, 4)) + content[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record


class Wandb(ModuleType):
    """The public interface of W&B that ngsgd uses: init, log, summary and finish."""

    class Run:
        def __init__(self, given: Mapping[str, Any]) -> None:
            self.given, self.logged, self.summary = given, list[tuple[int, dict[str, Any]]](), dict[str, Any]()
            self.code: int | None = None

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            assert step is not None and all(step >= before for before, _ in self.logged), "W&B drops steps that go back"
            self.logged.append((step, data))

        def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
            self.code = exit_code

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Wandb.Run] = []
        self.error: Exception | None = None

    def Settings(self, **given: Any) -> Any:  # noqa: N802
        return given

    def init(self, **given: Any) -> Any:
        assert given.keys() <= {"project", "name", "id", "resume", "dir", "config", "settings"}
        if self.error:
            raise self.error
        self.runs.append(Wandb.Run(given))
        return self.runs[-1]


def test_wandb_gets_settings_curves_and_the_result_and_a_resumed_run_continues(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    folder, tracker, said = of_kind("wandb", tmp_path)
    feed(tracker, status="KILLED")
    feed(of_kind("wandb", tmp_path)[1], first=2)
    first, second = wandb.runs
    assert said == [] and first.given == second.given
    assert (first.given["project"], first.given["name"], first.given["resume"]) == ("digits-relu", folder.path.name, "allow")
    assert first.given["id"] == folder.run_id and first.given["config"]["seed"] == "0"
    assert (first.code, second.code) == (1, 0)
    assert [step for step, found in first.logged if "1_objf/valid" in found] == [32000, 64000]
    assert second.summary["2_wer/test"] == 3.1 and not first.summary


def test_a_wandb_that_does_not_start_is_an_error_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    wandb.error = RuntimeError("api_key not configured")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        of_kind("wandb", tmp_path)
