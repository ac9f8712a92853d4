"""Second-order quantities of every loss and argument: dense float64 matrices, or ConfigError."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect, losses
from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.preconditioners import KFAC
from tests.curvature.support import close
from tests.reference.curvature import ggn_blocks, jacobians, loss_derivatives

F = nn.functional
N, C = 4, 3
EXACT = ("diag_ggn", "batch_diag_ggn", "sqrt_ggn", "diag_h", "kflr")
Objective = Callable[[Tensor], Tensor]


def _net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, C)).double(), torch.randn(N, 5).double()


def _require_exact(objective: Objective, loss_fn: Any, *quantities: str) -> None:
    """Compare with the dense matrices of the objective, as a function of the model's output."""
    model, x = _net()
    with collect(model, *(quantities or EXACT), loss_fn=loss_fn) as q:
        objective(model(x)).backward()
    J = jacobians(model, x, N)
    _, H_NFF = loss_derivatives(objective, model(x), N)
    assert float(H_NFF.abs().max()) > 0.0
    for name, G_NPP in ggn_blocks(J, H_NFF).items():
        close(q[name].diag_ggn, G_NPP.sum(dim=0).diagonal())
        if not quantities:
            close(q[name].batch_diag_ggn, G_NPP.diagonal(dim1=1, dim2=2))
            root_XP = q[name].sqrt_ggn.flatten(2).flatten(0, 1)
            close(root_XP.T @ root_XP, G_NPP.sum(dim=0))
    if not quantities:
        close(q["2.bias"].kflr.B_OO, ggn_blocks(J, H_NFF)["2.bias"].sum(dim=0))
        close(q["2.weight"].diag_h, q["2.weight"].diag_ggn)  # linear in the last layer
        _require_hessian(q["0.weight"].diag_h, model, x, objective)


def _require_hessian(diagonal: Tensor, model: nn.Module, x: Tensor, objective: Objective) -> None:
    p = model.get_parameter("0.weight")
    (g,) = torch.autograd.grad(objective(model(x)), p, create_graph=True)
    rows = [torch.autograd.grad(each, p, retain_graph=True)[0].flatten() for each in g.flatten()]
    close(diagonal, torch.stack(rows).diagonal())


# every argument with every value

INDEX = torch.tensor([0, 1, 2, 1])
SOFT = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8], [0.0, 0.6, 0.4]]).double()
BINARY, REAL = torch.tensor([[1.0, 0.0, 0.25]] * N).double(), torch.linspace(-1, 1, N * C).double().view(N, C)
PER_CLASS, PER_ELEMENT = torch.tensor([0.5, 2.0, 1.0]).double(), torch.linspace(0.1, 2.0, N * C).double().view(N, C)
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "cross_entropy": {"target": (INDEX, SOFT), "weight": (None, PER_CLASS),
                      "ignore_index": (-100, 1), "label_smoothing": (0.0, 0.2)},
    "mse_loss": {"target": (REAL,), "weight": (None, PER_ELEMENT)},
    "binary_cross_entropy_with_logits": {
        "target": (BINARY,), "weight": (None, PER_CLASS, PER_ELEMENT),
        "pos_weight": (None, PER_CLASS)}}
COMMON: dict[str, tuple[Any, ...]] = {
    "reduction": ("mean", "sum", "none"), "size_average": (None, True, False),
    "reduce": (None, True, False)}


def _combinations(name: str) -> list[dict[str, Any]]:
    values = {**VALUES[name], **COMMON}
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _function(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, name)
    return function


