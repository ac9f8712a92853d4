"""Products with curvature blocks against the dense blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import Collection, collect
from ngsgd.errors import ConfigError, DataError
from tests.curvature.problems import PROBLEMS, N, problem
from tests.curvature.support import LOSSES, cells, close, targets
from tests.curvature.test_against_definitions import HESSIAN_CELLS, NO_HESSIAN
from tests.reference.affine_uses import Uses
from tests.reference.curvature import ggn_blocks, hessian_blocks, jacobians, loss_derivatives
from tests.wired import Wired

CELLS = cells(PROBLEMS)


@pytest.mark.parametrize(("name", "loss_name"), CELLS)
def test_products_equal_those_with_the_dense_blocks(name: str, loss_name: str) -> None:
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    with collect(model, "hmp", "ggnmp", loss_fn=loss_fn) as q:
        (0.5 * loss_fn(model(x), y)).backward()
    J = jacobians(model, x, N)
    _, H_NFF = loss_derivatives(lambda f: 0.5 * loss_fn(f, y), model(x), N)
    ggn = ggn_blocks(J, H_NFF)
    for parameter, p in model.named_parameters():
        v = torch.randn(2, *p.shape, dtype=torch.float64)
        close(q[parameter].ggnmp(v).flatten(1), v.flatten(1) @ ggn[parameter].sum(dim=0))
    # torch's own recurrent layers cannot be differentiated twice
    written_out = Uses(model, x).model if name in ("lstm", "lstm with projection", "gru", "rnn") else model
    together = name not in ("group norm", "p-norm")
    for parameter, block in hessian_blocks(written_out, lambda f: 0.5 * loss_fn(f, y), x, rows_together=together).items():
        v = torch.randn(written_out.get_parameter(parameter).shape, dtype=torch.float64)
        close(q[parameter.replace("layer.layer", "layer")].hmp(v).flatten(), block @ v.flatten())


def _loss_at(model: nn.Module, x: Tensor, loss_fn: nn.Module, y: Tensor) -> Callable[[str, Tensor], Tensor]:
    """The loss with another value of one parameter."""
    def loss(parameter: str, value: Tensor) -> Tensor:
        found: Tensor = loss_fn(torch.func.functional_call(model, {parameter: value}, (x,)), y)
        return found
    return loss


# both need second derivatives of the layers in between
POSITIVE_CELLS, NO_POSITIVE = HESSIAN_CELLS, NO_HESSIAN


@pytest.mark.parametrize(("name", "loss_name"), POSITIVE_CELLS)
def test_the_positive_curvature_hessian_has_the_magnitudes_of_residuals(name: str, loss_name: str) -> None:
    """They differ in the residuals alone: of clip, max(r, 0) = (r + |r|) / 2."""
    model, x, _ = problem(name)
    loss_fn, y = targets(loss_name, model(x).detach())
    with collect(model, "hmp", "ggnmp", "pchmp", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    loss = _loss_at(model, x, loss_fn, y)
    for parameter, p in model.named_parameters():
        v = torch.randn(p.shape, dtype=torch.float64)
        at = p.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(parameter, at), at, create_graph=True)
        (Hv,) = torch.autograd.grad((slope * v).sum(), at) if slope.requires_grad else (torch.zeros_like(v),)
        of = q[parameter]
        magnitude, clipped = of.pchmp(v), of.pchmp(v, modify="clip")
        close(clipped, (Hv + magnitude) / 2)
        # the term added to the GGN has no negative curvature
        assert float((v * (magnitude - of.ggnmp(v))).sum()) >= -1e-12
        # and is no smaller than the Hessian's
        assert float((v * (magnitude - Hv)).sum()) >= -1e-12


@pytest.mark.parametrize("name", NO_POSITIVE)
def test_the_positive_curvature_hessian_is_refused_where_second_derivatives_are_not_known(name: str) -> None:
    model, x, _ = problem(name)
    for loss_name in LOSSES:
        loss_fn, y = targets(loss_name, model(x).detach())
        with collect(model, "pchmp", loss_fn=loss_fn) as q:
            loss_fn(model(x), y).backward()
        with pytest.raises(ConfigError, match="pchmp"):
            _all_products(q, model)


def _all_products(q: Collection, model: nn.Module) -> None:
    for parameter in q:
        q[parameter].pchmp(torch.ones_like(model.get_parameter(parameter)))


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
    with collect(model, "hmp", loss_fn=loss_fn) as q:
        loss_fn(model(x), y).backward()
    with pytest.raises(DataError, match="shape"):
        q["0.weight"].hmp(torch.zeros(3))
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(DataError, match="changed"):
        q["0.weight"].hmp(torch.zeros(6, 5).double())


def _frames(*, fused: bool) -> nn.Module:
    """Two layers over frames with attention by torch's fused function between."""
    def run(model: Any, x_NTD: Tensor) -> Any:
        q, k, v = (part[:, None] for part in torch.tanh(model.inner(x_NTD)).chunk(3, dim=2))
        attended = q * k + v
        if fused:
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return model.out(attended[:, 0])
    return Wired(run, inner=nn.Linear(5, 6), out=nn.Linear(2, 3)).double()


