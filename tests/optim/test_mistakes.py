"""Mistakes with NGSGD and SGD: states of other objects, replaced layers, NaN in every minibatch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import OptimizerStateError
from ngsgd.hypergrad import ReversibleSGD
from ngsgd.optim import SGD

KINDS = pytest.mark.parametrize("kind", [NGSGD, SGD, NaturalMuon])


def network(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3))


def loss_of(model: nn.Module, scale: float = 1.0) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return nn.functional.cross_entropy(model(x), torch.arange(16) % 3, reduction="sum") * scale


def caught_in(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, scale: float = 1.0) -> int:
    """The number of warnings in steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss_of(model, scale).backward()
            optimizer.step()
    return len(caught)


@pytest.mark.entry("P13", "you give `load_state_dict` a complete checkpoint", "error",
                   "OptimizerStateError names the entry that is the state of the optimizer")
@pytest.mark.parametrize("kind", [NGSGD, SGD, NaturalMuon, ReversibleSGD])
def test_a_complete_checkpoint_is_refused_and_its_entry_loads(kind: Any) -> None:
    optimizer, other = kind(network(), 1e-3), kind(network(), 1e-3)
    checkpoint = {"model": network().state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    for wrong in (checkpoint, {"epoch": 3}, {}, None):
        with pytest.raises(OptimizerStateError):
            other.load_state_dict(wrong)
    with pytest.raises(OptimizerStateError, match="'optimizer'"):
        other.load_state_dict(checkpoint)
    other.load_state_dict(checkpoint["optimizer"])


@pytest.mark.entry("P5", "you load the state of a model of another width", "error",
                   "OptimizerStateError names the layer and both dimensions, before anything is loaded and before any "
                   "training. SGD without momentum keeps no tensor of a parameter, so its state fits every width")
@pytest.mark.parametrize("make", [
    NGSGD, NaturalMuon, lambda model, lr: SGD(model, lr, momentum=0.5),
    lambda model, lr: SGD(model, lr, layer_options={"*": {"rule": "adamw"}}),
])
def test_a_state_of_another_width_is_refused_before_training(make: Any) -> None:
    optimizer = make(network(6), 2e-3)
    with pytest.raises(OptimizerStateError):
        optimizer.load_state_dict(make(network(9), 1e-3).state_dict())
    assert optimizer.param_groups[0]["lr"] == 2e-3
    make(network(6), 1e-3).load_state_dict(make(network(6), 1e-3).state_dict())


@pytest.mark.entry("P14", "you replace or add a layer after creating the optimizer", "works",
                   "the new parameters are not trained, and one warning names them, at the first step or within 100 steps; "
                   "create the optimizer after the last change of the model")
@KINDS
def test_a_replaced_layer_is_warned_of_once(kind: Any) -> None:
    model = network()
    optimizer = kind(model, 1e-3)
    model[2] = nn.Linear(6, 4)
    assert caught_in(model, optimizer, 1) == 1
    assert caught_in(model, optimizer, 5) == 0


@pytest.mark.entry("P14")
def test_a_layer_that_is_replaced_during_training_is_warned_of_within_100_steps() -> None:
    model = network()
    optimizer = SGD(model, 1e-6)
    assert caught_in(model, optimizer, 3) == 0
    model[2] = nn.Linear(6, 4)
    assert caught_in(model, optimizer, 100) == 1


def test_layers_that_are_added_or_unfrozen_have_no_second_warning() -> None:
    model = network()
    model[0].requires_grad_(False)
    model, optimizer = copy.deepcopy((model, SGD(model, 1e-6)))
    model[0].requires_grad_(True)
    # the warning of an unfrozen layer only
    assert caught_in(model, optimizer, 101) == 1
    optimizer = SGD(model, 1e-6)
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[5].parameters())})
    assert caught_in(model, optimizer, 101) == 0


@KINDS
def test_skipped_steps_are_warned_of_again_when_their_number_has_grown_tenfold(kind: Any) -> None:
    model = network()
    optimizer = kind(model, 1e-6)
    start = [p.detach().clone() for p in model.parameters()]
    # at steps 1 and 16
    assert caught_in(model, optimizer, 31, float("nan")) == 2
    assert optimizer.activity().num_skipped == 31
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), start, strict=True))
    caught_in(model, optimizer, 1)
    for p, old in zip(model.parameters(), start, strict=True):
        assert p.isfinite().all() and not torch.equal(p, old)


def test_skipped_steps_of_a_model_that_adamw_trains_are_counted() -> None:
    model = network()
    optimizer = SGD(model, 1e-6, layer_options={"*": {"rule": "adamw"}})
    assert caught_in(model, optimizer, 3, float("nan")) == 1
    assert optimizer.activity().num_skipped == optimizer.activity().num_steps == 3
