"""PSGD and Hessian-free against dense Hessians; where their iterations end on quadratics."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature.products import FullModelProducts
from ngsgd.errors import ConfigError
from ngsgd.preconditioners import PSGD, HessianFree, Preconditioner
from tests.preconditioners.problems import NAMES, Problem, close, gradients_of, joint, problem
from tests.reference import quasi_newton as dense
from tests.wired import Wired


def _draws(preconditioner: PSGD) -> list[dict[str, Tensor]]:
    """The random vectors of all looks to come."""
    seen: list[dict[str, Tensor]] = []
    original = preconditioner.drawn

    def drawn(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = original(grads)
        seen.append(dict(found))   # methods free theirs during the step
        return found
    preconditioner.drawn = drawn  # type: ignore[method-assign, assignment]
    return seen


def _hessian_products(case: Problem, draws: list[dict[str, Tensor]], damping: float) -> list[dict[str, Tensor]]:
    H = dense.hessian(case.model, case.loss, case.x)
    found = []
    for v in draws:
        flat_h = H @ dense.flat(v) + damping * dense.flat(v)
        parts = flat_h.split([value.numel() for _, value in sorted(v.items())])
        found.append({name: part.view_as(v[name]) for name, part in zip(sorted(v), parts, strict=True)})
    return found


class Quadratic(nn.Module):
    """1/2 tr(W^T Hl W Hr) of a weight: the Hessian is Hl (x) Hr in the order of rows."""

    def __init__(self, Hl: Tensor, Hr: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(len(Hr), len(Hl), bias=False).double()
        self.Hl, self.Hr = Hl, Hr

    def forward(self) -> Tensor:
        return 0.5 * (self.layer.weight * (self.Hl @ self.layer.weight @ self.Hr)).sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_products_with_the_complete_model_equal_the_dense_matrices(name: str, scale: float) -> None:
    """Also of a loss in two parts, and whatever its scale is."""
    case = problem(name)
    minibatch = FullModelProducts(case.model)
    with minibatch:
        minibatch.differentiate(case.loss(case.model(case.x)) * scale)
        minibatch.differentiate(case.loss(case.model(case.x)) * (3.0 * scale))
    plain = {name: p.grad.clone() / (4.0 * scale) for name, p in case.model.named_parameters() if p.grad is not None}
    for key, g in case.gradients().items():
        close(plain[key], g)
    torch.manual_seed(0)
    v = {key: torch.randn_like(p) for key, p in case.model.named_parameters()}
    close(dense.flat(minibatch.hessian(v)), dense.hessian(case.model, case.loss, case.x) @ dense.flat(v))
    close(dense.flat(minibatch.ggn(v)), dense.gauss_newton(case.model, case.loss, case.x) @ dense.flat(v))


def test_products_pass_through_recurrent_layers() -> None:
    torch.manual_seed(0)
    model = Wired(lambda m, x: m.out(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(3, 4, batch_first=True),
                  out=nn.Linear(4, 2)).double()
    x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.arange(4) % 2

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), y)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with FullModelProducts(model) as minibatch:
        minibatch.differentiate(loss())
    step, moved = 1e-5, []
    for sign in (1.0, -1.0):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p.add_(v[name], alpha=sign * step)
        nn.functional.cross_entropy(other(x), y).backward()
        moved.append(gradients_of(other))
    difference = {name: (moved[0][name] - moved[1][name]) / (2.0 * step) for name in v}
    # central differences: step^2 of truncation and 1e-16 / step of rounding
    torch.testing.assert_close(dense.flat(minibatch.hessian(v)), dense.flat(difference), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_psgd_equals_dense_steps_of_its_factors(name: str) -> None:
    case, damping, mu = problem(name), 0.05, 0.2
    preconditioner = PSGD(case.model, damping=damping, factor_lr=mu)
    draws = _draws(preconditioner)
    plain, found = case.gradients(), case.preconditioned(preconditioner, steps=4)
    products = _hessian_products(case, draws, damping)
    for layer in ("0", "2"):
        Ql = Qr = torch.zeros(())
        for step, (v, h) in enumerate(zip(draws, products, strict=True)):
            dX, dG = joint(v, layer), joint(h, layer)
            if step == 0:
                Ql, Qr = (torch.eye(size, dtype=dX.dtype) * float(dX.norm() / dG.norm()) ** 0.25 for size in dX.shape)
            Ql, Qr = dense.psgd_kronecker(Ql, Qr, dX, dG, mu)
        close(joint(found, layer), Ql.T @ Ql @ joint(plain, layer) @ Qr.T @ Qr)


@pytest.mark.parametrize("name", NAMES)
def test_full_psgd_equals_dense_steps_of_its_factor(name: str) -> None:
    case, damping, mu = problem(name), 0.05, 0.2
    preconditioner = PSGD(case.model, form="full", damping=damping, factor_lr=mu)
    draws = _draws(preconditioner)
    plain, found = case.gradients(), case.preconditioned(preconditioner, steps=4)
    Q = torch.zeros(())
    for step, (v, h) in enumerate(zip(draws, _hessian_products(case, draws, damping), strict=True)):
        if step == 0:
            Q = torch.eye(len(dense.flat(v)), dtype=torch.float64) * float(dense.flat(v).norm() / dense.flat(h).norm()) ** 0.5
        Q = dense.psgd_full(Q, dense.flat(v), dense.flat(h), mu)
    close(dense.flat(found), Q.T @ Q @ dense.flat(plain))


def _refreshed(model: Quadratic, form: str, rates: tuple[tuple[float, int], ...]) -> PSGD:
    """PSGD after so many refreshes at each rate."""
    state = None
    preconditioner = PSGD(model)
    for factor_lr, refreshes in rates:
        preconditioner = PSGD(model, form=form, factor_lr=factor_lr, damping=1e-12)
        if state is not None:
            preconditioner.load_state_dict(state)
        for _ in range(refreshes):
            preconditioner.evaluate(model)
            preconditioner.step()
        state = preconditioner.state_dict()
    return preconditioner


@pytest.mark.slow
@pytest.mark.parametrize(("form", "size", "condition"), [("kronecker", 3, 100.0), ("full", 2, 10.0)])
def test_psgd_whitens_a_quadratic(form: str, size: int, condition: float) -> None:
    """cond(P H) from condition^2 (Kronecker: 1e4) to 1.1, by a falling rate."""
    model = Quadratic(dense.quadratic_factor(size, condition, seed=1), dense.quadratic_factor(size, condition, seed=2))
    H = torch.kron(model.Hl.contiguous(), model.Hr.contiguous())
    preconditioner = _refreshed(model, form, ((0.1, 1200), (0.01, 800)))
    P = torch.stack([preconditioner.apply({"layer.weight": unit.view(size, size)})["layer.weight"].flatten()
                     for unit in torch.eye(size * size, dtype=torch.float64)], dim=1)
    root = torch.linalg.cholesky(P)
    values = torch.linalg.eigvalsh(root.T @ H @ root)
    assert float(torch.linalg.cond(H)) > 0.99 * condition**2
    assert float(values[-1] / values[0]) <= 1.1


@pytest.mark.parametrize("products", ["ggn", "hessian"])
@pytest.mark.parametrize("name", NAMES)
def test_hessian_free_equals_the_dense_solve(name: str, products: str) -> None:
    case, damping = problem(name), 1.0   # above the Hessian's most negative eigenvalue
    C = (dense.gauss_newton if products == "ggn" else dense.hessian)(case.model, case.loss, case.x)
    preconditioner = HessianFree(case.model, damping=damping, products=products, max_cg_steps=100, cg_tolerance=1e-10)
    plain, found = case.gradients(), case.preconditioned(preconditioner)
    identity = torch.eye(len(C), dtype=C.dtype)
    # residual 1e-10 of the right side, times the inverse's norm 1 / damping
    wanted = torch.linalg.solve(C + damping * identity, dense.flat(plain))
    torch.testing.assert_close(dense.flat(found), wanted, rtol=1e-7, atol=1e-9)


def test_hessian_free_reaches_a_quadratic_s_minimum_in_one_step_and_starts_where_it_ended() -> None:
    model = Quadratic(dense.quadratic_factor(4, 5.0, seed=1), dense.quadratic_factor(3, 2.0, seed=2))
    preconditioner = HessianFree(model, damping=1e-12, products="hessian", max_cg_steps=50, cg_tolerance=1e-12, ema_decay=0.999)
    taken = []
    for lr in (0.0, 1.0):
        model.zero_grad()
        before = preconditioner.num_products
        preconditioner.evaluate(model)
        preconditioner.step()
        taken.append(preconditioner.num_products - before)
        with torch.no_grad():
            assert model.layer.weight.grad is not None
            model.layer.weight.sub_(model.layer.weight.grad, alpha=lr)
    assert float(model().detach()) < 1e-20
    assert taken[0] <= 14   # as many as there are parameters, but for rounding
    assert preconditioner.num_skipped == 0


@pytest.mark.parametrize("method", [PSGD, HessianFree])
def test_methods_without_a_graph_name_the_method_to_call(method: type[PSGD | HessianFree]) -> None:
    case = problem("linear")
    preconditioner = method(case.model)
    with preconditioner.watch():
        case.loss(case.model(case.x)).backward()
    with pytest.raises(ConfigError, match=r"evaluate\(closure\)"):
        preconditioner.step()


def _attention(fused: bool) -> nn.Module:
    """Attention of one head between two affine layers, by torch's kernel or by the formula."""
    def run(model: Any, x_NTI: Tensor) -> Any:
        q, k, v = model.inner(x_NTI)[:, None].chunk(3, dim=-1)
        mixed = (q @ k.mT / 2.0).softmax(dim=-1) @ v
        if fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return model.outer(mixed[:, 0].mean(dim=1))
    torch.manual_seed(4)
    return Wired(run, inner=nn.Linear(4, 12), outer=nn.Linear(4, 3)).double()


