"""Shampoo, SOAP and M-FAC against dense matrices of their complete history."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import NgsgdWarning
from ngsgd.preconditioners import SOAP, Preconditioner, Shampoo
from tests.preconditioners.problems import close, gradients_of, problem
from tests.reference import preconditioners as dense

STEPS = 5


def _run(preconditioner: Preconditioner, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """(gradients of all steps, the last direction), of random gradients."""
    generator = torch.Generator().manual_seed(5)
    seen: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for _ in range(STEPS):
        for name, p in preconditioner.model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            seen[name].append(p.grad.clone())
        preconditioner.step()
    return seen, gradients_of(preconditioner.model)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("history", ["average", "sum"])
@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_shampoo_equals_the_dense_roots(name: str, history: str) -> None:
    model = problem(name).model
    ridge = 1e-4
    preconditioner = Shampoo(model, damping=ridge, history=history, ema_decay=0.8)
    seen, found = _run(preconditioner, _shapes(model))
    for key, gradients in seen.items():
        # channels and taps are one dimension
        matrices = [g if g.ndim == 1 else g.flatten(1) for g in gradients]
        wanted = dense.shampoo(matrices, ridge, decay=0.8 if history == "average" else None)
        # two decompositions in float64
        torch.testing.assert_close(found[key].view_as(wanted), wanted, rtol=1e-8, atol=1e-8)


def test_blocks_are_preconditioned_each_by_itself() -> None:
    model = nn.Linear(5, 4, bias=False).double()
    seen, found = _run(Shampoo(model, damping=1e-4, block_size=3, ema_decay=0.8), _shapes(model))
    for rows in (slice(0, 3), slice(3, 4)):
        for columns in (slice(0, 3), slice(3, 5)):
            close(found["weight"][rows, columns], dense.shampoo([g[rows, columns] for g in seen["weight"]], 1e-4, decay=0.8))


def _soap_steps(model: nn.Module, num_steps: int,
                **options: Any) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """(gradients, directions) of all steps, of gradients whose moments turn slowly."""
    generator = torch.Generator().manual_seed(7)
    shapes = {name: p.flatten(1).shape if p.ndim > 1 else p.shape for name, p in model.named_parameters()}
    mixing = {name: torch.randn(2, shape[-1], shape[-1], generator=generator, dtype=torch.float64)
              for name, shape in shapes.items()}
    preconditioner = SOAP(model, **options)
    seen: dict[str, list[Tensor]] = {name: [] for name in shapes}
    found: dict[str, list[Tensor]] = {name: [] for name in shapes}
    for step in range(num_steps):
        for name, p in model.named_parameters():
            first, second = mixing[name]
            G = torch.randn(shapes[name], generator=generator, dtype=torch.float64) @ (first + step / num_steps * second)
            p.grad = G.view_as(p).to(p.dtype, copy=True)
            seen[name].append(G)
        preconditioner.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            found[name].append(p.grad.view(shapes[name]).clone())
    return seen, found


@pytest.mark.entry("A2", "you use SOAP with curvature_interval and inverse_interval above 1", "works",
                   "v and the direction are updated at every step, in a basis that is tracked from step to step; 200 steps agree "
                   "with a float64 implementation of the paper's algorithm at intervals 1 and 10")
@pytest.mark.parametrize(("look_every", "basis_every"), [(1, 1), (1, 10), (10, 10)])
@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(2, 5, 2)], ids=["linear", "conv"])
def test_soap_equals_the_papers_algorithm_over_200_steps(layer: nn.Module, look_every: int, basis_every: int) -> None:
    seen, found = _soap_steps(copy.deepcopy(layer).double(), 200, damping=1e-6, ema_decay=0.9, momentum=0.8,
                              curvature_interval=look_every, inverse_interval=basis_every)
    for name, gradients in seen.items():
        wanted = dense.soap(gradients, beta_1=0.8, beta_2=0.9, eps=1e-6, look_every=look_every, basis_every=basis_every)
        # float64; a basis at interval 1 is the product of 200 orthogonalizations, whose roundings
        # add up
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(wanted), rtol=1e-7, atol=1e-7)


@pytest.mark.entry("A3", "you use SOAP in float32", "works",
                   "the first step only initializes the factors, and its direction is 0; directions in float32 and float64 agree "
                   "to 1e-3 of their norm over 200 steps where factors have full rank, and to 3 % where they have not")
def test_soap_in_float32_follows_float64() -> None:
    wide, narrow = (_soap_steps(nn.Linear(5, 4).to(dtype), 200, inverse_interval=10)[1] for dtype in (torch.float64, torch.float32))
    for name, directions in wide.items():
        assert not narrow[name][0].any()
        for step, (wanted, d) in enumerate(zip(directions, narrow[name], strict=True)):
            # 24 bits, through the eigenvectors of second moments of condition up to 1e3
            assert float((d - wanted).norm()) <= 1e-3 * float(wanted.norm()), (name, step)


@pytest.mark.entry("A3")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_soap_in_float32_follows_float64_where_factors_have_no_full_rank(reduction: str) -> None:
    """A layer's first gradient has fewer outputs than inputs, or fewer rows than both."""
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)).to(dtype)
        preconditioner, generator, directions = SOAP(model, inverse_interval=5), torch.Generator().manual_seed(1), []
        for _ in range(8):
            x, y = torch.randn(32, 48, generator=generator).to(dtype), torch.randint(10, (32,), generator=generator)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            preconditioner.step()
            directions.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
        found.append(directions)
    for narrow, wide in zip(*found, strict=True):
        # what the gradient has only as rounding is not made as large as the rest: it would be a
        # tenth of the norm and more
        assert float((narrow - wide).norm()) <= 0.03 * float(wide.norm())


