"""Products with curvature blocks against the dense blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.errors import ConfigError, DataError
from tests.curvature.problems import N, problem
from tests.curvature.test_against_definitions import LOSSES, _targets, close
from tests.reference.curvature import ggn_blocks, hessian_blocks, jacobians, loss_derivatives

NAMES = ("linear", "residual", "conv2d", "lstm", "gru", "attention", "layer norm", "p-norm", "functional", "batch norm",
         "embedding")
CASES = [(name, "cross-entropy") for name in NAMES]


@pytest.mark.parametrize(("name", "loss_name"), CASES + [("residual", loss) for loss in LOSSES[1:]])
def test_products_equal_those_with_the_dense_blocks(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = _targets(loss_name, model(x).detach())
    with collect(model, "hmp", "ggnmp", loss_fn=loss_fn) as q:
        (0.5 * loss_fn(model(x), y)).backward()
    J = jacobians(model, x, N)
    _, H_NFF = loss_derivatives(lambda f: 0.5 * loss_fn(f, y), model(x), N)
    ggn = ggn_blocks(J, H_NFF)
    for parameter, p in model.named_parameters():
        v = torch.randn(2, *p.shape, dtype=torch.float64)
        close(q[parameter].ggnmp(v).flatten(1), v.flatten(1) @ ggn[parameter].sum(dim=0))
    if name not in ("lstm", "gru", "p-norm"):  # torch's own layers have no second derivative for the oracle
        for parameter, block in hessian_blocks(model, lambda f: 0.5 * loss_fn(f, y), x).items():
            v = torch.randn(model.get_parameter(parameter).shape, dtype=torch.float64)
            close(q[parameter].hmp(v).flatten(), block @ v.flatten())


def test_the_positive_curvature_hessian_has_no_negative_curvature_and_is_the_hessian_where_that_has_none() -> None:
    model, x, _ = problem("residual")
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3
    with collect(model, "hmp", "ggnmp", "pchmp", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()

    def dense(parameter: str, product: str, **options: str) -> Tensor:
        p = model.get_parameter(parameter)
        unit = torch.eye(p.numel(), dtype=torch.float64).view(-1, *p.shape)
        found: Tensor = getattr(q[parameter], product)(unit, **options).flatten(1)
        return found

    for parameter in ("first.weight", "second.bias"):
        hessian, ggn = dense(parameter, "hmp"), dense(parameter, "ggnmp")
        magnitude, clipped = dense(parameter, "pchmp"), dense(parameter, "pchmp", modify="clip")
        close(clipped, (hessian - ggn + magnitude - ggn) / 2 + ggn)  # max(r, 0) = (r + |r|) / 2
        for block in (magnitude, clipped):
            assert torch.linalg.eigvalsh((block + block.T) / 2)[0] > -1e-12
        assert torch.linalg.eigvalsh((hessian + hessian.T) / 2)[0] < -1e-6  # there was something to modify


def test_dropout_is_drawn_again_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    x, y, loss_fn = torch.randn(N, 5).double(), torch.arange(N) % 3, nn.CrossEntropyLoss()
    with collect(model, "ggnmp", "diag_ggn", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    torch.manual_seed(5)
    unit = torch.eye(120, dtype=torch.float64).view(-1, 3, 40)
    close(q["2.weight"].ggnmp(unit).flatten(1).diagonal(), q["2.weight"].diag_ggn.flatten())


def test_products_are_refused_where_they_would_be_of_something_else() -> None:
    model, x, _ = problem("linear")
    loss_fn, y = nn.CrossEntropyLoss(), torch.arange(N) % 3
    with pytest.raises(ConfigError, match="model's own output"), collect(model, "hmp", loss_fn=loss_fn):
        loss_fn(model(x) * 2.0, y).backward()
    with collect(model, "hmp", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    with pytest.raises(DataError, match="shape"):
        q["0.weight"].hmp(torch.zeros(3))
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(DataError, match="changed"):
        q["0.weight"].hmp(torch.zeros(6, 5).double())
