"""Loops with PyTorch's own tools: checkpoints, averages, loss scaling, schedulers, unfreezing."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ngsgd import NGSGD
from ngsgd.errors import OptimizerStateError
from ngsgd.optim import SGD
from tests.optim.loops.task import assert_equal, made, minibatches, network, train

KINDS = pytest.mark.parametrize("kind", [NGSGD, SGD])


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is one process
        dcp_save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)},
                 checkpoint_id=path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state: dict[str, Any] = {"model": get_model_state_dict(model),
                             "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


@KINDS
@pytest.mark.entry("L6", "you save and load with torch.distributed.checkpoint", "works",
                   "a run that is loaded continues bitwise identically, with its Fisher estimates, velocities and settings of the "
                   "param groups; a state of torch's optimizers is refused with OptimizerStateError")
@pytest.mark.entry("B2", "you use `get_optimizer_state_dict` and `set_optimizer_state_dict`", "works",
                   "the estimates are in `state` of each weight, where torch.distributed.checkpoint keeps them")
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_run_continues_from_a_distributed_checkpoint(kind: type[SGD], momentum: float, flatten: bool, tmp_path: Path) -> None:
    data = minibatches()
    model = network()
    optimizer = made(kind, model, 0.5, momentum=momentum)
    train(model, optimizer, data[:4])
    before = copy.deepcopy(model.state_dict())
    save(tmp_path / "checkpoint", model, optimizer, flatten=flatten)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    resumed = network(seed=5)
    other = made(kind, resumed, 0.1, momentum=momentum)
    load(tmp_path / "checkpoint", resumed, other, flatten=flatten)
    for each, one in ((model, optimizer), (resumed, other)):
        train(each, one, data[4:])
    assert_equal(resumed, model)
    if isinstance(other, NGSGD):
        assert {estimate.num_calls for _, estimate in other.preconditioners()} == {8}


@pytest.mark.entry("B2")
def test_a_checkpoint_before_the_first_step_starts_again(tmp_path: Path) -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.5, loss_reduction="sum")
    save(tmp_path / "checkpoint", model, optimizer, flatten=False)
    resumed = network(seed=5)
    other = NGSGD(resumed, lr=0.1, loss_reduction="sum")
    load(tmp_path / "checkpoint", resumed, other, flatten=False)
    for each, one in ((model, optimizer), (resumed, other)):
        train(each, one, minibatches())
    assert_equal(resumed, model)


@pytest.mark.entry("B2")
def test_a_torch_state_is_refused_by_set_optimizer_state_dict() -> None:
    model = network()
    theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, theirs, minibatches(2))
    state = get_optimizer_state_dict(model, theirs)
    theirs_by_layer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model if list(layer.parameters())], 0.1)
    layered = get_optimizer_state_dict(model, theirs_by_layer)
    for each in (layered, {**state, "param_groups": layered["param_groups"]}):
        with pytest.raises(OptimizerStateError):
            set_optimizer_state_dict(model, NGSGD(model, lr=0.1, loss_reduction="sum"), each)