@pytest.mark.entry("A2")
@pytest.mark.parametrize("graft", ["none", "gradient"])
def test_soap_at_interval_10_keeps_its_directions_small(graft: str) -> None:
    """Adam's ratio m / sqrt(v) is at most 1 where both forget alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))
    preconditioner = SOAP(model, curvature_interval=10, inverse_interval=10, graft=graft)
    for _ in range(25):
        x, y = torch.randn(16, 20), torch.randint(10, (16,))
        model.zero_grad()
        preconditioner.evaluate(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))   # type: ignore[misc]
        plain = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        preconditioner.step()
        for p, norm in zip(model.parameters(), plain, strict=True):
            assert p.grad is not None
            assert float(p.grad.norm()) <= (1.001 * p.numel()**0.5 if graft == "none" else 1.001 * float(norm))


@pytest.mark.entry("A3")
def test_soap_restarts_for_later_parameters_and_after_an_average() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    preconditioner = SOAP(model, curvature_interval=10, inverse_interval=10)

    def stepped(layers: nn.Module) -> list[bool]:
        model.zero_grad()
        for p in layers.parameters():
            p.grad = torch.randn_like(p)
        preconditioner.step()
        return [bool(p.grad.any()) for p in layers.parameters() if p.grad is not None]
    assert stepped(model[0]) == [False, False] and stepped(model[0]) == [True, True]
    assert stepped(model[1]) == [False, False] and stepped(model[1]) == [True, True]
    preconditioner.average([preconditioner.state_dict()] * 2)
    # a basis from the averaged second moments; a vector has none
    assert stepped(model[0]) == [True, False]


@pytest.mark.entry("A2")
def test_soap_takes_a_layers_own_damping_and_survives_a_gradient_whose_square_overflows() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    preconditioner = SOAP(model, layer_options={"0": {"damping": 1e3}})
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e25) if step == 3 else torch.randn_like(p)
        with pytest.warns(NgsgdWarning) if step == 3 else contextlib.nullcontext():
            preconditioner.step()
    first, second = (float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    assert 0.0 < first < 1e-2 < second < 100.0
    assert preconditioner.num_skipped == 1
