"""Kronecker factors against dense sums, and where the factored block is the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import Kronecker, collect
from ngsgd.errors import ConfigError
from tests.curvature.problems import N, problem
from tests.curvature.test_against_definitions import close
from tests.reference.curvature import (
    at_layer,
    ggn_blocks,
    individual_gradients,
    jacobians,
    kronecker_factors,
    loss_derivatives,
    recursion_of_averages,
)


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """N x T x I by torch's own unfolding."""
    if isinstance(layer, nn.Linear):
        return x.reshape(N, -1, x.shape[-1])
    assert isinstance(layer, nn.Conv2d)
    assert not isinstance(layer.padding, str)
    return nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)


def _positions(layer: nn.Module, J: Tensor) -> Tensor:
    """N x F x T x O."""
    return J.flatten(3).transpose(2, 3) if isinstance(layer, nn.Conv2d) else J.reshape(*J.shape[:2], -1, J.shape[-1])


@pytest.mark.parametrize("sharing", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize("name", ["linear", "linear over frames", "conv2d", "residual"])
def test_kflr_equals_its_definition(name: str, sharing: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3
    with collect(model, "kflr", "kfac", loss_fn=loss_fn, sharing=sharing, mc_samples=2) as q:
        loss_fn(model(x), y).backward()
    _, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    for layer_name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            a, J = at_layer(model, layer, x, N)
            B, A = kronecker_factors(_rows(layer, a), _positions(layer, J), H_NFF, sharing)
            found = q[f"{layer_name}.weight"]
            close(found.kflr.B_OO, B)
            assert found.kflr.A_II is not None
            close(found.kflr.A_II, A)
            torch.testing.assert_close(found.kfac.A_II, found.kflr.A_II, rtol=0.0, atol=0.0)
            torch.testing.assert_close(q[f"{layer_name}.bias"].kflr.B_OO, found.kflr.B_OO, rtol=0.0, atol=0.0)
            assert q[f"{layer_name}.bias"].kflr.A_II is None


def test_the_empirical_factors_are_those_of_the_empirical_fisher_matrix() -> None:
    model, x, _ = problem("linear")
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3
    with collect(model, "kfac_emp", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    d_NF, _ = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    for name in ("0.bias", "2.bias"):
        g_NP = N * individual_gradients(jacobians(model, x, N), d_NF)[name]
        close(q[name].kfac_emp.B_OO, g_NP.T @ g_NP / N)


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
    """Eschenhagen et al.: targets per frame for expand, one target for the mean over frames for reduce."""
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


@pytest.mark.parametrize("name", ["linear", "conv2d", "dropout", "linear without bias"])
def test_kfra_equals_the_recursion_over_dense_jacobians(name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3
    with collect(model, "kfra", loss_fn=loss_fn, sharing="reduce") as q:
        loss_fn(model(x), y).backward()
    modules = [module if not isinstance(module, nn.ReLU) else nn.ReLU() for module in model.children()]
    _, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    for (index, module), G in zip(model.named_children(), recursion_of_averages(modules, x, H_NFF), strict=True):
        if isinstance(module, nn.Linear):
            close(q[f"{index}.weight"].kfra.B_OO, G)
        elif isinstance(module, nn.Conv2d):
            O_ = module.out_channels
            close(q[f"{index}.weight"].kfra.B_OO, G.reshape(O_, len(G) // O_, O_, -1).sum(dim=(1, 3)))
        if isinstance(module, nn.Linear) and index == "0":
            assert q["0.weight"].kfra.A_II is not None
            close(q["0.weight"].kfra.A_II, x.T @ x / N)


@pytest.mark.parametrize("name", ["residual", "lstm", "attention"])
def test_kfra_is_refused_where_the_network_is_no_chain(name: str) -> None:
    model, x, _ = problem(name)
    loss_fn = nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match="kfra"), collect(model, "kfra", loss_fn=loss_fn):
        loss_fn(model(x), torch.arange(N) % 3).backward()


@pytest.mark.parametrize("name", ["layer norm", "batch norm", "conv1d same", "embedding"])
def test_factors_are_refused_for_parameters_that_have_none(name: str) -> None:
    model, x, num_classes = problem(name)
    loss_fn = nn.CrossEntropyLoss()
    with pytest.raises(ConfigError, match="Kronecker"), collect(model, "kfac", loss_fn=loss_fn):
        loss_fn(model(x), torch.arange(N) % num_classes).backward()


def test_a_bias_has_its_output_factor_alone() -> None:
    B = torch.eye(2)
    assert Kronecker(B, None).dense() is B