def _require_right_or_refused(name: str, kwargs: dict[str, Any], *, positional: bool) -> bool:
    """Return whether the quantities are right; False: torch rejects the arguments."""
    function = _function(name)
    weight = torch.linspace(0.5, 2.0, N * C).double().view(N, C)
    names = list(inspect.signature(function).parameters)[1:]

    def objective(f: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # The deprecated arguments.
            warnings.simplefilter("ignore")
            value = function(f, *(kwargs[key] for key in names)) if positional else function(f, **kwargs)
        # Without a reduction, each term has its own factor.
        return value if value.ndim == 0 else (value * weight[:, : value[0].numel()].view(value.shape)).sum()
    model, x = _net()
    try:
        objective(model(x))
    except (RuntimeError, ValueError):
        return False
    _require_exact(objective, function, "diag_ggn")
    return True


@pytest.mark.slow
@pytest.mark.parametrize("positional", [False, True], ids=["keyword", "positional"])
@pytest.mark.parametrize("name", VALUES)
def test_every_combination_of_arguments_has_the_curvature_of_the_objective(name: str, positional: bool) -> None:
    taken = [_require_right_or_refused(name, kwargs, positional=positional) for kwargs in _combinations(name)]
    assert sum(taken) >= len(taken) // 2


@pytest.mark.entry("F19", "you pass arguments that change the loss: `weight` of `mse_loss`, "
                          "`size_average`, `reduce`, `pos_weight`, `label_smoothing`", "works",
                   "Second-order quantities are those of the loss with all its arguments, by "
                   "position or keyword. An argument that ngsgd does not know is a `ConfigError`.")
@pytest.mark.parametrize(("name", "kwargs"), [
    *(("mse_loss", {"target": REAL, **kwargs}) for kwargs in (
        {"weight": PER_ELEMENT, "reduction": "sum"}, {"weight": PER_ELEMENT},
        {"weight": PER_ELEMENT, "reduction": "none"}, {"size_average": False}, {"reduce": False},
        {"size_average": True, "reduction": "sum"}, {"reduce": False, "size_average": False})),
    ("cross_entropy", {"target": INDEX, "weight": PER_CLASS, "size_average": False, "label_smoothing": 0.2}),
    ("cross_entropy", {"target": SOFT, "weight": PER_CLASS, "reduce": False}),
    ("binary_cross_entropy_with_logits", {"target": BINARY, "weight": PER_CLASS, "pos_weight": PER_CLASS, "reduce": False}),
    ("binary_cross_entropy_with_logits", {"target": BINARY, "size_average": False})])
def test_arguments_of_a_loss_change_its_curvature(name: str, kwargs: dict[str, Any]) -> None:
    assert _require_right_or_refused(name, kwargs, positional=False)


@pytest.mark.entry("F19")
def test_the_values_cover_the_signatures() -> None:
    """A new argument of torch's needs values here, and support or the error below."""
    for name, values in VALUES.items():
        assert set(inspect.signature(_function(name)).parameters) == {"input", *values, *COMMON}


@pytest.mark.entry("F19")
def test_an_argument_of_a_later_torch_is_refused_unless_it_is_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.DEFAULTS, F.mse_loss, {**losses.DEFAULTS[F.mse_loss], "scale": 1.0})
    output = torch.zeros(N, C, requires_grad=True)
    assert losses.arguments(F.mse_loss, (output, output), {"scale": 1.0})[1].settings["reduction"] == "mean"
    with pytest.raises(ConfigError, match="scale"):
        losses.arguments(F.mse_loss, (output, output), {"scale": 2.0})


@pytest.mark.entry("F19")
@pytest.mark.parametrize("argument", ["weight", "target"])
def test_arguments_that_depend_on_parameters_are_refused(argument: str) -> None:
    model, x = _net()
    kwargs: dict[str, Any] = {"target": BINARY, argument: PER_ELEMENT.clone().requires_grad_()}
    with pytest.raises(ConfigError, match=argument), collect(model, "diag_ggn", loss_fn=F.mse_loss):
        F.mse_loss(model(x), **kwargs).backward()


