"""K-FAC of the exact Fisher matrix, Kaldi's two natural gradients, and torch's optimizers against
their formulas.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.preconditioners import METHODS, Preconditioner, SimpleNG
from tests.preconditioners.problems import NAMES, close, joint, problem
from tests.reference import preconditioners as dense
from tests.reference.simple_natural_gradient import precondition_by_definition


def _random_gradients(preconditioner: Preconditioner, steps: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """(gradients of all steps, the last direction)."""
    generator = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(steps):
        for p in preconditioner.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        seen.append({name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None})
        preconditioner.step()
    return seen, {name: p.grad.clone() for name, p in preconditioner.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_the_simple_method_equals_its_definition_on_both_sides(name: str) -> None:
    case = problem(name)
    found = case.preconditioned(SimpleNG(case.model, alpha=2.0))
    for layer, a_NTI, e_VNTO in case.layers():
        a, e = a_NTI.flatten(0, 1).numpy(), e_VNTO.flatten(0, 2).detach().numpy()
        wanted = precondition_by_definition(e, 2.0).T @ precondition_by_definition(a, 2.0) / case.num_rows
        close(joint(found, layer), torch.from_numpy(np.asarray(wanted)))


@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_adam_equals_its_formula(name: str) -> None:
    preconditioner = METHODS["adam"](problem(name).model, damping=1e-3, ema_decay=0.95, momentum=0.8)
    seen, found = _random_gradients(preconditioner, 4)
    for key, value in found.items():
        close(value, dense.adam([g[key] for g in seen], beta_1=0.8, beta_2=0.95, eps=1e-3))


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("name", ["linear", "conv frames"])
def test_optimizers_of_torch_take_the_same_steps_through_the_interface(kind: str, name: str) -> None:
    own, case, lr = problem(name), problem(name), 0.01
    preconditioner = METHODS[kind](case.model, weight_decay=0.1)
    matrices = [nn.Parameter(p.detach().flatten(1)) for p in own.model.parameters() if p.ndim > 1]
    vectors = [p for p in own.model.parameters() if p.ndim == 1]
    optimizers: list[torch.optim.Optimizer]
    if kind == "muon":
        optimizers = [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1),
                      *([torch.optim.AdamW(vectors, lr=lr, betas=(0.95, 0.999), weight_decay=0.1)] if vectors else [])]
    else:
        optimizers = [{"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](own.model.parameters(), lr=lr, weight_decay=0.1)]
    for _ in range(4):
        own.gradients()
        for matrix, p in zip(matrices, [p for p in own.model.parameters() if p.ndim > 1], strict=True):
            assert p.grad is not None
            matrix.grad = p.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
        if kind == "muon":
            with torch.no_grad():
                for matrix, p in zip(matrices, [p for p in own.model.parameters() if p.ndim > 1], strict=True):
                    p.copy_(matrix.view_as(p))
        case.preconditioned(preconditioner)
        with torch.no_grad():
            for p in case.model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=lr)
    for p, wanted in zip(case.model.parameters(), own.model.parameters(), strict=True):
        # Muon's iteration is in bfloat16, whose rounding flips where the last bit of its input does
        torch.testing.assert_close(p, wanted, rtol=1e-9 if kind != "muon" else 1e-3, atol=1e-9 if kind != "muon" else 1e-3)