VIEWS: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "flattened": lambda o, y, loss_fn: loss_fn(o.flatten(0, -2), y.flatten()),
    "viewed": lambda o, y, loss_fn: loss_fn(o.view(-1, 3), y.view(-1)),
    "transposed": lambda o, y, loss_fn: loss_fn(o.transpose(1, 2), y),
    "slices": lambda o, y, loss_fn: torch.stack([loss_fn(o[:, t], y[:, t]) for t in range(3)]).mean(),
    "slices of a view": lambda o, y, loss_fn: loss_fn(o.permute(0, 2, 1)[:, :, 1:], y[:, 1:])}


def _require_dense_products(model: nn.Module, x: Tensor, y: Tensor, view: str, loss_fn: nn.Module) -> None:
    def loss(o: Tensor) -> Tensor:
        return VIEWS[view](o, y, loss_fn)
    with collect(model, "hmp", "ggnmp", loss_fn=loss_fn) as q:
        loss(model(x)).backward()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian = hessian_blocks(model, loss, x)
        J = jacobians(model, x, N)
    ggn = ggn_blocks(J, loss_derivatives(loss, model(x), N)[1])
    for name, p in model.named_parameters():
        v = torch.randn(2, *p.shape, dtype=torch.float64)
        close(q[name].ggnmp(v).flatten(1), v.flatten(1) @ ggn[name].sum(dim=0))
        close(q[name].hmp(v).flatten(1), v.flatten(1) @ hessian[name])


@pytest.mark.entry("P9", "you ask for `hmp` or `ggnmp` and the loss sees `o.flatten(0, -2)` or another view of the model's output",
                   "works", "Products are exact for views of the output (slices, `flatten`, `transpose`). A copy, or another "
                            "operation between model and loss, is a `ConfigError`.")
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")], ids=["mean", "sum"])
@pytest.mark.parametrize("view", VIEWS)
def test_the_loss_may_see_a_view_of_the_output(view: str, loss_fn: nn.Module) -> None:
    torch.manual_seed(0)
    model = _frames(fused=False)
    _require_dense_products(model, torch.randn(N, 3, 5).double(), torch.randint(3, (N, 3)), view, loss_fn)


@pytest.mark.entry("P9")
def test_anything_but_a_view_of_the_output_is_refused() -> None:
    torch.manual_seed(0)
    model, x, y = _frames(fused=False), torch.randn(N, 3, 5).double(), torch.randint(3, (N * 3,))
    made: Callable[[Tensor], Tensor]
    for made in (lambda o: o.flatten(0, 1) * 1.0, lambda o: o.flatten(0, 1).mul_(2.0), lambda o: o.mul_(2.0).flatten(0, 1),
                 lambda o: o.flatten(0, 1).clone(), lambda o: o.transpose(0, 1).flatten(0, 1)):
        with pytest.raises(ConfigError, match=r"view.*output"), \
                collect(model, "ggnmp", loss_fn=nn.functional.cross_entropy):
            nn.functional.cross_entropy(made(model(x)), y).backward()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.entry("B9")
def test_products_through_fused_attention(view: str) -> None:
    """Whose own derivative cannot be differentiated: products use the plain formula."""
    torch.manual_seed(0)
    model = _frames(fused=True)
    _require_dense_products(model, torch.randn(N, 3, 5).double(), torch.randint(3, (N, 3)), view, nn.CrossEntropyLoss())
