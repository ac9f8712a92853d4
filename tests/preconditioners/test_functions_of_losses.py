"""Objectives that are functions of a loss, of every method: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS, HessianFree
from ngsgd.preconditioners.base import Preconditioner
from tests.preconditioners.problems import Problem, close, directions, gradients_of, problem
from tests.reference import quasi_newton as dense

F = nn.functional
Loss = Callable[[Tensor, Tensor], Tensor]
# Each has derivatives with respect to its losses of sum 1, so that the total weight of the rows is
# 1, as that of a loss that is not recognized.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqrt": lambda a, b: a.sqrt() * (2.0 * a.sqrt()).detach(),
    "exp": lambda a, b: a.exp() * (-a).exp().detach(),
    "square": lambda a, b: a.square() / (2.0 * a).detach(),
    "product": lambda a, b: a * b / (a + b).detach()}
# functions with equal gradients that are linear
LINEARIZED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sqrt", "exp", "square"), lambda a, b: a),
    "product": lambda a, b: (b * a.detach() + a * b.detach()) / (a + b).detach()}
ROWS = [kind for kind in METHODS if METHODS[kind].traits.fisher]
# Methods of derivatives of the loss itself refuse these options.
EMPIRICAL = ("kbfgs", "simple")
SECOND_ORDER: list[tuple[str, dict[str, str]]] = [
    *((kind, {"fisher": fisher}) for kind in ROWS if kind not in (*EMPIRICAL, "kfra") for fisher in ("mc", "exact")),
    ("kfra", {}), ("ksd", {}), ("hessian_free", {"products": "ggn"})]


def _hidden(f: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy that is not recognized."""
    return -f.log_softmax(dim=1).gather(1, y[:, None]).mean()


def _mse(f: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(f, F.one_hot(y, 3).to(f))


def _hidden_mse(f: Tensor, y: Tensor) -> Tensor:
    return (f - F.one_hot(y, 3)).square().mean()


def _value(case: Problem, loss: Loss) -> Tensor:
    return loss(case.model(case.x), case.y)


def _objective(case: Problem, function: Callable[[Tensor, Tensor], Tensor], *, hidden: bool = False) -> Tensor:
    f = case.model(case.x)
    first, second = (_hidden, _hidden_mse) if hidden else (F.cross_entropy, _mse)
    return function(first(f, case.y), second(f, case.y))


def _made(kind: str, case: Problem, **options: object) -> Preconditioner:
    made: Preconditioner = METHODS[kind](case.model, damping=0.1, **options)
    return made


def _directions(kind: str, function: Callable[[Tensor, Tensor], Tensor], options: dict[str, str],
                *, hidden: bool = False) -> dict[str, Tensor]:
    """After two steps, so that methods that evaluate a minibatch twice have done so."""
    case = problem("linear")
    return directions(_made(kind, case, **options),
                      lambda: _objective(case, function, hidden=hidden))


def _require_right(kind: str, name: str) -> None:
    """Rows are those of the gradient; other methods use gradients and Hessians only."""
    options = {"products": "hessian"} if kind == "hessian_free" else {}
    if kind in ROWS:
        wanted = _directions(kind, LINEARIZED[name], options)
    else:
        wanted = _directions(kind, FUNCTIONS[name], options, hidden=True)
    found = _directions(kind, FUNCTIONS[name], options)
    assert any(float(value.abs().sum()) > 0.0 for value in found.values())
    for key, value in wanted.items():
        close(found[key], value)


def _require_refused(kind: str, options: dict[str, str], name: str) -> None:
    """Nothing is stored, and the next minibatch is as in a new preconditioner."""
    case, other = problem("linear"), problem("linear")
    preconditioner = _made(kind, case, **options)
    for _ in range(2):
        with pytest.raises(ConfigError, match="objective"):
            preconditioner.evaluate(lambda: _objective(case, FUNCTIONS[name]))
        assert all(p.grad is None for p in case.model.parameters())
    assert not preconditioner.statistics and not preconditioner.inverses and preconditioner.num_steps == 0
    found = case.preconditioned(preconditioner, lr=0.01)
    assert any(not torch.equal(found[key], g) for key, g in other.gradients().items())
    for key, value in other.preconditioned(_made(kind, other, **options), lr=0.01).items():
        assert torch.equal(found[key], value)


@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["kfac", "hessian_free", "adam"])
def test_gradients_and_hessians_of_a_function_of_a_loss_are_right(kind: str, name: str) -> None:
    _require_right(kind, name)