@pytest.mark.parametrize("kwargs", [{"weight": -PER_ELEMENT}, {"pos_weight": PER_CLASS, "target": 5.0 + BINARY}])
def test_negative_weights_have_no_root(kwargs: dict[str, Any]) -> None:
    model, x = _net()
    with pytest.raises(DataError, match="negative"), collect(model, "diag_ggn", loss_fn=F.binary_cross_entropy_with_logits):
        F.binary_cross_entropy_with_logits(model(x), **{"target": BINARY, **kwargs}).backward()


# loss classes with their own forward


class Focal(nn.CrossEntropyLoss):
    def forward(self, f: Tensor, target: Tensor) -> Tensor:
        ce = F.cross_entropy(f, target, reduction="none")
        return ((1.0 - (-ce).exp()) ** 2 * ce).mean()


class Relative(nn.MSELoss):
    """Without a call of torch's function."""

    def forward(self, f: Tensor, target: Tensor) -> Tensor:
        return ((f - target).square() / (target.square() + 0.1)).mean()


class RootOfMean(nn.MSELoss):
    def forward(self, f: Tensor, target: Tensor) -> Tensor:
        return super().forward(f, target).sqrt()


class Doubled(nn.CrossEntropyLoss):
    def forward(self, f: Tensor, target: Tensor) -> Tensor:
        return 2.0 * super().forward(f.flip(1), C - 1 - target)


