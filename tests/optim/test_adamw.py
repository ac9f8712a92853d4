"""Layers that AdamW trains next to those of SGD and NGSGD."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.errors import DivergenceError, NgsgdWarning
from ngsgd.optim import SGD
from tests.optim import moved
from tests.reference import optimizers as reference
from tests.wired import Wired

# AdamW in float64 on both sides; sums in another order
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}


def tagger() -> Wired:
    """An embedding and an LSTM without natural gradient, and a linear layer with one."""
    torch.manual_seed(0)
    return Wired(lambda m, tokens: m.output(m.lstm(m.embedding(tokens))[0]).flatten(0, 1),
                 embedding=nn.Embedding(11, 6),
                 lstm=nn.LSTM(6, 5, batch_first=True), output=nn.Linear(5, 3))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens), (tokens % 3).flatten(), reduction="sum")


train = partial(moved.train, loss_of=loss_of)


@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_it_takes_the_steps_of_the_paper(kind: type[SGD]) -> None:
    model = tagger().double()
    options: dict[str, Any] = {"rule": "adamw", "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "lr_factor": 0.5}
    optimizer = kind(model, 0.04, layer_options={"embedding": options, "lstm": options}, adamw_lr_factor=0.25)
    names = [name for name, _ in model.named_parameters() if not name.startswith("output")]
    exact = {name: reference.AdamW(model.get_parameter(name).detach().numpy(), (0.8, 0.95), 1e-6)
             for name in names}
    for seed in range(8):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        for name in names:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            exact[name].step(gradient.numpy(), 0.04 * 0.5 * 0.25, 0.1)
        optimizer.step()
        for name in names:
            torch.testing.assert_close(model.get_parameter(name).detach(), torch.from_numpy(exact[name].x), **EXACT)


def test_a_layer_can_be_excluded_from_natural_gradient_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = NGSGD(model, layer_options={"2": {"rule": "sgd"}, "4": {"rule": "adamw"}})
    assert optimizer.preconditioned == ["0"]
    assert [group["rule"] for group in optimizer.param_groups] == ["natural", "sgd", "adamw"]
    with pytest.raises(ValueError, match="natural or"):
        NGSGD(model, layer_options={"2": {"rule": "adam"}})
    with pytest.raises(ValueError, match="sgd or"):
        SGD(model, 0.1, layer_options={"2": {"rule": "natural"}})


@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_its_layers_have_no_limits_and_no_velocity(kind: type[SGD]) -> None:
    model = tagger()
    optimizer = kind(model, 0.016, momentum=0.9, max_change=1e-6, layer_options={"lstm": {"rule": "adamw"}})
    weight = model.get_parameter("lstm.weight_ih_l0").detach()
    before = weight.clone()
    train(model, optimizer, range(1))
    # AdamW's first step moves each weight by the rate, but for its eps
    torch.testing.assert_close((weight - before).abs(), torch.full_like(before, 0.002), rtol=1e-3, atol=0.0)
    state = optimizer.state_dict()["state"]
    keys = {name: set(state[index]) for index, name in enumerate(dict(model.named_parameters()))}
    assert "velocity" not in keys["lstm.weight_ih_l0"] and "exp_avg" in keys["lstm.weight_ih_l0"]
    assert "velocity" in keys["output.weight"] and "exp_avg" not in keys["output.weight"]


def test_nothing_moves_where_a_gradient_is_not_finite() -> None:
    model = tagger()
    optimizer = NGSGD(model, lr=0.016, fallback="adamw")
    train(model, optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict()["state"]), copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    assert model.embedding.weight.grad is not None
    model.embedding.weight.grad[0] = float("nan")
    with pytest.warns(NgsgdWarning):
        optimizer.step()
    assert optimizer.activity().num_skipped == 1
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for index in after:
        for key in ("exp_avg", "exp_avg_sq", "num_adamw_steps"):
            assert key not in after[index] or torch.equal(after[index][key], before[0][index][key])


def test_a_gradient_that_is_not_finite_is_raised_by_layer() -> None:
    model = tagger()
    optimizer = SGD(model, 0.016, layer_options={"embedding": {"rule": "adamw"}}, on_nonfinite="raise")
    loss_of(model, 0).backward()
    assert model.embedding.weight.grad is not None
    model.embedding.weight.grad[0] = float("inf")
    with pytest.warns(NgsgdWarning), pytest.raises(DivergenceError, match="of embedding"):
        optimizer.step()
