"""Methods of every curvature, representation, granularity and solver, against dense matrices."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.config.traits import Axes
from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.preconditioners import KFAC, METHODS, SMWNG, LayerWiseNG, Method, Preconditioner
from ngsgd.preconditioners.methods.combination import CURVATURES, FORMS, problems_of
from tests.preconditioners.problems import NAMES, Problem, at_step, close, gradients_of, joint, order_of, problem, step_of
from tests.reference import combinations as dense
from tests.reference import quasi_newton
from tests.reference.preconditioners import individual

GRANULARITIES = ("full", "layer", "unit", "element")
SOLVERS = ("cholesky", "eigen", "smw", "division")
REPRESENTATIONS = dict.fromkeys(form for form, _ in FORMS)
ALL = [Axes(*choices) for choices in itertools.product(CURVATURES, REPRESENTATIONS, GRANULARITIES, SOLVERS)]
COMBINATIONS = [axes for axes in ALL if not problems_of(axes)]
ROWS = ("empirical", "mc", "exact")
D, RANK = 0.3, 40


def _made(model: nn.Module, axes: Axes, **given: Any) -> Method:
    needs = axes.representation == "low_rank" or (axes.representation == "gram" and axes.curvature not in ROWS)
    options: dict[str, Any] = {**axes._asdict(), "damping": D, "rank": RANK if needs else 0, **given}
    return Method(model, **options)


def _names(case: Problem, axes: Axes) -> list[list[str]]:
    """Parameters of each block, in the order of the flattened block."""
    layers = [[name for name in (f"{layer}.weight", f"{layer}.bias") if name in dict(case.model.named_parameters())]
              for layer in ("0", "2")]
    return [layers[0] + layers[1]] if axes.granularity == "full" else layers


def _curvature(case: Problem, axes: Axes, names: list[str], g: Tensor) -> Tensor:
    """The dense matrix of a block."""
    if axes.curvature in ("moment", "root_moment"):
        return torch.outer(g, g)
    if axes.curvature in ROWS:
        parts = [individual(a, e) for layer, a, e in case.layers(exact=axes.curvature == "exact")
                 if any(name.startswith(layer) for name in names)]
        U = torch.cat(parts, dim=1)
        return U.T @ U / case.num_rows
    order = order_of(case, names)
    return quasi_newton.hessian(case.model, case.loss, case.x)[order][:, order]


def _wanted(case: Problem, axes: Axes, names: list[str], plain: Mapping[str, Tensor]) -> Tensor:
    layers = sorted({name[0] for name in names})
    G = joint(dict(plain), layers[0])
    g = torch.cat([joint(dict(plain), layer).flatten() for layer in layers])
    if axes.representation in ("kronecker", "dimensions"):
        if axes.curvature in ROWS:
            a, e = next((a, e) for layer, a, e in case.layers(exact=axes.curvature == "exact") if layer == layers[0])
            return dense.of_rows(a, e, G, axes.representation, axes.solver, D, case.num_rows).flatten()
        A, B = dense.dimensions([G], 1)
        product = torch.kron(B.contiguous(), A.contiguous())
        return (dense.factored(A, B, G, D) if axes.solver == "cholesky" else dense.solved(product, G, D)).flatten()
    C = _curvature(case, axes, names, g)
    if axes.representation == "sparse":
        return dense.sparse(C, g, len(G), D)
    C = dense.represented(C, axes.representation, axes.granularity, len(G))
    if axes.curvature in ("root_moment", "absolute"):
        C = dense.of_eigenvalues(C, 0.5 if axes.curvature == "root_moment" else 1.0)
    return dense.solved(C, g, D)


# random vectors: see the tests of AdaHessian and EquilibratedSGD, and of "mc"
@pytest.mark.parametrize("name", ["linear", "conv frames"])
@pytest.mark.parametrize("axes", [axes for axes in COMBINATIONS if axes.curvature != "mc" and not (
    axes.curvature in ("hessian", "absolute") and axes.representation == "element")], ids="-".join)
def test_every_combination_equals_its_dense_matrix(axes: Axes, name: str) -> None:
    # "sparse" needs biases
    case = problem("linear" if axes.representation == "sparse" else name)
    plain = case.gradients()
    found = case.preconditioned(_made(case.model, axes))
    for names in _names(case, axes):
        own = torch.cat([joint(found, layer).flatten() for layer in sorted({name[0] for name in names})])
        torch.testing.assert_close(own, _wanted(case, axes, names, plain), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("axes", COMBINATIONS, ids="-".join)
def test_every_combination_takes_vectors_and_tensors_of_other_layers(axes: Axes) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(),
                          nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    preconditioner = _made(model, axes)
    preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(x), y))
    plain = gradients_of(model)
    preconditioner.step()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()) and not torch.equal(p.grad, plain[name])


@pytest.mark.parametrize(("axes", "named"), [
    (Axes("mc", "kronecker", "layer", "cholesky"), KFAC), (Axes("mc", "dense", "layer", "cholesky"), LayerWiseNG),
    (Axes("mc", "gram", "full", "smw"), partial(SMWNG))])
def test_a_combination_that_has_a_name_equals_it(axes: Axes, named: Callable[..., Preconditioner]) -> None:
    case = problem("conv frames")
    options = {"ema_decay": 0.0, "num_draws": 2, "seed": 5, "damping": D}
    wanted = case.preconditioned(named(case.model, fisher="mc", **options))
    for key, value in case.preconditioned(_made(case.model, axes, **options)).items():
        close(value, wanted[key])


def test_all_other_combinations_are_refused_with_a_reason() -> None:
    model = nn.Linear(4, 3)
    for axes in ALL:
        if axes in COMBINATIONS:
            _made(model, axes)
            continue
        with pytest.raises(ConfigError, match=r"choose|needs"):
            _made(model, axes)
    for options, words in (({"rank": 3}, "rank is 3"), ({"num_draws": 2}, "num_draws")):
        with pytest.raises(ConfigError, match=words):
            _made(model, Axes("exact", "dense", "layer", "cholesky"), **options)
    with pytest.raises(ConfigError, match="curvature is 'newton'"):
        Method(model, curvature="newton", representation="dense", granularity="full", solver="eigen")


@pytest.mark.parametrize("axes", COMBINATIONS[::4], ids="-".join)
def test_a_combination_resumes_bitwise_and_refuses_the_state_of_another(axes: Axes) -> None:
    case, other = problem("linear"), problem("linear")
    own, resumed = _made(case.model, axes), _made(other.model, axes)
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(own.state_dict())
            other.model.load_state_dict(case.model.state_dict())
            resumed = pickle.loads(pickle.dumps(copy.deepcopy(resumed)))
            other = other._replace(model=resumed.model)
        step_of(own, case, step)
        if step >= 2:
            step_of(resumed, other, step)
    for p, wanted in zip(other.model.parameters(), case.model.parameters(), strict=True):
        assert torch.equal(p, wanted)
    another = next(each for each in COMBINATIONS if each != axes)
    with pytest.raises(OptimizerStateError):
        _made(case.model, another).load_state_dict(own.state_dict())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["mfac", "ggt", "tonga", "tonga_unit", "sfn", "esgd", "adahessian", "tnt"])
def test_named_methods_equal_their_formula_over_20_steps(kind: str, name: str) -> None:
    case, decay, rank = problem(name), 0.8, 6
    options: dict[str, Any] = {"damping": D}
    if kind in ("mfac", "ggt", "tonga", "tonga_unit"):
        options |= {"rank": rank, "ema_decay": decay if kind.startswith("tonga") else 0.0}
    else:
        options |= {"ema_decay": decay}
    preconditioner = METHODS[kind](case.model, **options, **({"fisher": "exact"} if kind == "tnt" else {}))
    draws = _draws(preconditioner) if kind in ("esgd", "adahessian") else []
    blocks = _names(case, Axes(granularity="full" if kind in ("mfac", "ggt") else "layer"))
    past: dict[int, list[Any]] = {index: [] for index in range(len(blocks))}
    for step in range(20):
        now = case._replace(x=at_step(case, step))
        plain = now.gradients()
        wanted: list[Callable[[], Tensor]] = []
        for index, names in enumerate(blocks):
            layers = sorted({each[0] for each in names})
            g = torch.cat([joint(plain, layer).flatten() for layer in layers])
            past[index].append(_measured(kind, now, names, layers, g))
            wanted.append(partial(_formula, kind, case, names, g, past[index], draws, decay, rank))
        found = step_of(preconditioner, case, step)
        for names, formula in zip(blocks, wanted, strict=True):
            own = torch.cat([joint(found, layer).flatten() for layer in sorted({each[0] for each in names})])
            torch.testing.assert_close(own, formula(), rtol=1e-6, atol=1e-9)


def _draws(preconditioner: Any) -> list[dict[str, Tensor]]:
    """The random vectors of all steps to come."""
    seen: list[dict[str, Tensor]] = []
    original = preconditioner.drawn

    def drawn(grads: Mapping[str, Tensor], *, signs: bool = False) -> dict[str, Tensor]:
        found: dict[str, Tensor] = original(grads, signs=signs)
        seen.append(dict(found))
        return found
    preconditioner.drawn = drawn
    return seen


def _measured(kind: str, now: Problem, names: list[str], layers: list[str], g: Tensor) -> Any:
    if kind in ("mfac", "ggt", "tonga", "tonga_unit"):
        return g
    if kind == "tnt":
        a, e = next((a, e) for layer, a, e in now.layers(exact=True) if layer == layers[0])
        rows = [row.view(e.shape[3], -1) for row in individual(a, e)]
        return torch.stack([G.T @ G for G in rows]).sum(dim=0) / now.num_rows, torch.stack([G @ G.T for G in rows]).sum(
            dim=0) / now.num_rows
    H, order = quasi_newton.hessian(now.model, now.loss, now.x), order_of(now, names)
    # rows of the block, and all columns where a product with a vector of the model is needed
    return H[order] if kind in ("esgd", "adahessian") else H[order][:, order]


def _formula(kind: str, case: Problem, names: list[str], g: Tensor, past: list[Any], draws: list[dict[str, Tensor]],
             decay: float, rank: int) -> Tensor:
    if kind == "tonga":
        return dense.solved(dense.tonga(past, decay, rank), g, D)
    if kind == "tonga_unit":
        num_outputs = len(case.model.get_parameter(names[0]))
        units = [[each.view(num_outputs, -1)[o] for each in past] for o in range(num_outputs)]
        return torch.cat([dense.solved(dense.tonga(own, decay, rank), own[-1], D) for own in units])
    if kind in ("mfac", "ggt"):
        C = dense.averaged([torch.outer(each, each) for each in past], 0.0, last=rank)
        return dense.solved(C if kind == "mfac" else dense.of_eigenvalues(C, 0.5), g, D)
    if kind == "sfn":
        return dense.solved(dense.of_eigenvalues(dense.averaged(past, decay), 1.0), g, D)
    if kind == "tnt":
        A, B = (dense.averaged([each[side] for each in past], decay) for side in (0, 1))
        c = float(B.trace())
        return dense.factored(A / c**0.5, B / c**0.5, g.view(len(B), len(A)), D).flatten()
    squares = []
    for H, z in zip(past, draws, strict=True):
        h = H @ quasi_newton.flat(z)
        if kind == "adahessian":
            h = _over_taps(case, names, quasi_newton.flat(z)[order_of(case, names)] * h)
        squares.append(h.square())
    return g / (dense.averaged(squares, decay).sqrt() + D)


def _over_taps(case: Problem, names: list[str], d: Tensor) -> Tensor:
    """The mean over the positions of a kernel, of a layer's block in rows with the bias last."""
    p = case.model.get_parameter(names[0])
    if p.ndim < 3:
        return d
    rows = d.view(len(p), -1)
    weight = rows[:, :p[0].numel()].view(*p.shape).mean(dim=2, keepdim=True).expand(p.shape).reshape(len(p), -1)
    return torch.cat([weight, rows[:, p[0].numel():]], dim=1).flatten()


def test_layers_that_are_too_large_for_a_dense_hessian_are_refused() -> None:
    model = nn.Linear(60, 40)
    preconditioner = METHODS["sfn"](model)
    preconditioner.evaluate(lambda: nn.functional.cross_entropy(model(torch.ones(2, 60)), torch.tensor([0, 1])))
    with pytest.raises(ConfigError, match="2440 parameters"):
        preconditioner.step()