def _patched(forward: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    loss_fn: Any = nn.CrossEntropyLoss()
    loss_fn.forward = forward
    made: nn.Module = loss_fn
    return made


@pytest.mark.entry("F21", "you use a loss class with its own `forward`: a subclass of "
                   "nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, or an object whose "
                   "`forward` was replaced", "error", "`ConfigError`, unless the loss is linear in "
                   "its calls of torch's loss function; then its curvature is exact.")
@pytest.mark.parametrize(("loss_fn", "target"), [
    (Focal(), INDEX), (Relative(), REAL), (RootOfMean(), REAL),
    (_patched(lambda f, y: F.cross_entropy(f, y).exp()), INDEX),
    (_patched(lambda f, y: -f.log_softmax(1)[range(N), y].mean()), INDEX)],
    ids=["focal", "relative", "root", "patched function", "patched formula"])
def test_a_loss_class_with_its_own_forward_is_refused(loss_fn: nn.Module, target: Tensor) -> None:
    model, x = _net()
    for quantity in ("diag_ggn", "diag_h", "kfac", "sqrt_ggn_mc", "hmp", "kfra"):
        with pytest.raises(ConfigError), collect(model, quantity, loss_fn=loss_fn):
            loss_fn(model(x), target).backward()
    with pytest.raises(ConfigError, match="reduction"):
        collect(model, "variance", loss_fn=loss_fn)


@pytest.mark.entry("F21")
def test_a_linear_own_forward_is_exact() -> None:
    loss_fn = Doubled()
    _require_exact(lambda f: loss_fn(f, INDEX), loss_fn)


@pytest.mark.entry("F21")
@pytest.mark.parametrize(
    "loss_fn", [functools.partial(F.cross_entropy, label_smoothing=0.1),
                lambda f, y: F.cross_entropy(f, y).sqrt(), F.l1_loss, nn.L1Loss(),
                nn.Sequential(nn.CrossEntropyLoss()), "cross_entropy", [nn.CrossEntropyLoss()]],
    ids=["partial", "lambda", "function", "class", "container", "name", "list"])
def test_other_objects_are_refused(loss_fn: Any) -> None:
    model, _ = _net()
    with pytest.raises(ConfigError, match="loss_fn"):
        collect(model, "diag_ggn", loss_fn=loss_fn)


# functions of a loss


def _mse(f: Tensor) -> Tensor:
    return F.mse_loss(f, REAL)


def _ce(f: Tensor) -> Tensor:
    return F.cross_entropy(f, INDEX)


def _each(f: Tensor) -> Tensor:
    return F.cross_entropy(f, INDEX, reduction="none")


FACTOR = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
LINEAR: dict[str, Objective] = {
    "multiple": lambda f: 3.0 * _ce(f) / 2.0 + 1.0,
    "sum of losses": lambda f: _ce(f) + 0.5 * _mse(f),
    "mean": lambda f: _each(f).mean(),
    "sum": lambda f: _each(f).sum(),
    "weights": lambda f: (_each(f) * PER_ELEMENT[:, 0]).sum(),
    "dot product": lambda f: _each(f) @ PER_ELEMENT[:, 0],
    "stack": lambda f: torch.stack([_ce(f), _mse(f)]).mean(),
    "selected rows": lambda f: _each(f)[:2].sum(),
    "hard examples": lambda f: _each(f).topk(2).values.mean(),
    "where": lambda f: torch.where(_each(f) > 1.0, _each(f), 0.0).sum(),
    "maximum": lambda f: torch.maximum(_ce(f), _mse(f)),
    "masked": lambda f: _each(f).masked_fill(torch.tensor([True, False, False, True]), 0.0).sum(),
    "detached weights": lambda f: ((1.0 - (-_each(f)).exp()).detach() * _each(f)).mean(),
    "learned factor": lambda f: (-FACTOR).exp() * _ce(f) + FACTOR,
    "largest": lambda f: _each(f).max(),
    "flooding": lambda f: (_ce(f) - 0.1).abs() + 0.1}
NONLINEAR: dict[str, Objective] = {
    "sqrt": lambda f: _mse(f).sqrt(),
    "exp": lambda f: _ce(f).exp(),
    "log": lambda f: _ce(f).log(),
    "square": lambda f: _ce(f).square(),
    "power": lambda f: _ce(f) ** 2,
    "product": lambda f: _ce(f) * _mse(f),
    "with itself": lambda f: torch.stack([_ce(f)] * 2).prod(),
    "reciprocal": lambda f: -1.0 / _ce(f),
    "divisor": lambda f: -torch.ones(()).double() / _ce(f),
    "ratio": lambda f: _ce(f) / _mse(f),
    "focal": lambda f: ((1.0 - (-_each(f)).exp()) ** 2 * _each(f)).mean(),
    "logsumexp": lambda f: _each(f).logsumexp(0),
    "softmax weights": lambda f: (_each(f).softmax(0) * _each(f)).sum(),
    "norm": lambda f: _each(f).norm(),
    "tanh": lambda f: _ce(f).tanh(),
    "product of rows": lambda f: _each(f).prod(),
    "another loss": lambda f: _ce(f) + F.l1_loss(f, REAL),
    "a formula": lambda f: _ce(f) + f.square().mean(),
    "an entropy": lambda f: _ce(f) - (f.softmax(1) * f.log_softmax(1)).sum(),
    "weight of the output": lambda f: (_each(f) * f.sigmoid()[:, 0]).sum(),
    "variance of rows": lambda f: _each(f).mean() + _each(f).var(),
    "root in place": lambda f: _ce(f).mul(2.0).sqrt_(),
    "loss of a loss": lambda f: F.mse_loss(_each(f), REAL[:, 0])}


@pytest.mark.entry("F22")
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_of_a_loss_are_exact(name: str) -> None:
    piecewise = name in ("where", "maximum", "masked", "largest", "hard examples", "flooding")
    # The reference of these has rows without curvature.
    _require_exact(LINEAR[name], F.cross_entropy, *(("diag_ggn",) if piecewise else ()))


@pytest.mark.entry("F22", "you differentiate a function of a loss: its square root, exponential, "
                          "product with another loss, weights that depend on the parameters, or a "
                          "sum with another function of the output", "error",
                   "`ConfigError` in the backward pass, before second-order quantities are stored; "
                   'also of preconditioners with `fisher="mc"` or `"exact"`, and of `HessianFree` '
                   'with `products="ggn"`. Sums, means, multiples, selections and maxima of losses '
                   "are exact.")
@pytest.mark.parametrize("name", NONLINEAR)
def test_other_functions_of_a_loss_are_refused(name: str) -> None:
    model, x = _net()
    with pytest.raises(ConfigError), collect(model, "diag_ggn", loss_fn=F.cross_entropy) as q:
        NONLINEAR[name](model(x)).backward()
    assert len(q) == 0
    with collect(model, "batch_l2", loss_fn=F.cross_entropy, reduction="sum") as q:
        NONLINEAR[name](model(x)).backward()
    assert float(q["0.weight"].batch_l2.sum()) > 0.0


@pytest.mark.entry("F22")
@pytest.mark.parametrize("way", ["backward", "autograd.backward", "autograd.grad", "list"])
def test_every_way_to_start_a_backward_pass_is_checked(way: str) -> None:
    start: dict[str, Callable[[nn.Module, Tensor], Any]] = {
        "backward": lambda model, loss: loss.backward(),
        "autograd.backward": lambda model, loss: torch.autograd.backward(loss),
        "autograd.grad": lambda model, loss: torch.autograd.grad(loss, list(model.parameters())),
        "list": lambda model, loss: torch.autograd.backward([loss, 2.0 * loss])}
    model, x = _net()
    with collect(model, "diag_ggn", loss_fn=F.mse_loss) as q:
        start[way](model, _mse(model(x)))
    assert float(q["0.weight"].diag_ggn.sum()) > 0.0
    with pytest.raises(ConfigError, match="Sqrt"), collect(model, "diag_ggn", loss_fn=F.mse_loss):
        start[way](model, _mse(model(x)).sqrt())


# other losses


def _losses_of_torch() -> list[str]:
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type)]
    return sorted({kind.__name__ for kind in kinds if issubclass(kind, nn.modules.loss._Loss)}
                  | {name for name in dir(nn) if name.endswith("Loss")})


