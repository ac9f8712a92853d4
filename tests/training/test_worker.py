"""A job beyond plain steps: backstitch, dropout, and figures of its Fisher estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.config import AugmentConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, check
from ngsgd.data.archives import prepare_archives
from ngsgd.errors import ConfigError
from ngsgd.optim import graphed_step
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import FrameClassification, SpeechTaskSpec
from ngsgd.training import worker as worker_module
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.worker import Worker, choose_device
from tests import toy


def run(folder: Path, config: RunConfig, weight: float | None = None, **job: Any) -> JobResult:
    train = toy.frame_set(1200, seed=1)
    train = train if weight is None else replace(train, weight_T=np.full(1200, weight, np.float32))
    egs = prepare_archives(train, toy.frame_set(300, seed=2), config.egs, num_classes=toy.NUM_CLASSES,
                           digest=f"toy {weight}", cache_root=folder)
    worker = Worker(SpeechTaskSpec(config, str(egs)), 0)
    start = worker.layout.flatten(worker.model.state_dict())
    settings = {"outer_iter": 0, "job": 0, "attempt": 1, "pieces": (WorkItem(Shard(0, 0), 0, job.get("job", 0)),),
                "start": JobInit(LocalRef(start)), "lr": 0.01, "lr_factor": 1.0, **job}
    return worker.run(Job(**settings))


def optimizer(**changes: Any) -> RunConfig:
    return toy.config(optimizer=OptimizerConfig(rank_in=4, rank_out=4, **changes))


def test_backstitch_trains_on_every_minibatch_once_and_elsewhere_than_plain_steps(tmp_path: Path) -> None:
    plain = run(tmp_path, optimizer())
    stitched = run(tmp_path, optimizer(backstitch_scale=0.5))
    assert stitched.num_minibatches == plain.num_minibatches
    assert stitched.num_frames == plain.num_frames
    assert not np.array_equal(stitched.sent.read(), plain.sent.read())


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize("kind", ["ngsgd", "sgd"])
def test_training_with_recorded_steps_has_the_same_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                                       weight: float | None) -> None:
    """The step of a worker that `GraphedStep` records, here without a graph."""
    plain = run(tmp_path, optimizer(kind=kind), weight)
    graphed = []

    def seems_a_gpu(self: Worker, *arguments: Any) -> Any:
        device, self.device = self.device, SimpleNamespace(type="cuda")  # type: ignore[assignment]
        graphed.append(made := of_worker(self, *arguments))
        self.device = device
        return made

    of_worker = Worker.graphed_training
    monkeypatch.setattr(Worker, "graphed_training", seems_a_gpu)
    monkeypatch.setattr(graphed_step, "MOST_GRAPHS", 0)
    again = run(tmp_path, optimizer(kind=kind), weight)
    assert len(graphed) == 1
    assert graphed[0] is not None
    assert np.array_equal(again.sent.read(), plain.sent.read())
    assert (again.objf, again.accuracy, again.num_frames) == (plain.objf, plain.accuracy, plain.num_frames)


def test_dropout_follows_the_schedule_and_repeats_with_the_job(tmp_path: Path) -> None:
    config = toy.config(model=ModelConfig(num_layers=2, hidden_dim=16, dropout_schedule="0,0.5,0"))
    off, on, again, other = (run(tmp_path, config, progress=progress, job=job)
                             for progress, job in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1)))
    assert off.objf > on.objf  # half of the activations are gone
    assert np.array_equal(on.sent.read(), again.sent.read())
    assert not np.array_equal(on.sent.read(), other.sent.read())


def test_the_result_reports_the_health_of_every_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "COSINE_PERIOD", 2)
    health = run(tmp_path, optimizer()).health
    assert {name.split("/")[0] for name in health} == {"affine1", "affine2", "output"}
    assert 0.0 < health["affine1/input_last_e"] < 1.0
    assert 1.0 <= health["affine2/output_effective_rank"] <= 16.0
    assert 0.0 < health["output/cosine"] <= 1.0
    assert run(tmp_path, replace(toy.config(), optimizer=OptimizerConfig(kind="sgd"))).health == {}


def test_equal_weights_scale_the_gradient_and_leave_objf_and_accuracy_of_a_frame(tmp_path: Path) -> None:
    config = toy.config(optimizer=OptimizerConfig(kind="sgd", max_change=0.0, max_param_change=0.0))
    plain, one, half = (run(tmp_path, config, weight, lr=lr) for weight, lr in ((None, 0.01), (1.0, 0.01), (0.5, 0.02)))
    for weighted in (one, half):  # float32 sums in another order
        assert np.allclose(weighted.sent.read(), plain.sent.read(), rtol=1e-4, atol=1e-5)
        assert weighted.objf == pytest.approx(plain.objf, rel=1e-5)
        assert weighted.accuracy == pytest.approx(plain.accuracy, abs=0.01)


def test_masks_repeat_with_the_job_and_whatever_part_of_a_pass_is_read(tmp_path: Path) -> None:
    config = toy.config(augment=AugmentConfig(spec=True))
    plain, masked, again, other, cut = (
        run(tmp_path, c, job=job, pieces=pieces) for c, job, pieces in (
            (toy.config(), 0, (WorkItem(Shard(0, 0), 0, 0),)), (config, 0, (WorkItem(Shard(0, 0), 0, 0),)),
            (config, 0, (WorkItem(Shard(0, 0), 0, 0),)), (config, 1, (WorkItem(Shard(0, 0), 0, 1),)),
            (config, 0, (WorkItem(Shard(0, 0), 0, 0, 0, 2), WorkItem(Shard(0, 0), 0, 0, 2, None)))))
    assert np.array_equal(masked.sent.read(), again.sent.read())
    assert np.array_equal(masked.sent.read(), cut.sent.read())
    assert not np.array_equal(masked.sent.read(), plain.sent.read())
    assert not np.array_equal(masked.sent.read(), other.sent.read())


@pytest.mark.parametrize(("changes", "named"), [
    ({"optimizer": OptimizerConfig(backstitch_scale=0.3, momentum=0.9)}, "backstitch_scale"),
    ({"model": ModelConfig(dropout_schedule="0,much,0")}, "dropout_schedule"),
    ({"schedule": ScheduleConfig(lr_initial=0.01, lr_final=1.0)}, "schedule.lr_final"),
])
def test_rules_that_cannot_work_are_refused_before_anything_runs(changes: dict[str, Any], named: str) -> None:
    (problem,) = check(toy.config(**changes))
    assert named in problem


def test_workers_of_a_machine_take_turns_on_its_gpus_and_a_taken_one_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is reported that there are two GPUs, the second in exclusive mode and taken."""
    def empty(size: int, device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", empty)
    assert [str(choose_device("auto", index)) for index in (0, 2)] == ["cuda:0", "cuda:0"]
    assert choose_device("cpu", 1).type == "cpu"
    with pytest.raises(ConfigError, match="cuda:1"):
        choose_device("cuda", 3)


def test_the_task_gets_the_next_work_items_after_the_first_minibatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = WorkItem(Shard(0, 0), 0, 0), WorkItem(Shard(0, 1), 0, 0)
    later = (WorkItem(Shard(2, 0), 1, 0),)
    plain = run(tmp_path, toy.config(), pieces=pieces)
    calls: list[Any] = []

    def batches(self: FrameClassification, shard: Shard, *args: Any, **kwargs: Any) -> Any:
        for number, batch in enumerate(read(self, shard, *args, **kwargs)):
            calls.append((shard, number))
            yield batch

    read = FrameClassification.batches
    monkeypatch.setattr(FrameClassification, "batches", batches)
    monkeypatch.setattr(FrameClassification, "prefetch", lambda self, items: calls.append(items))
    again = run(tmp_path, toy.config(), pieces=pieces, upcoming=later)
    assert np.array_equal(again.sent.read(), plain.sent.read())
    assert calls[:2] == [(pieces[0].shard, 0), (pieces[1], *later)]
    assert sum(isinstance(call[0], WorkItem) for call in calls) == 1
