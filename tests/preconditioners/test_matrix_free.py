"""KSD, LiSSA, L-BFGS, Neumann, KFRA and FANG against dense matrices, over 20 steps in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import FANG, KFRA, KSD, LBFGS, LiSSA, Neumann
from tests.preconditioners.problems import NAMES, Problem, at_step, close, joint, problem, step_of
from tests.reference import quasi_newton as dense
from tests.reference import series
from tests.reference.combination import bfgs_direction
from tests.reference.combinations import averaged, factored, sparse
from tests.reference.curvature import loss_derivatives, recursion_of_averages
from tests.reference.preconditioners import individual, kronecker_factors

STEPS = 20


def _theta(case: Problem) -> Tensor:
    return dense.flat({name: p.detach().clone() for name, p in case.model.named_parameters()})


@pytest.mark.parametrize("products", ["ggn", "hessian"])
@pytest.mark.parametrize("name", NAMES)
def test_krylov_descent_equals_the_minimum_over_the_dense_subspace(name: str, products: str) -> None:
    case, damping, last = problem(name), 0.5, None
    preconditioner = KSD(case.model, damping=damping, products=products, dimension=3, ema_decay=0.9)
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        g = dense.flat(now.gradients())
        C = (dense.gauss_newton if products == "ggn" else dense.hessian)(now.model, now.loss, now.x)
        wanted = series.krylov(C, g, damping, 3, last)
        found = dense.flat(step_of(preconditioner, case, step))
        # another basis of the same space, of condition up to 1e4
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
        last = found
    assert preconditioner.num_products == 3 + (STEPS - 1) * 4


@pytest.mark.parametrize("name", NAMES)
def test_lissa_equals_the_sum_of_matrix_powers(name: str) -> None:
    case, damping = problem(name), 0.3
    preconditioner = LiSSA(case.model, damping=damping, num_terms=6, scale=3.0)
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        g = dense.flat(now.gradients())
        wanted = series.neumann_series(dense.hessian(now.model, now.loss, now.x), g, damping, 6, 3.0)
        close(dense.flat(step_of(preconditioner, case, step)), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_lbfgs_equals_the_dense_bfgs_matrix_of_the_last_pairs(name: str) -> None:
    case, damping = problem(name), 0.3
    preconditioner = LBFGS(case.model, damping=damping, rank=4)
    pairs: list[Any] = []
    before: tuple[Tensor, Tensor] | None = None
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        theta, g = _theta(case), dense.flat(now.gradients())
        if before is not None:
            s, y = theta - before[0], g - before[1]
            y = y + damping * s
            pairs += [(s.numpy(), y.numpy())] if float(s @ y) > 1e-10 * float(s.norm() * y.norm()) else []
        before, pairs = (theta, g), pairs[-4:]
        wanted = g if not pairs else torch.from_numpy(bfgs_direction(
            g.numpy(), pairs, float(pairs[-1][0] @ pairs[-1][1]) / float(pairs[-1][1] @ pairs[-1][1])))
        found = dense.flat(step_of(preconditioner, case, step))
        # the products of up to four matrices, of condition up to 1e4
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert len(pairs) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_neumann_equals_its_algorithm(name: str) -> None:
    case = problem(name)
    preconditioner = Neumann(case.model, damping=1e-3, ema_decay=0.8, first_reset=4, attraction=0.3, repulsion=1e-6)
    gradients, thetas, found = [], [], []
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        thetas.append(_theta(case))
        gradients.append(dense.flat(now.gradients()))
        found.append(dense.flat(step_of(preconditioner, case, step)))
    # after 4, 12 and 28 steps
    wanted = series.neumann_steps(gradients, thetas, decay=0.8, least=1e-3, resets={0, 4, 12}, attraction=0.3, repulsion=1e-6)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)



@pytest.mark.parametrize("name", ["linear", "conv pooled"])
def test_kfra_equals_the_recursion_over_dense_jacobians(name: str) -> None:
    case, damping, decay = problem(name), 0.3, 0.8
    preconditioner = KFRA(case.model, damping=damping, ema_decay=decay)
    modules = list(case.model.children())
    past: dict[str, list[tuple[Tensor, Tensor]]] = {"0": [], "2": []}
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        plain = now.gradients()
        _, H_NFF = loss_derivatives(now.loss, now.model(now.x), len(now.x))
        averages = recursion_of_averages(modules, now.x, H_NFF)
        for layer, a, _ in now.layers(exact=True):
            G = averages[int(layer)]
            num_outputs = len(case.model.get_parameter(f"{layer}.weight"))
            # positions of a convolution are the last dimension of its output
            B = torch.einsum("otpt->op", G.view(num_outputs, -1, num_outputs, len(G) // num_outputs))
            past[layer].append((kronecker_factors(a, torch.zeros(1, *a.shape[:2], 1), num_rows=1, sharing="expand")[0], B))
        found = step_of(preconditioner, case, step)
        for layer, each in past.items():
            A, B = (averaged([one[side] for one in each], decay) for side in (0, 1))
            close(joint(found, layer), factored(A, B, joint(plain, layer), damping))


def test_kfra_refuses_branches_and_layers_without_factors() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            y: Tensor = self.last(hidden.tanh() + hidden)
            return y
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    for model, words in ((Residual(), "branches"), (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)), "KFRA")):
        preconditioner = KFRA(model)
        with pytest.raises(ConfigError, match=words):
            preconditioner.evaluate(lambda model=model: nn.functional.cross_entropy(model(x), y))  # type: ignore[misc]


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_fang_equals_the_dense_solve_of_its_model(fisher: str) -> None:
    case, damping, decay = problem("linear"), 0.3, 0.8
    preconditioner = FANG(case.model, damping=damping, ema_decay=decay, fisher=fisher)
    past: dict[str, list[Tensor]] = {"0": [], "2": []}
    for step in range(STEPS):
        now = case._replace(x=at_step(case, step))
        plain = now.gradients()
        for layer, a, e in now.layers(exact=fisher == "exact"):
            U = individual(a, e)
            past[layer].append(U.T @ U / now.num_rows)
        found = step_of(preconditioner, case, step)
        for layer, each in past.items():
            g = joint(plain, layer)
            close(joint(found, layer).flatten(), sparse(averaged(each, decay), g.flatten(), len(g), damping))


def test_fang_sums_positions_and_is_the_diagonal_of_a_layer_without_bias() -> None:
    case = problem("conv frames")
    plain, layers = case.gradients(), list(case.layers())
    found = case.preconditioned(FANG(case.model, damping=0.3))
    for layer, a, e in layers:
        U, g = individual(a, e), joint(plain, layer)
        F = U.T @ U / case.num_rows
        wanted = sparse(F, g.flatten(), len(g), 0.3) if layer == "0" else g.flatten() / (F.diagonal() + 0.3)
        close(joint(found, layer).flatten(), wanted)