@pytest.mark.entry("B9", "you use PSGD, HessianFree or hypergradient with scaled_dot_product_attention", "works",
                   "their passes run in torch's MATH kernel, which can be differentiated twice; an operation without a second "
                   "derivative raises ConfigError with its name")
@pytest.mark.parametrize(("method", "options"), [
    (PSGD, {}), (HessianFree, {}), (HessianFree, {"products": "hessian"})])
def test_fused_attention_is_differentiated_twice(method: type[Preconditioner], options: dict[str, Any]) -> None:
    found = []
    for fused in (True, False):
        model = _attention(fused)
        x, y = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 3
        preconditioner = method(model, damping=0.1, **options)
        preconditioner.evaluate(lambda model=model, x=x, y=y: nn.functional.cross_entropy(model(x), y))   # type: ignore[misc]
        preconditioner.step()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        # the same iterations, in float64
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.entry("B9")
def test_an_operation_without_a_second_derivative_is_named() -> None:
    model = nn.Linear(4, 3)
    x, targets = torch.randn(6, 2, 4), torch.tensor([[1, 2], [2, 1]])
    preconditioner = PSGD(model)
    lengths = torch.tensor([6, 6]), torch.tensor([2, 2])
    preconditioner.evaluate(lambda: nn.functional.ctc_loss(model(x).log_softmax(dim=2), targets, *lengths))
    with pytest.raises(ConfigError, match=r"PSGD.*ctc_loss"):
        preconditioner.step()