@pytest.mark.entry("F21")
@pytest.mark.parametrize("name", _losses_of_torch())
def test_every_loss_class_is_supported_or_refused(name: str) -> None:
    model, _ = _net()
    kind = getattr(nn, name)
    with warnings.catch_warnings():
        # NLLLoss2d is deprecated.
        warnings.simplefilter("ignore")
        loss_fn = kind.__new__(kind)
    nn.Module.__init__(loss_fn)
    if kind in losses.CLASSES:
        collect(model, "diag_ggn", loss_fn=loss_fn)
    else:
        with pytest.raises(ConfigError, match=name):
            collect(model, "diag_ggn", loss_fn=loss_fn)


def test_every_loss_function_of_torch_is_known() -> None:
    found = {name for name in dir(F)
             if any(word in name for word in ("loss", "entropy", "nll", "kl_div"))
             and not name.startswith("_") and callable(getattr(F, name))}
    known = {function.__name__ for function in (*losses.FUNCTIONS, *losses.OTHERS)}
    assert found == known


OTHERS: dict[str, Objective] = {
    "l1_loss": lambda f: F.l1_loss(f, REAL),
    "smooth_l1_loss": lambda f: F.smooth_l1_loss(f, REAL),
    "huber_loss": lambda f: F.huber_loss(f, REAL),
    "nll_loss": lambda f: F.nll_loss(f.log_softmax(1), INDEX),
    "kl_div": lambda f: F.kl_div(f.log_softmax(1), SOFT, reduction="batchmean"),
    "poisson": lambda f: F.poisson_nll_loss(f, REAL),
    "gaussian": lambda f: F.gaussian_nll_loss(f, REAL, torch.ones_like(f)),
    "binary_cross_entropy": lambda f: F.binary_cross_entropy(f.sigmoid(), BINARY),
    "soft_margin": lambda f: F.soft_margin_loss(f, 2 * BINARY - 1),
    "multi_margin": lambda f: F.multi_margin_loss(f, INDEX),
    "multilabel_soft": lambda f: F.multilabel_soft_margin_loss(f, BINARY),
    "hinge": lambda f: F.hinge_embedding_loss(f, 2 * BINARY.round() - 1),
    "a formula": lambda f: (f - REAL).square().mean()}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_than_loss_fn_are_refused(name: str) -> None:
    model, x = _net()
    for quantity in ("diag_ggn", "kfac", "hmp"):
        with pytest.raises(ConfigError, match="loss"), collect(model, quantity, loss_fn=F.cross_entropy):
            OTHERS[name](model(x)).backward()


