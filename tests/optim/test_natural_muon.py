"""Orthogonalized momentum of natural gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NaturalMuon
from ngsgd.errors import ConfigError
from ngsgd.ops.orthonormal import orthogonalized
from tests.optim.moved import moving
from tests.reference import optimizers as reference
from tests.wired import Wired


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 8))


def loss_of(model: nn.Module, seed: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(seed), dtype=next(model.parameters()).dtype)
    y = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4])
    return scale * nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, scale: float = 1.0) -> None:
    with moving(model):
        for seed in seeds:
            optimizer.zero_grad()
            loss_of(model, seed, scale).backward()
            optimizer.step()


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 4)])
def test_newton_schulz_is_its_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(reference.newton_schulz(u.double().numpy(), 5))
    # five polynomials of degree 5 in float32, whose coefficients magnify rounding by about 3.4^5
    torch.testing.assert_close(orthogonalized(u).double(), expected, rtol=0.0, atol=1e-4)
    s = torch.linalg.svdvals(orthogonalized(u))
    assert float(s.max()) < 1.3


def test_it_takes_the_steps_of_the_reference() -> None:
    model = network()
    optimizer = NaturalMuon(model, 0.01, momentum=0.7, weight_decay=0.1, adamw_lr_factor=0.5)
    values = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    matrices = {name: reference.NaturalMuon(values[name], 0.7) for name in ("0.weight", "3.weight")}
    others = {name: reference.AdamW(value) for name, value in values.items() if value.ndim == 1}
    estimates = dict(optimizer.preconditioners())
    for seed in range(12):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        gradients = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
        for name, matrix in matrices.items():
            inputs, outputs = (estimates[f"{name[0]}.{side}"].state for side in ("input", "output"))
            assert inputs is not None and outputs is not None
            matrix.step(gradients[name], inputs.W_RD.double().numpy(), outputs.W_RD.double().numpy(), 0.01, 0.1)
        for name, vector in others.items():
            vector.step(gradients[name], 0.005, 0.0)
        optimizer.step()
        expected = {name: matrix.weight for name, matrix in matrices.items()} | {name: one.x for name, one in others.items()}
        for name, value in expected.items():
            # matrices: Newton-Schulz in float32 as above, times lr 0.2 sqrt(20) = 0.01, and twelve
            # such steps vectors: a normalized gradient in float32, twelve steps of 0.005
            torch.testing.assert_close(model.get_parameter(name).detach().double(), torch.from_numpy(value), rtol=0.0, atol=1e-5)


def test_gradients_stay_plain() -> None:
    model, plain = network(), network()
    NaturalMuon(model)
    for each in (model, plain):
        loss_of(each, 0).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)  # float32 rounding


@pytest.mark.parametrize("scale", [64.0, 2.0**-10])
def test_the_size_of_the_loss_changes_nothing(scale: float) -> None:
    model, other = network().double(), network().double()
    train(model, NaturalMuon(model, 0.008), range(20))
    train(other, NaturalMuon(other, 0.008), range(20), scale)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        # eps of AdamW and the floors of eigenvalues are relative to gradients of about 0.1
        torch.testing.assert_close(p, q, rtol=0.0, atol=2e-3)


def mixed() -> Wired:
    def run(model: Any, tokens: Tensor) -> Any:
        h = model.grouped(model.tdnn(model.embedding(tokens).transpose(1, 2))).transpose(1, 2)
        return model.output(h + model.attention(h, h, h)[0]).flatten(0, 1)

    torch.manual_seed(0)
    return Wired(run, embedding=nn.Embedding(9, 8), tdnn=nn.Conv1d(8, 8, 3, padding=1),
                 grouped=nn.Conv1d(8, 8, 3, padding=1, groups=2),
                 attention=nn.MultiheadAttention(8, 2, batch_first=True), output=nn.Linear(8, 9))


def test_every_parameter_has_one_rule_and_moves() -> None:
    model = mixed()
    optimizer = NaturalMuon(model, 0.03)
    assert optimizer.preconditioned == ["tdnn", "output"]
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(9, (8, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert next(group for group in optimizer.param_groups if group["name"] == "embedding")["rule"] == "adamw"


def test_unsupported_requests_are_rejected() -> None:
    model = network()
    with pytest.raises(ConfigError, match="lr_factor"):
        NaturalMuon(model, layer_options={"0": {"max_change": 1.0}})
    with pytest.raises(ValueError, match="natural or"):
        NaturalMuon(model, layer_options={"0": {"rule": "sgd"}})
    optimizer = NaturalMuon(model)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match="backstitch"):
        optimizer.step(scale=-0.3)
