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
from tests.optim.loops.task import assert_equal, made, mean_loss, minibatches, network, train

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


@pytest.mark.entry("L8", "you keep an exponential moving average (`AveragedModel`)", "works",
                   "the average is a plain model with the mean of the weights, and does not feed the estimates")
def test_a_moving_average_is_a_plain_model() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.5, loss_reduction="sum")
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    expected: dict[str, torch.Tensor] = {}
    for minibatch in minibatches():
        train(model, optimizer, [minibatch])
        ema.update_parameters(model)
        for name, p in model.named_parameters():
            expected[name] = p.detach().clone() if name not in expected else expected[name].lerp(p.detach(), 0.5)
    for name, p in ema.module.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])  # float32 rounding of eight means
    assert [type(layer) for layer in ema.module.children()] == [type(layer) for layer in network()]
    mean_loss(ema, *minibatches(1)[0]).backward()
    assert {estimate.num_calls for _, estimate in optimizer.preconditioners()} == {8}


@pytest.mark.entry("L9", "you scale the loss with a GradScaler", "works",
                   "with `NGSGD(..., grad_scaler=scaler)` the run is that without a scaler; without it there is one warning")
def test_a_loss_scale_changes_nothing() -> None:
    plain, scaled = network(), network()
    train(plain, NGSGD(plain, lr=0.5, loss_reduction="sum"), minibatches())
    # powers of 2 change no digit
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = NGSGD(scaled, lr=0.5, loss_reduction="sum", grad_scaler=scaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in minibatches():
            optimizer.zero_grad()
            scaler.scale(mean_loss(scaled, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**14
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        # the start is relative to the mean eigenvalue, at most 5e-4 of it
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@KINDS
@pytest.mark.entry("L10", "you use OneCycleLR with its defaults", "works",
                   "learning rate and momentum of every layer follow the schedule")
def test_one_cycle(kind: type[SGD]) -> None:
    model = network()
    optimizer = made(kind, model, 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=24)
    rates, momenta, losses = [], [], []
    for minibatch in minibatches() * 3:
        rates.append({group["lr"] for group in optimizer.param_groups})
        momenta.append({group["momentum"] for group in optimizer.param_groups})
        losses += train(model, optimizer, [minibatch])
        if len(losses) < 24:
            scheduler.step()
    assert all(len(found) == 1 for found in (*rates, *momenta))
    assert len({value for found in momenta for value in found}) > 10
    assert sum(losses[-8:]) < sum(losses[:8])


@KINDS
@pytest.mark.entry("L11", "you train a head and unfreeze the rest later", "works",
                   "after `optimizer.add_param_group` the unfrozen layers train, under NGSGD with separate estimates; "
                   "without it a warning names them")
def test_gradual_unfreezing(kind: type[SGD]) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = made(kind, model, 0.5)
    train(model, optimizer, minibatches(4))
    assert torch.equal(model.get_parameter("0.weight"), network().get_parameter("0.weight"))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    losses = train(model, optimizer, minibatches() * 2)
    assert not torch.equal(model.get_parameter("0.weight"), network().get_parameter("0.weight"))
    assert sum(losses[8:]) < sum(losses[:8])
    assert set(optimizer.activity().layer_share) == {"0", "2", "3"}
