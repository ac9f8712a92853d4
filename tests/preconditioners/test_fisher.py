"""Diagonal, unit-wise, layer-wise and full natural gradients, and those through Gram matrices,
against dense solves.
"""

from __future__ import annotations

import pytest
import torch

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import SENG, SMWNG, DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.fisher_recorder import Rows
from tests.preconditioners.problems import NAMES, close, joint, problem
from tests.reference import preconditioners as dense

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
    """3000 samples at seed 2; the mean is within 5 of its own standard errors in every element
    (false alarms 1 in 30 000).
    """
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
