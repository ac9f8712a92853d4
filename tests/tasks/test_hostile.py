"""Odd examples, minibatches and functions: training is right, or one typed error."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ngsgd
from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.launcher import cli
from ngsgd.pipeline.services import Services
from ngsgd.runs import trust
from ngsgd.schedules import Shard
from ngsgd.tasks import DatasetTask, StreamTask
from ngsgd.training.task import map_tensors, seeded_model
from tests.tasks import hostile

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {"num_workers": 1, "num_epochs": 1, "batch_size": 8, "lr": 0.05, "cluster": "in_process", "quiet": True}


def trained(task: Any, folder: Path) -> dict[str, torch.Tensor]:
    with hostile.bounded():
        run = ngsgd.train(task, output_dir=folder, services=Services(), **SETTINGS)
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    before = seeded_model(task, 0).state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in state.items()), "nothing moved"
    return state


@pytest.mark.entry("F27", "the first entry of a minibatch of `ngsgd.train` is a name, bytes, None, a number or an empty list",
                   "works", "the number of examples is that of the tensors with rows; where it cannot be found, ConfigError "
                            "names weight_fn")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("string first", "empty list", "packed sequence")
                                               else pytest.mark.slow) for name in hostile.BATCHES])
def test_a_minibatch_of_any_structure_trains_as_tensors_do(name: str, tmp_path: Path) -> None:
    task = hostile.make_task(collate_fn=hostile.BATCHES[name])
    plain = trained(hostile.make_task(), tmp_path / "plain")
    state = trained(task, tmp_path / "odd")
    assert all(torch.equal(value, state[key]) for key, value in plain.items())


@pytest.mark.entry("F27")
@pytest.mark.parametrize("name", hostile.BATCHES)
def test_the_loss_counts_the_examples_of_a_minibatch(name: str) -> None:
    task = hostile.make_task(collate_fn=hostile.BATCHES[name])
    model = seeded_model(task, 0)
    with hostile.bounded():
        for batch in task.batches(Shard(0, 0), 5, seed=(0, 0, 0)):
            moved = map_tensors(batch.data, torch.clone)
            found = task.loss(model, moved)
            assert found.weight == batch.num_examples and found.total.requires_grad
            assert type(moved) is type(batch.data)


@pytest.mark.entry("F27")
def test_an_example_that_is_none_may_be_dropped_by_collate_fn() -> None:
    task = hostile.make_task(dataset=hostile.Rows(lambda i: None if i % 4 == 0 else (hostile.X[i], int(hostile.Y[i]))),
                             collate_fn=hostile.BATCHES["examples without None"])
    sizes = [(batch.num_examples, len(batch.data[0])) for batch in task.batches(Shard(0, 0), 8, seed=(0, 0, 0))]
    assert all(one == other for one, other in sizes) and any(one < 8 for one, _ in sizes)


@pytest.mark.entry("F28", "`valid=` of a `DatasetTask` is a list, a custom class, a `Subset` or a Hugging Face dataset",
                   "works", "it takes what `dataset=` takes; anything else is a ConfigError")
@pytest.mark.parametrize("name", hostile.VALID)
def test_valid_takes_what_dataset_takes(name: str) -> None:
    task = hostile.make_task(valid=hostile.VALID[name], num_eval_examples=20)
    model = seeded_model(task, 0).eval()
    found = task.evaluate(model)
    if name not in ("fraction", "NumPy number"):
        objf = -float(nn.functional.cross_entropy(model(hostile.X[:20]), hostile.Y[:20]).detach())
        # float32 means in another order
        assert found.valid.objf == pytest.approx(objf, rel=1e-5)
        assert DatasetTask(hostile.VALID[name], hostile.make_model, hostile.loss_fn).num_examples == 19
    assert found.valid.objf == task.held_out_objf(model) < 0.0


@pytest.mark.entry("F30", "an example is missing or has another shape, a function of the task returns something odd, or the model "
                   "is lazy", "error", "one ConfigError or DataError before training; for an example with its index")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("an example is None", "metrics: vector", "a lazy model")
                                               else pytest.mark.slow) for name in hostile.MISTAKES])
def test_a_mistake_is_one_typed_error(name: str, tmp_path: Path) -> None:
    with hostile.bounded(), pytest.raises((ConfigError, DataError)) as caught:
        ngsgd.train(hostile.make_task(**hostile.MISTAKES[name]), output_dir=tmp_path, services=Services(),
                    **{**SETTINGS, "num_epochs": 4})
    assert str(caught.value) and len(str(caught.value)) < 1200


@pytest.mark.entry("F30")
@pytest.mark.parametrize(("name", "index"), [("an example is None", "17"), ("an example fails", "17"), ("unequal shapes", "")])
def test_an_error_of_an_example_has_its_index(name: str, index: str) -> None:
    task = hostile.make_task(**hostile.MISTAKES[name])
    passes = (task.batches(Shard(shard, 0), 8, seed=(0, 0, 0)) for shard in range(task.shards().num_archives))
    with pytest.raises(DataError) as caught:
        list(chain.from_iterable(passes))
    assert f"example {index}" in str(caught.value)


@pytest.mark.entry("F30")
def test_a_loss_that_is_detached_during_training_is_a_typed_error(tmp_path: Path) -> None:
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        loss = hostile.loss_fn(model, batch)
        return loss.detach() if calls > 4 else loss
    with pytest.raises(NgsgdError):
        ngsgd.train(hostile.make_task(loss_fn=loss_fn), output_dir=tmp_path, services=Services(), **SETTINGS)
    assert calls > 4


@pytest.mark.entry("F30")
@pytest.mark.parametrize("options", [
    {"open_fn": lambda source: iter(range(3)) if source else 1 / 0}, {"open_fn": lambda source: 5}, {"open_fn": None},
    {"valid": 3}, {"valid": None}, {"examples_per_source": 2.5}, {"examples_per_source": True}, {"shuffle_buffer": 0.5},
    {"open_fn": lambda source: iter([None] * 30)}, {"open_fn": lambda source: ((hostile.X[i, :i % 3], 1) for i in range(30))},
    {"collate_fn": lambda found: "text"}, {"loss_fn": None}, {"metrics_fn": lambda model, batch: 3}])
def test_a_mistake_in_a_stream_is_one_typed_error(options: dict[str, Any], tmp_path: Path) -> None:
    def open_fn(source: int) -> Any:
        return ((hostile.X[i], int(hostile.Y[i])) for i in range(30))
    given = {"open_fn": open_fn, "loss_fn": hostile.loss_fn, "examples_per_source": 30, "valid": list(open_fn(0)), **options}

    def make_task() -> StreamTask:
        return StreamTask([0, 1], given.pop("open_fn"), hostile.make_model, given.pop("loss_fn"), **given)
    with hostile.bounded(), pytest.raises((ConfigError, DataError)):
        ngsgd.train(make_task, output_dir=tmp_path, services=Services(), **SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["MISTAKES", "BATCHES", "VALID"])
def test_the_command_line_has_no_third_outcome(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    # no pictures
    monkeypatch.setattr("ngsgd.launcher.commands.train.draw", lambda *_, **__: None)
    for number, name in enumerate(list(getattr(hostile, table))[::3]):
        words = ["train", "task=tests.tasks.hostile:by_name", f"task.search_path={ROOT}", f"name=n{number}", "cluster=in_process",
                 "tracking.kind=none", "schedule.num_epochs=2", "schedule.minibatch_size=8", "--quiet",
                 f"task.args={{table: {table}, name: '{name}'}}"]
        with hostile.bounded():
            code = cli.main(words)
        said = capsys.readouterr().err
        assert (code in (2, 3) if table == "MISTAKES" else code == 0) and "Traceback" not in said, (name, said)


class Tied(nn.Module):
    """A weight and a buffer with two names each, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        shift = torch.zeros(5)
        self.two.weight = self.one.weight
        self.again = self.out
        self.one.register_buffer("shift", shift)
        self.two.register_buffer("shift", shift)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.again(torch.tanh(self.two(torch.tanh(self.one(x_ND) + self.one.shift))))
        return found


@pytest.mark.entry("F30")
@pytest.mark.parametrize("settings", [{}, {"outer": {"kind": "streaming", "num_fragments": 3}},
                                      {"cluster": {"kind": "in_process", "compression": "sparse"}}])
def test_tied_weights_stay_tied(settings: dict[str, Any], tmp_path: Path) -> None:
    task = hostile.make_task(model_fn=Tied, loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
    run = ngsgd.train(task, output_dir=tmp_path, services=Services(), **{**SETTINGS, "num_workers": 2, **settings})
    start: Any = seeded_model(task, 0)
    models: list[Any] = [run.model, ngsgd.load(run.folder.path, task).model]
    for model in models:
        assert model.two.weight is model.one.weight and model.again is model.out and model.two.shift is model.one.shift
        assert not torch.equal(model.one.weight, start.one.weight)
        # both names hold one value in the file, too
        assert run.evaluate() == run.metrics
