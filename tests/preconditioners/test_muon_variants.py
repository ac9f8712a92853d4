"""NorMuon, MuonH and Newton-Muon against their formulas in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, NgsgdWarning
from ngsgd.preconditioners import METHODS, MuonH, NewtonMuon, NorMuon, Preconditioner
from tests.preconditioners.problems import problem
from tests.reference import preconditioners as dense

KINDS = ("normuon", "muonh", "newton_muon")
STEPS = 6


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(15, 4)).double()


def _close(found: Tensor, wanted: Tensor) -> None:
    # Newton-Schulz iterations in float32: five polynomials that magnify rounding by about 3.4^5
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-4 * float(wanted.abs().max()))


def _stepped(preconditioner: Preconditioner, step: int, lr: float, *, scale: float = 1.0) -> dict[str, Tensor]:
    """The random gradients of a step, which the direction replaces and SGD applies."""
    generator, seen = torch.Generator().manual_seed(step), {}
    for name, p in preconditioner.model.named_parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        seen[name] = p.grad.clone()
    preconditioner.step(lr)
    with torch.no_grad():
        for p in preconditioner.model.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=lr)
    return seen


def _directions(preconditioner: Preconditioner) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
def test_normuon_equals_its_formula_at_any_scale_of_the_loss(scale: float) -> None:
    preconditioner = NorMuon(_network(), momentum=0.8, ema_decay=0.9)
    seen, found = [], []
    for step in range(STEPS):
        seen.append(_stepped(preconditioner, step, 0.01, scale=scale))
        found.append(_directions(preconditioner))
    for name in ("0.weight", "2.weight"):
        wanted = dense.normuon([g[name].flatten(1) for g in seen], beta_1=0.8, beta_2=0.9, eps=1e-8)
        for one, direction in zip(found, wanted, strict=True):
            # 1e-7 is added to the norm of the momentum, which is above 1e-3
            torch.testing.assert_close(one[name].flatten(1), direction, rtol=0.0, atol=1e-4)
            assert abs(float(one[name].square().mean().sqrt()) - 0.2) < 1e-6


def test_muonh_equals_its_formula_and_keeps_the_norm_of_each_matrix() -> None:
    model, lr = _network(), 0.05
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    preconditioner = MuonH(model, momentum=0.8)
    seen, found = [], []
    for step in range(STEPS):
        seen.append(_stepped(preconditioner, step, lr))
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name in ("0.weight", "2.weight"):
        wanted = dense.muonh(first[name].flatten(1), [g[name].flatten(1) for g in seen], beta=0.8, lr=lr)
        for one, weight in zip(found, wanted, strict=True):
            _close(one[name].flatten(1), weight)
            # float64; the parameter is the difference of two sums
            torch.testing.assert_close(one[name].norm(), first[name].norm(), rtol=1e-12, atol=0.0)
        torch.testing.assert_close(preconditioner.state_dict()[name]["statistics.radius"], first[name].norm())


def test_muonh_returns_to_the_first_norm_after_a_change_of_the_weight() -> None:
    model = _network()
    preconditioner = MuonH(model)
    _stepped(preconditioner, 0, 0.01)
    radius = model[2].weight.norm().clone()   # type: ignore[index]
    with torch.no_grad():
        model[2].weight.mul_(0.7)   # type: ignore[index]
    _stepped(preconditioner, 1, 0.01)
    torch.testing.assert_close(model[2].weight.norm(), radius, rtol=1e-12, atol=0.0)   # type: ignore[index]


def test_muonh_trains_matrices_of_zeros_and_takes_a_rate_of_zero() -> None:
    models = [nn.Linear(4, 6, bias=False).double() for _ in range(2)]
    for model, kind in zip(models, ("muonh", "muon"), strict=True):
        nn.init.zeros_(model.weight)
        preconditioner = METHODS[kind](model)
        for step in range(3):
            _stepped(preconditioner, step, 0.1)
    # torch's Muon iterates in bfloat16
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0.05, atol=5e-3)
    preconditioner = MuonH(_network())
    _stepped(preconditioner, 0, 0.0)
    assert all(bool(d.isfinite().all()) for d in _directions(preconditioner).values())


def test_muonh_rejects_steps_without_a_rate_and_grafting() -> None:
    with pytest.raises(ConfigError, match=r"step\(lr="):
        MuonH(_network()).step()
    with pytest.raises(ConfigError, match="graft"):
        MuonH(_network(), graft="gradient")


@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_newton_muon_equals_its_formula(name: str) -> None:
    case = problem(name)
    preconditioner = NewtonMuon(case.model, momentum=0.8, ema_decay=0.7, damping=0.1, inverse_interval=2)
    seen: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    found: dict[str, list[Tensor]] = {}
    for step in range(STEPS):
        case.x.copy_(torch.randn(case.x.shape, generator=torch.Generator().manual_seed(step), dtype=case.x.dtype))
        for layer, a_NTI, _ in case.layers():
            a_XI = a_NTI.flatten(0, 1)
            has_bias = case.model.get_submodule(layer).bias is not None
            inputs.setdefault(f"{layer}.weight", []).append(a_XI[:, :-1] if has_bias else a_XI)
        for key, g in case.gradients().items():
            seen.setdefault(key, []).append(g.flatten(1) if g.ndim > 1 else g)
        for key, direction in case.preconditioned(preconditioner).items():
            found.setdefault(key, []).append(direction.flatten(1) if direction.ndim > 1 else direction)
        with torch.no_grad():
            for p in case.model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.01)
    for key, rows in inputs.items():
        wanted = dense.newton_muon(seen[key], rows, beta=0.8, decay=0.7, damping=0.1, inverse_every=2)
        for one, direction in zip(found[key], wanted, strict=True):
            _close(one, direction)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_trained_by_adamw(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    other = copy.deepcopy(model)
    preconditioner = METHODS[kind](model, momentum=0.8, ema_decay=0.9, weight_decay=0.1, skip=("*.weight",))
    if kind == "newton_muon":
        preconditioner.is_due = lambda what: False   # type: ignore[method-assign]
    biases = [p for name, p in other.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW(biases, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(STEPS):
        seen = _stepped(preconditioner, step, 0.01)
        for name, p in other.named_parameters():
            p.grad = seen[name]
        optimizer.step()
    for (name, p), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        if "bias" in name:
            torch.testing.assert_close(p, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_minibatch_that_is_not_finite_changes_no_state(kind: str) -> None:
    case = problem("linear")
    preconditioner = METHODS[kind](case.model)
    for _ in range(2):
        case.preconditioned(preconditioner, lr=0.01)
    before = copy.deepcopy((preconditioner.statistics, preconditioner.inverses))
    case.x[0, 0] = float("nan")
    with pytest.warns(NgsgdWarning):
        found = case.preconditioned(preconditioner, lr=0.01)
    assert preconditioner.num_skipped == 1
    assert all(bool(g.isnan().any()) for g in found.values())
    for was, now in zip(before, (preconditioner.statistics, preconditioner.inverses), strict=True):
        assert was.keys() == now.keys()
        assert all(torch.equal(value, now[name][key]) for name, entry in was.items() for key, value in entry.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_zeros_gives_no_direction(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    preconditioner: Any = METHODS[kind](model)
    preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(torch.zeros(2, 4)) * 0.0, torch.zeros(2).long()))
    preconditioner.step(lr=0.01)
    for p in model.parameters():
        assert p.grad is not None and float(p.grad.abs().max()) < 1e-5
