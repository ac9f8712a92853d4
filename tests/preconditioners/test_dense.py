"""Fisher matrices of all kinds, natural gradients of Kaldi, optimizers of torch: dense formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ngsgd.curvature.fisher_rows import Rows
from ngsgd.errors import ConfigError
from ngsgd.preconditioners import (
    EKFAC,
    KFAC,
    METHODS,
    SENG,
    SKFAC,
    SMWNG,
    DiagonalNG,
    FullNG,
    LayerWiseNG,
    Preconditioner,
    SimpleNG,
    UnitWiseNG,
)
from ngsgd.preconditioners.fisher_method import FisherMethod
from tests.preconditioners.problems import NAMES, SHARING, close, gradients_of, joint, move, problem
from tests.reference import preconditioners as dense
from tests.reference.simple_natural_gradient import precondition_by_definition

DAMPING = 0.02


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [DiagonalNG, UnitWiseNG, LayerWiseNG, SENG])
def test_each_layer_equals_its_dense_solve(method: type[FisherMethod], name: str, exact: bool) -> None:
    case = problem(name)
    plain = case.gradients()
    found = case.preconditioned(method(case.model, damping=DAMPING, fisher="exact" if exact else "empirical"))
    for layer, a_NTI, e_VNTO in case.layers(exact=exact):
        F = dense.fisher(a_NTI, e_VNTO, num_rows=case.num_rows)
        if method is DiagonalNG:
            F = F.diagonal().diag()
        elif method is UnitWiseNG:
            F = dense.unit_blocks(F, e_VNTO.shape[3])
        close(joint(found, layer), dense.natural_gradient(F, joint(plain, layer), DAMPING))


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", [FullNG, SMWNG])
def test_all_layers_together_equal_the_dense_solve(method: type[FisherMethod], name: str, exact: bool) -> None:
    case = problem(name)
    plain = case.gradients()
    found = case.preconditioned(method(case.model, damping=DAMPING, fisher="exact" if exact else "empirical"))
    layers = list(case.layers(exact=exact))
    U = torch.cat([dense.individual(a_NTI, e_VNTO) for _, a_NTI, e_VNTO in layers], dim=1)
    g = torch.cat([joint(plain, layer).flatten() for layer, _, _ in layers])
    wanted = dense.natural_gradient(U.T @ U / case.num_rows, g, DAMPING)
    close(torch.cat([joint(found, layer).flatten() for layer, _, _ in layers]), wanted)


def test_a_sketch_is_right_in_the_mean_and_exact_with_all_coordinates() -> None:
    """3000 samples at seed 2, a mean within 5 standard errors (false alarms 1 in 30 000)."""
    case = problem("linear")
    exact, sketched, whole = SENG(case.model), SENG(case.model, sketch=2, seed=2), SENG(case.model, sketch=100)
    close(case.preconditioned(whole)["0.weight"], case.preconditioned(exact)["0.weight"])
    case.preconditioned(sketched)
    known = exact.statistics["0.weight"]
    rows = Rows("0.weight", "0.bias", known["a"], known["e"], 1)
    draws = torch.stack([sketched.measure("0.weight", rows)["gram"] for _ in range(3000)])
    error = (draws.mean(dim=0) - known["gram"]).abs() / (draws.std(dim=0) / 3000**0.5)
    assert float(error.max()) < 5.0


def test_a_layer_that_is_too_wide_for_a_dense_matrix_is_refused() -> None:
    model = torch.nn.Linear(200, 101)
    preconditioner = LayerWiseNG(model)
    with preconditioner.watch():
        torch.nn.functional.cross_entropy(model(torch.zeros(1, 200)), torch.tensor([0])).backward()
    with pytest.raises(ConfigError, match="20301 parameters"):
        preconditioner.step()


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("method", "reference", "damping"),
                         [(KFAC, dense.kfac, 1e-3), (KFAC, dense.kfac, 0.3),
                                                              (EKFAC, dense.ekfac, 0.01)])
def test_kronecker_factors_equal_the_dense_solve(method: type[KFAC], reference: Any, damping: float,
                                                 name: str, exact: bool) -> None:
    case = problem(name)
    plain = case.gradients()
    found = case.preconditioned(method(case.model, damping=damping,
                                       fisher="exact" if exact else "empirical",
                                       sharing=SHARING[name]))
    for layer, a_NTI, e_VNTO in case.layers(exact=exact):
        close(joint(found, layer), reference(a_NTI, e_VNTO, joint(plain, layer), damping,
                                             num_rows=case.num_rows, sharing=SHARING[name]))


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_monte_carlo_samples_have_the_exact_factors_as_mean(method: type[KFAC]) -> None:
    """4000 samples at seed 1: relative standard error about 1/60 per element; bound: 5 of them."""
    case = problem("conv frames")
    sampled = method(case.model, fisher="mc", num_draws=4000, seed=1)
    exact = method(case.model, fisher="exact")
    case.preconditioned(sampled)
    case.preconditioned(exact)
    for layer in exact.statistics:
        B, wanted = sampled.mean_statistics(layer)["B"], exact.mean_statistics(layer)["B"]
        assert float((B - wanted).norm() / wanted.norm()) < 5.0 / 60.0
        # does not shrink with the number of samples
        assert abs(float(B.trace() / wanted.trace()) - 1.0) < 5.0 / 60.0


@pytest.mark.parametrize("name", NAMES)
def test_skfac_equals_kfac_of_one_minibatch(name: str) -> None:
    case = problem(name)
    options: dict[str, Any] = {"damping": 0.01, "ema_decay": 0.0, "sharing": SHARING[name]}
    wanted = case.preconditioned(KFAC(case.model, **options))
    found = case.preconditioned(SKFAC(case.model, **options))
    for parameter, value in wanted.items():
        close(found[parameter], value)
    with pytest.raises(ConfigError, match="ema_decay must be 0"):
        SKFAC(case.model, ema_decay=0.5)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_skfac_keeps_the_smaller_matrix(num_rows: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 5)
    preconditioner = SKFAC(model)
    with preconditioner.watch():
        preconditioner.backward(mse_loss(model(torch.randn(num_rows, 9)), torch.zeros(num_rows, 5)))
    preconditioner.step()
    shapes = {key: tuple(value.shape) for key, value in preconditioner.inverses["weight"].items() if value.ndim}
    rows = {"a": (3, 10), "root_a": (3, 3), "e": (3, 5), "root_e": (3, 3)}
    assert shapes == (rows if num_rows == 3 else {"A": (10, 10), "B": (5, 5)})


def _random_gradients(preconditioner: Preconditioner, steps: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """(gradients of all steps, the last direction)."""
    generator = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(steps):
        for p in preconditioner.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        seen.append(gradients_of(preconditioner.model))
        preconditioner.step()
    return seen, gradients_of(preconditioner.model)


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
        move(case.model, lr)
    for p, wanted in zip(case.model.parameters(), own.model.parameters(), strict=True):
        # Muon's iteration is in bfloat16, whose rounding flips where the last bit of its input does
        torch.testing.assert_close(p, wanted, rtol=1e-9 if kind != "muon" else 1e-3, atol=1e-9 if kind != "muon" else 1e-3)
