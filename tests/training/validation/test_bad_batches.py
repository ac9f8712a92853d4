"""Minibatches with a non-finite loss or gradient are named, and skipped or quarantined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ngsgd
from ngsgd.config import FailureConfig, OptimizerConfig
from ngsgd.data.frames import FrameSet
from ngsgd.errors import BadBatchError, ConfigError, NgsgdWarning
from ngsgd.files import read_json_lines
from ngsgd.launcher.why.explain import explain
from ngsgd.launcher.why.faults import bad_examples
from ngsgd.pipeline.services import Services
from ngsgd.schedules import Shard
from ngsgd.tasks import DatasetTask
from ngsgd.training.storage.event_log import read_events
from tests import toy
from tests.pipeline.test_task_run import StopAfter
from tests.tasks import spoilt
from tests.toy import Run, config

_NAMES = {str(index) for index in spoilt.BAD}


def train(folder: Path, kind: str, policy: str = "skip", **settings: Any) -> Any:
    return ngsgd.train(_task(kind), output_dir=folder, services=Services(), batch_size=16,
                       failure={"on_bad_batch": policy}, optimizer="sgd",
                       **{"cluster": "in_process", "num_epochs": 2, **settings})


def _task(kind: str) -> DatasetTask:
    return spoilt.make_task(kind)


def _bad(run: Any) -> list[tuple[int, str]]:
    events = read_events(run.folder.events)
    return [(event["outer_iter"], name) for event in events if event["event"] == "outer_iteration"
            for job in event["jobs"] for name in job["bad_examples"]]


def _parameters(run: Any) -> list[Any]:
    return [value.numpy() for value in run.model.state_dict().values()]


# the run reports what the optimizer warns of
@pytest.mark.filterwarnings("ignore:SGD")
@pytest.mark.parametrize("kind", [pytest.param("input", marks=pytest.mark.slow), "loss", "statistics"])
def test_bad_examples_are_named_and_nothing_else_is_lost(kind: str, tmp_path: Path) -> None:
    run = train(tmp_path, kind)
    found = _bad(run)
    # once in each epoch, exactly the examples at fault
    assert sorted(name for _, name in found) == sorted(2 * [*_NAMES])
    events = read_json_lines(run.folder.events)
    reported = [event for event in events if event.get("what") == "bad_batch"]
    assert reported and all(any(name in event["message"] for event in reported) for name in _NAMES)
    # the jobs with bad minibatches count
    assert all(event["num_accepted"] == event["num_jobs"] for event in events if event["event"] == "outer_iteration")
    assert np.isfinite(run.metrics["train/loss"]) or kind != "loss"
    # among them those of batch normalization
    assert all(np.isfinite(values).all() for values in _parameters(run))
    answer = explain(run.folder.path)
    assert (answer.culprit, answer.domain, answer.outlook) == ("data", "workload", "cannot help")
    assert answer.bad_examples.keys() == _NAMES


# the run reports what the optimizer warns of
@pytest.mark.filterwarnings("ignore:SGD")
@pytest.mark.slow
def test_an_infinite_gradient_names_the_minibatch(tmp_path: Path) -> None:
    found = bad_examples(read_events(train(tmp_path, "gradient").folder.events))
    assert found.keys() >= _NAMES and all("gradient" in reason for reason in found.values())


# the run reports what the optimizer warns of
@pytest.mark.filterwarnings("ignore:SGD")
@pytest.mark.slow
def test_examples_in_quarantine_are_read_no_more(tmp_path: Path) -> None:
    run = train(tmp_path, "input", "quarantine", num_epochs=4)
    found = _bad(run)
    assert sorted(name for _, name in found) == sorted(_NAMES), "each is found once"
    events = [event for event in read_events(run.folder.events) if event["event"] == "outer_iteration"]
    # two examples fewer in each of the later epochs
    assert events[-1]["frames_processed"] == 4 * 950 - 3 * 2


# the run reports what the optimizer warns of
@pytest.mark.filterwarnings("ignore:SGD")
@pytest.mark.slow
def test_a_resumed_run_keeps_the_quarantine(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "input", "quarantine", num_epochs=4)
    stop = StopAfter()
    with pytest.raises(ngsgd.errors.RunInterrupted):
        ngsgd.train(_task("input"), output_dir=tmp_path / "part", services=Services(stop=stop, make_trackers=stop.trackers),
                    batch_size=16, failure={"on_bad_batch": "quarantine"}, optimizer="sgd", cluster="in_process", num_epochs=4)
    (folder,) = (tmp_path / "part").iterdir()
    run = ngsgd.train(_task("input"), resume=folder, services=Services())
    assert sorted(_bad(run)) == sorted(_bad(whole))
    assert all(np.array_equal(one, other) for one, other in zip(_parameters(run), _parameters(whole), strict=True))


def test_stop_ends_the_run_with_the_names(tmp_path: Path) -> None:
    with pytest.warns(NgsgdWarning), pytest.raises(BadBatchError) as caught:
        train(tmp_path, "input", "stop")
    assert any(name in str(caught.value) for name in _NAMES) and caught.value.exit_code == 3
    (folder,) = (config.parent for config in tmp_path.glob("*/config.yaml"))
    answer = explain(folder)
    assert (answer.state, answer.culprit, answer.outlook) == ("FAILED", "data", "cannot help")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["quarantine", "stop"])
def test_the_policy_changes_no_bit_without_bad_batches(policy: str, tmp_path: Path) -> None:
    plain, other = train(tmp_path / "skip", "none"), train(tmp_path / policy, "none", policy)
    assert all(np.array_equal(one, two) for one, two in zip(_parameters(plain), _parameters(other), strict=True))
    assert not _bad(other)


def test_a_diverging_job_is_still_rejected(tmp_path: Path) -> None:
    """Most minibatches are bad: this is no question of single examples."""
    with pytest.warns(NgsgdWarning), pytest.raises(ngsgd.errors.DivergenceError):
        train(tmp_path, "none", lr=1e30, max_change=0.0, max_param_change=0.0)


def test_utterances_of_archives_are_named_and_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, config(failure=FailureConfig(on_bad_batch="quarantine")))
    task = run.spec.task()
    seed, shard = (run.config.seed, 0, 0), Shard(0, 0)
    batches = list(task.batches(shard, 64, seed=seed))
    ids = [task.example_ids(shard, 64, seed=seed, number=number) for number in range(len(batches))]
    assert [len(one) for one in ids] == [batch.num_examples for batch in batches]
    bad = ids[1][0]
    task.exclude([bad])
    kept = list(task.batches(shard, 64, seed=seed))
    assert [batch.num_examples for batch in kept] == [sum(name != bad for name in one) for one in ids]
    for batch, after, names in zip(batches, kept, ids, strict=True):
        rows = [row for row, name in enumerate(names) if name != bad]
        assert np.array_equal(batch.data.x_ND[rows], after.data.x_ND) and np.array_equal(batch.data.pdf_N[rows], after.data.pdf_N)
    # the rest of a pass gives the same minibatches
    part = list(task.batches(shard, 64, seed=seed, first=2))
    assert all(np.array_equal(one.data.x_ND, two.data.x_ND) for one, two in zip(part, kept[2:], strict=True))


def test_an_utterance_of_a_speech_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its features are finite, and overflow in the model."""
    plain = toy.frame_set

    def with_loud_utterance(num_frames: int, seed: int) -> FrameSet:
        frames = plain(num_frames, seed)
        if seed == 1:
            frames.features_TD[frames.offsets[7]:frames.offsets[8]] = 3e38
        return frames
    monkeypatch.setattr(toy, "frame_set", with_loud_utterance)
    plain_config = config(optimizer=OptimizerConfig(kind="sgd"))
    run = Run(tmp_path, replace(plain_config, schedule=replace(plain_config.schedule, minibatch_size=8)))
    with pytest.warns(NgsgdWarning):
        run.train()
    reported = [incident.message for incident in run.recorder.incidents if incident.what == "bad_batch"]
    named = {name for record in run.recorder.records for job in record.jobs for name in job.bad_examples}
    assert reported and named == {"utt7"}
    assert all(job.accepted for record in run.recorder.records for job in record.jobs)


def test_a_task_without_names_refuses_quarantine(tmp_path: Path) -> None:
    class Nameless(DatasetTask):
        names_examples = False

    whole = _task("none")
    task = Nameless(whole.dataset, whole.model_fn, whole.loss_fn)
    with pytest.raises(ConfigError, match="on_bad_batch"):
        ngsgd.train(task, output_dir=tmp_path, services=Services(), cluster="in_process", failure={"on_bad_batch": "quarantine"})
