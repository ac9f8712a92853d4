"""Shampoo, SOAP and M-FAC against dense matrices of their whole history."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.preconditioners import MFAC, SOAP, Preconditioner, Shampoo
from tests.preconditioners.problems import close, problem
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
    return seen, {name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("history", ["average", "sum"])
@pytest.mark.parametrize("root_method", ["eigen", "newton"])
@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_shampoo_equals_the_dense_roots(name: str, root_method: str, history: str) -> None:
    model = problem(name).model
    ridge = 1e-4
    preconditioner = Shampoo(model, damping=ridge, root_method=root_method, history=history, ema_decay=0.8)
    seen, found = _run(preconditioner, _shapes(model))
    for key, gradients in seen.items():
        matrices = [g if g.ndim == 1 else g.flatten(1) for g in gradients]   # channels and taps are one dimension
        wanted = dense.shampoo(matrices, ridge, decay=0.8 if history == "average" else None)
        # Newton's iteration ends at 1e-6
        torch.testing.assert_close(found[key].view_as(wanted), wanted, rtol=1e-8 if root_method == "eigen" else 1e-5, atol=1e-8
                                   if root_method == "eigen" else 1e-5)


def test_blocks_are_preconditioned_each_by_itself() -> None:
    model = nn.Linear(5, 4, bias=False).double()
    seen, found = _run(Shampoo(model, damping=1e-4, block_size=3, ema_decay=0.8), _shapes(model))
    for rows in (slice(0, 3), slice(3, 4)):
        for columns in (slice(0, 3), slice(3, 5)):
            close(found["weight"][rows, columns], dense.shampoo([g[rows, columns] for g in seen["weight"]], 1e-4, decay=0.8))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4, bias=False), nn.Conv1d(2, 4, 2, bias=False)], ids=["linear", "conv"])
def test_soap_equals_adam_in_the_dense_eigenbasis(layer: nn.Module) -> None:
    """Square matrices, since the first step's eigenvectors are not unique where a gradient has a null space."""
    model = layer.double()
    seen, found = _run(SOAP(model, damping=1e-3, ema_decay=0.8), _shapes(model))
    for key, gradients in seen.items():
        if gradients[0].ndim > 1:
            wanted = dense.soap([g.flatten(1) for g in gradients], 1e-3, 0.8)
            close(found[key].view_as(wanted), wanted)


@pytest.mark.parametrize("name", ["linear", "conv frames"])
@pytest.mark.parametrize("kept", [3, 100])
def test_mfac_equals_the_dense_solve_with_the_last_gradients(name: str, kept: int) -> None:
    model = problem(name).model
    seen, found = _run(MFAC(model, damping=0.05, num_gradients=kept), _shapes(model))
    U = torch.cat([torch.stack(gradients).flatten(1) for gradients in seen.values()], dim=1)
    last = U[-min(kept, STEPS):]
    wanted = dense.natural_gradient(last.T @ last / len(last), U[-1], 0.05)
    close(torch.cat([found[key].flatten() for key in seen]), wanted)