# the reduction of variances


@pytest.mark.entry("F19")
@pytest.mark.parametrize("quantity", ["variance", "second_moment", "kfac_emp"])
def test_variances_refuse_another_reduction_than_that_of_loss_fn(quantity: str) -> None:
    for reduction in ("sum", "none"):
        model, x = _net()
        with pytest.raises(ConfigError, match="reduction"), collect(model, quantity, loss_fn=F.cross_entropy):
            F.cross_entropy(model(x), INDEX, reduction=reduction).mean().backward()
    with pytest.raises(ConfigError, match="reduction"):
        collect(model, quantity, loss_fn=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ConfigError, match="reduction"):
        collect(model, quantity, loss_fn=F.cross_entropy, reduction="none")


def test_the_variance_of_batchmean_is_that_of_a_mean() -> None:
    found = []
    for loss_fn, target in ((nn.KLDivLoss(reduction="batchmean"), SOFT + 0.1), (nn.CrossEntropyLoss(), SOFT + 0.1)):
        model, x = _net()
        with collect(model, "variance", loss_fn=loss_fn) as q:
            f = model(x)
            loss_fn(f.log_softmax(1) if isinstance(loss_fn, nn.KLDivLoss) else f, target).backward()
        found.append(q["0.weight"].variance)
    close(*found)


@pytest.mark.entry("F19")
def test_preconditioners_use_the_weights_of_the_squared_error() -> None:
    """Two copies of a row are one row of twice the weight."""
    weight = torch.tensor([2.0, 1.0, 1.0, 1.0]).double()[:, None].expand(N, C)
    rows = torch.tensor([0, 0, 1, 2, 3])
    once = _output_factor(lambda f: _function("mse_loss")(f, REAL, weight=weight))
    close(once, _output_factor(lambda f: F.mse_loss(f, REAL[rows]), rows))


def _output_factor(objective: Objective, rows: Tensor | slice = slice(None)) -> Tensor:
    model, x = _net()
    preconditioner = KFAC(model, fisher="exact", damping=0.1)
    preconditioner.evaluate(lambda: objective(model(x[rows])))
    preconditioner.step()
    return preconditioner.mean_statistics("0.weight")["B"]


@pytest.mark.entry("F19")
@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_preconditioners_count_rows_whose_first_element_has_no_weight(loss_fn: Callable[..., Tensor]) -> None:
    weight = torch.ones(N, C).double()
    weight[:, 0] = 0.0
    found = [_output_factor(functools.partial(loss_fn, target=BINARY, weight=factor * weight,
                                              reduction="sum")) for factor in (1.0, 2.0)]
    close(*found)
    assert float(found[0].abs().sum()) > 0.0


def test_no_third_outcome_of_unusual_shapes() -> None:
    for output, target in ((torch.zeros(N, C), torch.zeros(N, 1)), (torch.zeros(N, 1), torch.zeros(N))):
        model, x = nn.Linear(5, output.shape[1]), torch.randn(N, 5)
        with warnings.catch_warnings():
            # Of torch, about the shapes.
            warnings.simplefilter("ignore")
            with pytest.raises(NgsgdError), collect(model, "diag_ggn", loss_fn=F.mse_loss):
                F.mse_loss(model(x), target).backward()
