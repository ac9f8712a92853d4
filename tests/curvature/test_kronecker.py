"""Kronecker factors against dense sums, and where the factored block is the exact one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import Kronecker, collect
from ngsgd.curvature.quantities import Quantities
from ngsgd.errors import ConfigError
from tests.curvature.problems import N, problem
from tests.curvature.test_against_definitions import LOSSES, _targets, close
from tests.reference.affine_uses import Uses
from tests.reference.curvature import (
    ggn_blocks,
    individual_gradients,
    jacobians,
    loss_derivatives,
    recursion_of_averages,
)

FACTORED = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d dilated same", "conv2d", "conv2d circular",
            "conv3d", "p-norm", "sub-classes", "tdnn", "tdnnf", "tdnnf with batch norm", "functional", "residual", "layer norm",
            "rms norm over frames", "group norm", "batch norm", "dropout", "lstm", "lstm with projection", "gru", "rnn",
            "attention", "cross-attention")
CELLS = [(name, "cross-entropy") for name in FACTORED]
CELLS += [(name, loss) for name in ("linear over frames", "conv2d", "gru") for loss in LOSSES[1:]]
AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention)


@pytest.mark.parametrize("sharing", ["expand", "reduce", "backpack"])
@pytest.mark.parametrize(("name", "loss_name"), CELLS)
def test_factors_equal_their_definitions(name: str, loss_name: str, sharing: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    layers = [layer for layer, module in model.named_modules() if isinstance(module, AFFINE)]
    with collect(model, "kflr", "kfac", "kfac_emp", "sqrt_ggn_mc", loss_fn=loss_fn, sharing=sharing, mc_samples=2,
                 layers=layers) as q:
        loss_fn(model(x), y).backward()
    uses = Uses(model, x)
    close(uses.f_NF, model(x).reshape(N, -1))
    d_NF, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    scale = N if loss_fn.reduction == "mean" else 1
    exact = uses.factors(H_NFF, sharing)
    empirical = uses.factors(scale * d_NF[:, :, None] * d_NF[:, None, :], sharing)
    assert set(exact) == {parameter for parameter in q if "bias" not in parameter}
    for parameter, (B, A) in exact.items():
        found = q[parameter]
        close(found.kflr.B_OO, B)
        close(found.kfac_emp.B_OO, empirical[parameter][0])
        for factors in (found.kflr, found.kfac, found.kfac_emp):
            close(factors.A_II, A)
        bias = parameter.replace("weight", "bias")
        if bias in q:
            _check_bias(q[bias], found, sharing)


def _check_bias(bias: Quantities, weight: Quantities, sharing: str) -> None:
    for quantity in ("kflr", "kfac", "kfac_emp"):
        torch.testing.assert_close(getattr(bias, quantity).B_OO, getattr(weight, quantity).B_OO, rtol=0.0, atol=0.0)
        assert getattr(bias, quantity).A_II is None
    if sharing != "expand":  # B is the bias's block then, also of the draws
        V_XO = bias.sqrt_ggn_mc.flatten(0, 1)
        close(bias.kfac.B_OO, V_XO.T @ V_XO)


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


CHAINS = ("linear", "linear without bias", "linear over frames", "conv1d", "conv1d dilated same", "conv2d", "conv2d circular",
          "conv3d", "dropout")
CHAIN_CELLS = [(name, "cross-entropy") for name in CHAINS] + [("conv2d", loss) for loss in LOSSES[1:]]


@pytest.mark.parametrize(("name", "loss_name"), CHAIN_CELLS)
def test_kfra_equals_the_recursion_over_dense_jacobians(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    with collect(model, "kfra", "kflr", loss_fn=loss_fn, sharing="reduce") as q:
        loss_fn(model(x), y).backward()
    modules = [module if not isinstance(module, nn.ReLU) else nn.ReLU() for module in model.children()]  # out of place
    _, H_NFF = loss_derivatives(lambda f: loss_fn(f, y), model(x), N)
    for (index, module), G in zip(model.named_children(), recursion_of_averages(modules, x, H_NFF), strict=True):
        if isinstance(module, nn.Linear):
            O_ = module.out_features
            B = G.reshape(-1, O_, len(G) // O_, O_).sum(dim=(0, 2))
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            O_ = module.out_channels
            B = G.reshape(O_, len(G) // O_, O_, -1).sum(dim=(1, 3))
        else:
            continue
        close(q[f"{index}.weight"].kfra.B_OO, B)
        close(q[f"{index}.weight"].kfra.A_II, q[f"{index}.weight"].kflr.A_II)


@pytest.mark.parametrize("name", ["residual", "functional", "lstm", "attention", "tdnnf", "layer norm", "conv1d same"])
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
