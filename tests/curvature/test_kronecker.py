"""Kronecker factors against dense sums and exact blocks, and the damped update from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import Kronecker, collect
from ngsgd.curvature.forms.kronecker import SHARINGS
from ngsgd.curvature.quantities import Quantities, damped_direction, gradient_noise
from ngsgd.errors import ConfigError, DivergenceError
from ngsgd.models.tdnn import TimeDelayNetwork
from tests.curvature.problems import N, problem
from tests.curvature.support import LOSSES, WITHOUT_FACTORS, cells, close, drawn, targets
from tests.reference.affine_uses import Uses
from tests.reference.curvature import ggn_blocks, jacobians, loss_derivatives, recursion_of_averages

FACTORED = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d dilated same", "conv2d", "conv2d circular",
            "conv3d", "p-norm", "sub-classes", "tdnn", "tdnnf", "tdnnf with batch norm", "functional", "residual", "layer norm",
            "rms norm over frames", "group norm", "batch norm", "dropout", "pieces", "activations", "lstm", "lstm with projection",
            # in some of them the affine layers alone
            "gru", "rnn", "attention", "cross-attention")
CELLS = cells(FACTORED)
AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention)


SHARED = [pytest.param(*cell.values, sharing, marks=cell.marks) for cell in CELLS for sharing in SHARINGS
          # positions and losses have nothing to do with each other
          if sharing == "expand" or cell.values[1] == "cross-entropy"]


@functools.cache
def _uses(name: str) -> Uses:
    model, x, _ = problem(name)
    return Uses(model, x)


@pytest.mark.parametrize(("name", "loss_name", "sharing"), SHARED)
def test_factors_equal_their_definitions(name: str, loss_name: str, sharing: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    layers = [layer for layer, module in model.named_modules() if isinstance(module, AFFINE)]
    generator = torch.Generator().manual_seed(7)
    with collect(model, "kflr", "kfac", "kfac_emp", "sqrt_ggn_mc", loss_fn=loss_fn, sharing=sharing, mc_samples=2,
                 layers=layers, generator=generator) as q:
        loss_fn(model(x), y).backward()
    uses = _uses(name)
    close(uses.f_NF, model(x).reshape(N, -1))
    d_NF, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    draws_VNF = drawn(loss_fn, model(x).detach(), y, num_draws=2, seed=7)
    scale = N if loss_fn.reduction == "mean" else 1
    exact = uses.factors(H_NFF, sharing)
    empirical = uses.factors(scale * d_NF[:, :, None] * d_NF[:, None, :], sharing)
    sampled = uses.factors(torch.einsum("vnf,vng->nfg", draws_VNF, draws_VNF), sharing)
    assert set(exact) == {parameter for parameter in q if "bias" not in parameter}
    for parameter, (B, A) in exact.items():
        found = q[parameter]
        close(found.kflr.B_OO, B)
        close(found.kfac.B_OO, sampled[parameter][0])
        close(found.kfac_emp.B_OO, empirical[parameter][0])
        for factors in (found.kflr, found.kfac, found.kfac_emp):
            close(factors.A_II, A)
        if (bias := parameter.replace("weight", "bias")) in q:
            _check_bias(q[bias], found, sharing)


def _check_bias(bias: Quantities, weight: Quantities, sharing: str) -> None:
    for quantity in ("kflr", "kfac", "kfac_emp"):
        torch.testing.assert_close(getattr(bias, quantity).B_OO, getattr(weight, quantity).B_OO, rtol=0.0, atol=0.0)
        assert getattr(bias, quantity).A_II is None
    if sharing != "expand":  # B is the bias's block then, also of the samples
        V_XO = bias.sqrt_ggn_mc.flatten(0, 1)
        close(bias.kfac.B_OO, V_XO.T @ V_XO)


def test_the_block_of_a_single_sample_and_of_an_output_layer_with_squared_error_is_exact() -> None:
    model, x, _ = problem("linear")
    loss_fn, y = nn.MSELoss(), torch.randn(N, 3, dtype=torch.float64)
    with collect(model, "kflr", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    _, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    close(q["2.weight"].kflr.dense(), ggn_blocks(jacobians(model, x, N), H_NFF)["2.weight"].sum(dim=0))
    with collect(model, "kflr", loss_fn=loss_fn) as q:
        loss_fn(model(x[:1]), y[:1]).backward()
    _, H_1FF = loss_derivatives(lambda f: loss_fn(f, y[:1]), model(x[:1]), 1)
    for name, block in ggn_blocks(jacobians(model, x[:1], 1), H_1FF).items():
        close(q[name].kflr.dense(), block[0])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_linear_network_with_shared_weights_has_exact_blocks_in_the_matching_setting(sharing: str) -> None:
    """Eschenhagen et al.: targets per frame for expand, one for the mean over frames for reduce."""
    torch.manual_seed(0)
    layer, T = nn.Linear(3, 2, bias=False).double(), 5
    x = torch.randn(N, T, 3).double()
    loss_fn = nn.MSELoss(reduction="sum")

    def run(rows: Tensor) -> Tensor:
        y: Tensor = layer(rows)
        return y if sharing == "expand" else y.mean(dim=1)
    target = torch.zeros_like(run(x))
    with collect(layer, "kflr", loss_fn=loss_fn, sharing=sharing) as q:
        loss_fn(run(x), target).backward()
    rows = x.flatten(0, 1) if sharing == "expand" else x.mean(dim=1)
    close(q["weight"].kflr.dense(), torch.kron(2.0 * torch.eye(2).double(), rows.T @ rows))


CHAINS = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d dilated same", "conv2d", "conv2d circular",
          "conv3d", "dropout", "p-norm", "tdnn", "pieces", "activations")
CHAIN_CELLS = cells(CHAINS)


def _chain(model: nn.Module, x: Tensor) -> list[tuple[str, Callable[[Any], Tensor]]]:
    """The operations of a network without branches, with the names of its layers."""
    if not isinstance(model, TimeDelayNetwork):
        return [(name, nn.ReLU() if isinstance(module, nn.ReLU) else module)   # out of place
                for name, module in model.named_children()]
    first = model(x[:1]) * 0.0   # makes the plan of which frames are spliced
    plan = model._plan_of_one
    assert plan is not None and first.shape == (1, 3)
    steps: list[tuple[str, Callable[[Any], Tensor]]] = [
        ("", lambda rows: rows.unflatten(1, (-1, model.window.feature_dim)).index_select(1, plan.needed))]
    children: list[tuple[str, Any]] = list(model.named_children())
    spliced: list[Any] = plan.splices
    for (name, layer), splices in zip(children, spliced, strict=False):
        steps += [("", splices[0]), (f"{name}.affine", layer.affine), *(("", part) for part in layer.rest.children())]
    return [*steps, ("", lambda rows: rows.flatten(1)), children[-1]]


@pytest.mark.parametrize(("name", "loss_name"), CHAIN_CELLS)
def test_kfra_equals_the_recursion_over_dense_jacobians(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    with collect(model, "kfra", "kflr", loss_fn=loss_fn, sharing="reduce") as q:
        loss_fn(model(x), y).backward()
    _, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    names, operations = zip(*_chain(model, x), strict=True)
    for layer, G in zip(names, recursion_of_averages(list(operations), x, H_NFF), strict=True):
        module = model.get_submodule(layer)
        if isinstance(module, nn.Linear):
            O_ = module.out_features
            B = G.reshape(-1, O_, len(G) // O_, O_).sum(dim=(0, 2))
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            O_ = module.out_channels
            B = G.reshape(O_, len(G) // O_, O_, -1).sum(dim=(1, 3))
        else:
            continue
        close(q[f"{layer}.weight"].kfra.B_OO, B)
        close(q[f"{layer}.weight"].kfra.A_II, q[f"{layer}.weight"].kflr.A_II)


NO_CHAINS = ("residual", "functional", "lstm", "lstm with projection", "gru", "rnn", "attention", "cross-attention", "tdnnf",
             "tdnnf with batch norm", "layer norm", "rms norm over frames", "group norm", "batch norm", "batch norm of rows",
             "conv1d same", "embedding", "sub-classes")


@pytest.mark.parametrize("name", NO_CHAINS)
def test_kfra_is_refused_where_the_network_is_no_chain_of_layers_with_factors(name: str) -> None:
    model, x, _ = problem(name)
    for loss_name in LOSSES:
        loss_fn, y = targets(loss_name, model(x).detach())
        with pytest.raises(ConfigError, match="kfra"), collect(model, "kfra", loss_fn=loss_fn):
            loss_fn(model(x), y).backward()


@pytest.mark.parametrize("quantity", ["kfac", "kflr", "kfac_emp"])
@pytest.mark.parametrize("name", WITHOUT_FACTORS)
def test_factors_are_refused_for_parameters_that_have_none(name: str, quantity: str) -> None:
    model, x, _ = problem(name)
    for loss_name in LOSSES:
        loss_fn, y = targets(loss_name, model(x).detach())
        with pytest.raises(ConfigError, match="Kronecker"), collect(model, quantity, loss_fn=loss_fn):
            loss_fn(model(x), y).backward()


def test_a_bias_has_its_output_factor_alone() -> None:
    B = torch.eye(2)
    assert Kronecker(B, None).dense() is B


def _spd(dim: int) -> torch.Tensor:
    x = torch.randn(dim, dim).double()
    return x @ x.T


def test_the_kronecker_direction_solves_the_dense_damped_system() -> None:
    torch.manual_seed(0)
    B, A, g, theta = _spd(3), _spd(4) * 7.0, torch.randn(3, 4).double(), torch.randn(3, 4).double()
    pi = ((A.trace() / 4) / (B.trace() / 3)).sqrt()
    d = (0.1 + 0.02) ** 0.5
    dense = torch.kron(B + d / pi * torch.eye(3).double(), A + d * pi * torch.eye(4).double())
    expected = torch.linalg.solve(dense, (g + 0.02 * theta).flatten())
    close(damped_direction(g, theta, Kronecker(B, A), damping=0.1, l2=0.02).flatten(), expected)
    of_bias = damped_direction(g[:, 0], theta[:, 0], Kronecker(B, None), damping=0.1)
    close(of_bias, torch.linalg.solve(B + 0.1 * torch.eye(3).double(), g[:, 0]))


def test_a_convolution_keeps_its_shape_and_a_zero_factor_shares_nothing() -> None:
    g = torch.randn(2, 3, 5).double()
    direction = damped_direction(g, g, Kronecker(torch.zeros(2, 2).double(), torch.zeros(15, 15).double()), damping=0.25)
    close(direction, g / 0.25)


def test_unsolvable_systems_are_reported() -> None:
    with pytest.raises(DivergenceError, match="positive definite"):
        damped_direction(torch.ones(2), torch.ones(2), Kronecker(torch.full((2, 2), float("nan")), None), damping=0.1)
    with pytest.raises(ValueError, match="damping"):
        damped_direction(torch.ones(2), torch.ones(2), torch.ones(2), damping=0.0)


def test_steps_against_the_direction_converge_where_plain_ones_crawl() -> None:
    """Least squares of condition 1e4: the exact curvature makes it one of condition 1."""
    torch.manual_seed(0)
    layer, scale = nn.Linear(4, 2, bias=False).double(), torch.tensor([1.0, 10.0, 30.0, 100.0]).double()
    x, loss_fn = torch.randn(64, 4).double() * scale, nn.MSELoss()
    y = x @ torch.randn(4, 2).double()
    for _ in range(20):
        layer.zero_grad()
        with collect(layer, "kflr", loss_fn=loss_fn) as q:
            loss = loss_fn(layer(x), y)
            loss.backward()
        with torch.no_grad():
            assert layer.weight.grad is not None
            layer.weight -= damped_direction(layer.weight.grad, layer.weight, q["weight"].kflr, damping=1e-6)
    assert float(loss) < 1e-6


def test_the_noise_scale_is_that_of_the_distribution() -> None:
    """g_n = x_n of mean 1 and variance 4 in 10 dimensions, so S = 40, |g|^2 = 10; 5 deviations."""
    torch.manual_seed(0)
    layer, x = nn.Linear(10, 1, bias=False).double(), 1.0 + 2.0 * torch.randn(20000, 10).double()
    with collect(layer, "variance", "second_moment", reduction="mean") as q:
        layer(x).mean().backward()
    noise = gradient_noise(q, 20000)
    assert noise["weight"].trace == pytest.approx(40.0, rel=0.05)
    assert noise[""].squared_norm == pytest.approx(10.0, rel=0.05)
    assert noise[""].noise_scale == pytest.approx(4.0, rel=0.1)