@pytest.mark.slow
@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind not in ("kfac", "hessian_free", "ksd", "kfra", "adam")])
def test_every_method_is_right_for_functions_of_a_loss(kind: str, name: str) -> None:
    _require_right(kind, name)


@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("kind", "options"), [("kfac", {"fisher": "mc"}), ("kfac", {"fisher": "exact"}), SECOND_ORDER[-1]])
def test_the_loss_hessian_of_a_function_of_a_loss_is_refused(kind: str, options: dict[str, str], name: str) -> None:
    _require_refused(kind, options, name)


@pytest.mark.parametrize("kind", EMPIRICAL)
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_methods_of_the_gradient_itself_refuse_other_fisher_matrices(kind: str, fisher: str) -> None:
    with pytest.raises(ConfigError, match="fisher"):
        _made(kind, problem("linear"), fisher=fisher)


@pytest.mark.slow
@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("kind", "options"), [one for one in SECOND_ORDER if one[0] != "kfac"][:-1])
def test_every_method_refuses_functions_of_a_loss(kind: str, options: dict[str, str], name: str) -> None:
    _require_refused(kind, options, name)


@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", ["another part", "another pass", "a pass before"])
def test_parts_without_a_known_loss_are_refused_by_gauss_newton_products(name: str) -> None:
    case = problem("linear")
    preconditioner = HessianFree(case.model, damping=0.1)
    passes: dict[str, tuple[Loss, ...]] = {
        "another part": (lambda f, y: F.cross_entropy(f, y) + f.square().mean(),),
        "another pass": (F.cross_entropy, _hidden),
        "a pass before": (_hidden, F.cross_entropy)}

    def run() -> None:
        for loss in passes[name]:
            preconditioner.evaluate(partial(_value, case, loss))
    with pytest.raises(ConfigError):
        run()
    assert not preconditioner.statistics


@pytest.mark.entry("F22")
@pytest.mark.parametrize(("kind", "options"), [("kfac", {"fisher": "exact"}), SECOND_ORDER[-1]])
def test_sums_and_penalties_of_parameters_keep_the_curvature_of_the_losses(kind: str, options: dict[str, str]) -> None:
    found = []
    for penalty in (0.0, 0.01):
        case = problem("linear")
        preconditioner = _made(kind, case, **options)

        def loss(case: Problem = case, penalty: float = penalty) -> Tensor:
            f = case.model(case.x)
            objective = (F.cross_entropy(f, case.y) + 0.5 * _mse(f, case.y)) / 1.5
            return objective if not penalty else objective + penalty * sum(p.square().sum() for p in case.model.parameters())
        preconditioner.evaluate(loss)
        case.model.zero_grad()
        case.loss(case.model(case.x)).backward()
        preconditioner.step()
        found.append(gradients_of(case.model))
    for key, value in found[0].items():
        assert float(value.abs().sum()) > 0.0
        close(found[1][key], value)


@pytest.mark.entry("F22")
def test_hessian_free_divides_by_the_weight_of_one_pass() -> None:
    """Products differentiate the root of a loss again, which is no further pass."""
    case = problem("linear")
    preconditioner = HessianFree(case.model, damping=1.0, products="hessian", max_cg_steps=200, cg_tolerance=1e-14)

    def root(f: Tensor) -> Tensor:
        return F.cross_entropy(f, case.y).sqrt()
    # derivative of the root with respect to the loss
    weight = 0.5 / root(case.model(case.x)).detach()
    g = dense.flat(case.gradients()) * weight
    hessian = dense.hessian(case.model, root, case.x) / weight
    case.model.zero_grad()
    preconditioner.evaluate(lambda: root(case.model(case.x)))
    preconditioner.step()
    found = dense.flat(gradients_of(case.model))
    assert not torch.allclose(found, g)
    close(found, torch.linalg.solve(hessian + torch.eye(len(g), dtype=g.dtype), g))
