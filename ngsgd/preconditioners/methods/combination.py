"""Methods that combine a curvature, a representation, a granularity and a solver.

    representation   statistics                           inverse P of C + d I
    dense            F = C                                P g = F g
    kronecker        A of inputs, B of output gradients   B G A, or in the eigenvectors of A and B
    dimensions       A = sum of G^T G, B = sum of G G^T   the same, of C = B (x) A / tr C
    gram, low_rank   U, the vectors or the leading        g / d + U^T K U g, with K = f(G)
                     eigenvectors of C = U^T U, G = U U^T
    element          D = diag C                           D g
    sparse           C of biases, E[s w], E[w^2]          L^T L g: s given all s, w given its s

C = sum of x x^T over samples or minibatches, or the Hessian (ASDL, arXiv 2305.04684, section 3).
Letters: X vectors, O outputs, I inputs (with the 1 of the bias), J without it, D = O I, M rows of
U. Gradients of the bias of an output and of one of its weights are s and w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ngsgd.config.traits import Axes, Traits
from ngsgd.curvature.fisher_rows import FISHERS, FisherSample, Rows
from ngsgd.curvature.forms.grad_forms import DenseInputs, OuterProduct, RowSum
from ngsgd.curvature.forms.kronecker import add_gram, output_rows
from ngsgd.ops import gemm
from ngsgd.ops.linalg import damped_inverse, eigh, shared_damping
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.blocks import flat, require_small, unflat
from ngsgd.preconditioners.estimates import is_finite
from ngsgd.preconditioners.factored_grad import products_of
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.methods.second_derivatives import SecondOrderMethod
from ngsgd.preconditioners.states import Layout, State

# rows of a layer, or one vector as a matrix O x I
Seen = Rows | Tensor
# Columns of a dense Hessian, each of which is a product.
_MAX_COLUMNS = 2_000
# Below, all vectors are zero.
_MIN_TRACE = 1e-30


class Representation(NamedTuple):
    """Shapes of statistics and inverse in letters (m: any), how C is measured, how P is applied."""

    statistics: Mapping[str, str]
    inverse: Mapping[str, str]
    measure: Callable[[Seen], State]
    # (inverse, gradient O x I, d) -> P g in any shape
    direction: Callable[[State, Tensor, float], Tensor]


def _dense(seen: Seen, of_units: bool = False) -> State:
    if not of_units:
        x_XD = _vectors(seen).flatten(1)
        return {"F": x_XD.T @ x_XD / _num_rows(seen)}
    if isinstance(seen, Tensor) or seen.a_NTI.shape[1] > 1:
        x_XOI = _vectors(seen)
        return {"F": torch.bmm(x_XOI.permute(1, 2, 0), x_XOI.permute(1, 0, 2)) / _num_rows(seen)}
    weight_NO, a_NI = seen.e_VNTO[:, :, 0].square().sum(dim=0), seen.a_NTI[:, 0]
    F_OII = a_NI.new_zeros(weight_NO.shape[1], a_NI.shape[1], a_NI.shape[1])
    for o, F_II in enumerate(F_OII):  # avoids N x O x I floats
        torch.mm((a_NI * weight_NO[:, o, None]).T, a_NI, out=F_II)
    return {"F": F_OII / seen.num_rows}


def _factors(seen: Seen, of_rows: bool = False) -> State:
    if isinstance(seen, Rows) and of_rows:
        found = {}
        for key, x_XD, scale in sides_of(seen):
            found[key] = x_XD.new_empty(x_XD.shape[1], x_XD.shape[1])
            add_gram(x_XD, found[key], keep=0.0, scale=scale)
        return found
    if isinstance(seen, Rows) and seen.a_NTI.shape[1] == 1:
        # of e a^T: |e|^2 a a^T and |a|^2 e e^T
        a_NI, e_VNO = seen.a_NTI[:, 0], seen.e_VNTO[:, :, 0]
        right_XI = a_NI * e_VNO.square().sum(dim=(0, 2)).sqrt()[:, None]
        left_XO = (e_VNO * a_NI.norm(dim=1)[:, None]).flatten(0, 1)
    else:
        right_XI, left_XO = _vectors(seen).flatten(0, 1), _vectors(seen).transpose(1, 2).flatten(0, 1)
    return {"A": products_of(right_XI.T) / _num_rows(seen), "B": products_of(left_XO.T) / _num_rows(seen)}


def sides_of(rows: Rows) -> tuple[tuple[str, Tensor, float], tuple[str, Tensor, float]]:
    """Return (factor, rows, weight of their squares) of both sides of a layer."""
    a_XI = rows.a_NTI.flatten(0, 1)
    return ("A", a_XI, 1.0 / len(a_XI)), ("B", output_rows(rows.e_VNTO, "expand"), 1.0 / rows.num_rows)


def _squares(seen: Seen) -> State:
    if isinstance(seen, Tensor):
        return {"D": seen.square()}
    # without the ones, so that rows are aligned
    a_NTI = seen.a_NTI if seen.bias is None else seen.a_NTI[:, :, :-1]
    if a_NTI.shape[1] > 1:
        each = OuterProduct(DenseInputs(a_NTI), seen.e_VNTO / seen.num_rows**0.5)
        weight_OI, bias_O = each.sum_of_squares(), RowSum(each.e_VNTO).sum_of_squares()
    else:
        e2_NO = seen.e_VNTO[:, :, 0].square().sum(dim=0).div_(seen.num_rows)
        weight_OI, bias_O = gemm.mm(e2_NO.T, a_NTI[:, 0].square()), e2_NO.sum(dim=0)
    weight_OI = weight_OI.view(len(bias_O), -1)
    return {"D": weight_OI if seen.bias is None else torch.cat([weight_OI, bias_O[:, None]], dim=1)}


def _regressions(seen: Seen) -> State:
    # without a bias a weight depends on no other
    if isinstance(seen, Tensor) or seen.bias is None:
        return {"W": _squares(seen)["D"]}
    if seen.a_NTI.shape[1] == 1:
        a_XJ, e_XO = seen.a_NTI[:, 0, :-1].repeat(len(seen.e_VNTO), 1), seen.e_VNTO.flatten(0, 2)
        squares_OX = e_XO.square().T
        moments = gemm.mm(squares_OX, a_XJ), gemm.mm(squares_OX, a_XJ.square())
    else:
        g_XOI = seen.individual()
        e_XO, w_XOJ = g_XOI[..., -1], g_XOI[..., :-1]
        moments = (e_XO[..., None] * w_XOJ).sum(dim=0), w_XOJ.square().sum(dim=0)
    found = {"C": gemm.mm(e_XO.T, e_XO), "X": moments[0], "W": moments[1]}
    return {key: value / seen.num_rows for key, value in found.items()}


def _triangular(known: State, damping: float, root: bool, overwrite: bool) -> State:
    if "C" not in known:
        return {"W": _inverses(known["W"], damping, False)}
    variance_O1 = known["C"].diagonal()[:, None] + damping
    slope_OJ = known["X"] / variance_O1
    residual_OJ = (known["W"] + damping - slope_OJ * known["X"]).clamp(min=damping)
    return {"P": damped_inverse(known["C"], damping), "slope": slope_OJ, "W": residual_OJ.reciprocal()}


def _ancestral(inverse: State, g_OI: Tensor, damping: float) -> Tensor:
    if "slope" not in inverse:
        return g_OI * inverse["W"]
    g_O, slope_OJ = g_OI[:, -1], inverse["slope"]
    # the part of a weight that its bias does not explain, then the rest of the biases
    w_OJ = (g_OI[:, :-1] - slope_OJ * g_O[:, None]) * inverse["W"]
    bias_O = inverse["P"] @ g_O - (slope_OJ * w_OJ).sum(dim=1)
    return torch.cat([w_OJ, bias_O[:, None]], dim=1)


def _sandwich(inverse: State, g_OI: Tensor, damping: float) -> Tensor:
    if "B" in inverse:
        return gemm.mm(gemm.mm(inverse["B"], g_OI), inverse["A"])
    U_A, U_B = inverse["U_A"], inverse["U_B"]
    return gemm.mm(gemm.mm(U_B, gemm.mm(gemm.mm(U_B.T, g_OI), U_A) * inverse["S"]), U_A.T)


_FACTORS = {"A": "II", "B": "OO"}
_OF_FACTORS = {"A?": "II", "B?": "OO", "U_A?": "II", "U_B?": "OO", "S?": "OI", "weight?*": ""}
_MATRIX = Representation({"F": "DD"}, {"F": "DD"}, _dense, lambda inverse, g, damping: inverse["F"] @ g.flatten())
_LOW_RANK = Representation(
    {"U": "mD", "G": "mm"}, {"U": "mD", "K": "mm"}, lambda seen: {"U": _vectors(seen).flatten(1) / _num_rows(seen) ** 0.5},
    lambda inverse, g, damping: g.flatten() / damping + inverse["U"].T @ (inverse["K"] @ (inverse["U"] @ g.flatten())))
_OF_UNITS = Representation(
    {"U": "OmI", "G": "Omm"}, {"U": "OmI", "K": "Omm"},
    lambda seen: {"U": _vectors(seen).transpose(0, 1) / _num_rows(seen) ** 0.5},
    lambda inverse, g, damping: g / damping + torch.einsum(
        "omi,omn,onj,oj->oi", inverse["U"], inverse["K"], inverse["U"], g))
_SPARSE = Representation({"C": "OO", "X": "OJ", "W": "OJ"}, {"P": "OO", "slope": "OJ", "W": "OJ"}, _regressions, _ancestral)
# by representation and granularity
FORMS: Mapping[tuple[str, str], Representation] = {
    ("dense", "full"): _MATRIX, ("dense", "layer"): _MATRIX,
    ("dense", "unit"): Representation({"F": "OII"}, {"F": "OII"}, partial(_dense, of_units=True),
                                      lambda inverse, g, _: torch.bmm(inverse["F"], g[:, :, None])),
    ("kronecker", "layer"): Representation(_FACTORS, _OF_FACTORS, partial(_factors, of_rows=True), _sandwich),
    ("dimensions", "layer"): Representation(_FACTORS, _OF_FACTORS, _factors, _sandwich),
    **{(form, granularity): _LOW_RANK for form in ("gram", "low_rank") for granularity in ("full", "layer")},
    ("low_rank", "unit"): _OF_UNITS, ("sparse", "layer"): _SPARSE,
    ("element", "element"): Representation({"D": "OI"}, {"D": "OI"}, _squares, lambda inverse, g, _: g * inverse["D"])}


def _eigen(known: State, damping: float, root: bool, overwrite: bool) -> State:
    if "F" in known:
        values, U = eigh(known["F"])
        return {"F": (U * _inverses(values, damping, root)[..., None, :]) @ U.mT}
    (values_A, U_A), (values_B, U_B) = eigh(known["A"]), eigh(known["B"])
    return {"U_A": U_A, "U_B": U_B, "S": _inverses(torch.outer(values_B, values_A), damping, root)}


def _factored(known: State, damping: float, root: bool, overwrite: bool) -> State:
    of_B, of_A = shared_damping(known["B"], known["A"], damping)
    return {"A": damped_inverse(known["A"], of_A, overwrite=overwrite), "B": damped_inverse(known["B"], of_B, overwrite=overwrite)}


def _gram_eigen(known: State, damping: float, root: bool, overwrite: bool) -> State:
    values_M, V_MM = eigh(known["G"])
    # Smaller ones are rounding noise.
    is_known_M = values_M > values_M[..., -1:] * values_M.shape[-1] * torch.finfo(values_M.dtype).eps
    change_M = torch.where(is_known_M, (_inverses(values_M, damping, root) - 1.0 / damping) / values_M, 0.0)
    return {"U": known["U"], "K": (V_MM * change_M[..., None, :]) @ V_MM.mT}


# (statistics of C or C^2, d, whether of C^2, may be overwritten) -> (C + d I)^-1
SOLVERS: Mapping[tuple[str, str], Callable[[State, float, bool, bool], State]] = {
    ("dense", "cholesky"): lambda known, damping, root, _: {"F": damped_inverse(known["F"], damping)}, ("dense", "eigen"): _eigen,
    ("kronecker", "cholesky"): _factored, ("kronecker", "eigen"): _eigen,
    ("dimensions", "cholesky"): lambda known, damping, root, _: _factored(_normalized(known), damping, root, True),
    ("dimensions", "eigen"): lambda known, damping, root, _: _eigen(_normalized(known), damping, root, True),
    **dict.fromkeys((("gram", "smw"), ("low_rank", "smw")), lambda known, damping, root, _: {
        "U": known["U"], "K": damped_inverse(known["G"], damping) / -damping}),
    **dict.fromkeys((("gram", "eigen"), ("low_rank", "eigen")), _gram_eigen),
    ("sparse", "cholesky"): _triangular,
    ("element", "division"): lambda known, damping, root, _: {"D": _inverses(known["D"], damping, root)}}


def _inverses(values: Tensor, damping: float, root: bool) -> Tensor:
    size = values.abs()
    return ((size.sqrt() if root else size) + damping).reciprocal()


def _normalized(known: State) -> State:
    """Return factors of C: both have its trace, which counts once."""
    root = known["B"].trace().clamp(min=_MIN_TRACE).sqrt()
    return {key: factor / root for key, factor in known.items()}


def _vectors(seen: Seen) -> Tensor:
    return seen[None] if isinstance(seen, Tensor) else seen.individual()


def _num_rows(seen: Seen) -> int:
    return 1 if isinstance(seen, Tensor) else seen.num_rows


def _matrix(g: Tensor) -> Tensor:
    return g.flatten(1) if g.ndim > 1 else g.reshape(-1, 1)


_OF_GRADIENTS = ("dense", "dimensions", "gram", "low_rank", "element")
# representations by curvature, and why there are no others
CURVATURES: Mapping[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(FISHERS, ((*_OF_GRADIENTS, "kronecker", "sparse"), "")),
    "moment": (_OF_GRADIENTS, ", because gradients have no rows of inputs"),
    "root_moment": (("dense", "gram", "low_rank", "element"), "; Shampoo has roots of dimensions"),
    "hessian": (("element",), ", because its matrix may be indefinite; use \"absolute\""),
    "absolute": (("dense", "element"), ", because it needs eigenvalues or products")}


def problems_of(axes: Axes) -> list[str]:
    """Return why four choices are no method; empty if they are one."""
    curvature, form, granularity, solver = axes
    if curvature not in CURVATURES:
        return [f"curvature is {curvature!r}; choose {', '.join(CURVATURES)}."]
    forms, reason = CURVATURES[curvature]
    if form not in forms:
        return [f"representation is {form!r}; curvature={curvature!r} needs {' or '.join(forms)}{reason}."]
    # Others compute neither absolute values nor roots; more products would be needed.
    solvers = [one for known, one in SOLVERS if known == form
               and not (curvature in ("absolute", "root_moment") and one in ("cholesky", "smw"))]
    granularities = [one for known, one in FORMS if known == form and not (curvature == "absolute" and one in ("unit", "full"))]
    return [f"{name} is {value!r}; {curvature!r} as {form!r} needs {' or '.join(known)}." for name, value, known
            in (("solver", solver, solvers), ("granularity", granularity, granularities)) if value not in known]


class Combination(Preconditioner):
    """Base of methods whose `traits.axes` name the parts."""

    # of "gram" and "low_rank"; 0: the vectors of one minibatch
    rank = 0

    @property
    def form(self) -> Representation:
        """The representation."""
        axes = self.traits.axes
        return FORMS[axes.representation, axes.granularity]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, J = self.blocks.sides(name)  # noqa: E741
        sizes = {"O": O, "I": I, "J": J, "D": "d" if self.is_joint else O * I, "m": "m"}
        return {f"{group}.{key}": [sizes[letter] for letter in shape] for group, shapes
                in (("statistics", self.form.statistics), ("inverse", self.form.inverse)) for key, shape in shapes.items()
                # without a bias "sparse" has the last one alone
                if self.form is not _SPARSE or I > J or key == "W"}

    def measure(self, name: str, seen: Any) -> State:
        if self.form is _MATRIX:
            require_small("the model" if self.is_joint else name, seen.numel() if isinstance(seen, Tensor)
                          else seen.e_VNTO.shape[3] * seen.a_NTI.shape[2])
        return self.form.measure(_matrix(seen) if isinstance(seen, Tensor) else seen)

    def update_curvature(self, seen: Any) -> None:
        if not self.is_joint:
            super().update_curvature(seen)
        elif not isinstance(seen, FisherSample):
            g_D = torch.cat([g.flatten() for _, g in sorted(self.blocks.joined(seen).items())])
            self.cover(sorted(seen))
            self.average_in(min(seen), self.measure("", g_D[None]))
        else:
            super().update_curvature(FisherSample({}, seen.squares))
            self.blocks.bias_of |= {name: rows.bias for name, rows in seen.rows.items()}
            if self.form is _MATRIX:
                require_small("the model", sum(rows.e_VNTO.shape[3] * rows.a_NTI.shape[2] for rows in seen.rows.values()))
            if seen.rows:
                self.cover(sorted(each for name in seen.rows for each in self.blocks.names(name)))
                g_XD = torch.cat([rows.individual().flatten(1) for _, rows in sorted(seen.rows.items())], dim=1)
                joint = Rows("", None, g_XD[:, None], g_XD.new_ones(1, len(g_XD), 1, 1), seen.num_rows)
                self.average_in(min(seen.rows), self.measure("", joint))

    def average_in(self, name: str, new: State) -> None:
        if "U" not in new or not is_finite(new):
            super().average_in(name, new)
            return
        # Without a decay all updates have the same weight.
        decay, rank = self.option(name, "ema_decay"), self.rank
        keep, share = (decay, 1.0 - decay) if decay and rank else (1.0, 1.0)
        U_MD, weight = new["U"] * share**0.5, share
        times = gemm.mm if U_MD.ndim == 2 else torch.bmm
        if rank and name in self.statistics:
            U_MD = torch.cat([self.statistics[name]["U"] * keep**0.5, U_MD], dim=-2)
            weight += keep * self.statistics.weights[name]
        if self.traits.axes.representation == "low_rank":
            if U_MD.shape[-2] >= 2 * rank:
                U_MD = times(eigh(times(U_MD, U_MD.mT))[1][..., -rank:].mT, U_MD)
        elif 0 < rank < len(U_MD):
            U_MD, weight = U_MD[-rank:].clone(), 1.0 - decay**rank if decay else float(rank)
        self.statistics.put(name, {"U": U_MD, "G": times(U_MD, U_MD.mT)}, weight)

    def mean_statistics(self, name: str) -> State:
        known, weight = self.statistics[name], self.statistics.weights[name]
        return {"U": known["U"] / weight**0.5, "G": known["G"] / weight} if "U" in known else super().mean_statistics(name)

    def invert(self, name: str, known: State) -> State:
        axes = self.traits.axes
        # The diagonal of a Hessian is the root of mean squares.
        has_squares = axes.curvature == "root_moment" or (axes.curvature in ("hessian", "absolute") and "D" in known)
        return SOLVERS[axes.representation, axes.solver](known, self.option(name, "damping"), has_squares, self.overwrites)

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return (inverse["B"], inverse["A"]) if "B" in inverse else None

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        return self.form.direction(inverse, _matrix(g_OI), self.option(name, "damping")).view_as(g_OI)

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        key = next((name for name, inverse in self.inverses.items() if "squares" not in inverse), None) if self.is_joint else None
        if key is None:
            return super().apply(grads)
        found, squares = dict(grads), {name for name in self.inverses if name != key and name in grads}
        joined = {name: g for name, g in sorted(self.blocks.joined(grads).items())
                  if name not in squares and (not self.traits.fisher or name in self.blocks.bias_of)}
        self.require_covered([each for name in joined for each in self.blocks.names(name)])
        for name in squares:
            found |= self.block_direction(name, self.inverses[name], grads)
        for name, direction in unflat(self.direction(key, self.inverses[key], flat(joined)), joined).items():
            found |= self.blocks.parted(name, direction, grads)
        return found


class ProductCombination(Combination, SecondOrderMethod):
    """Combinations of the Hessian: its columns, or products with random vectors."""

    def update_curvature(self, seen: Any) -> None:
        if self.traits.axes.representation == "element":
            has_signs = self.traits.axes.curvature == "hessian"
            z = self.drawn(seen, signs=has_signs)
            h = self.product("hessian", z, is_last=True)
            if has_signs:
                h = {name: z[name] * each for name, each in h.items()}
                # the positions of a kernel have one number
                h = {name: each if each.ndim < 3 else each.mean(dim=tuple(range(2, each.ndim)), keepdim=True).expand_as(each)
                     for name, each in h.items()}
            for name, each in self.blocks.joined(h).items():
                self.average_in(name, self.measure(name, each))
            return
        for name in self.blocks.weights_of(seen.keys()):
            own = {each: seen[each] for each in self.blocks.names(name)}
            g_OI = self.blocks.joined_one(name, own)
            require_small(name, g_OI.numel(), _MAX_COLUMNS, "ESGD, HessianFree or PSGD")
            columns = [self.product("hessian", self.blocks.parted(name, unit_D.view_as(g_OI), own))
                       for unit_D in torch.eye(g_OI.numel(), dtype=g_OI.dtype, device=g_OI.device)]
            H_DD = torch.stack([self.blocks.joined_one(name, column).flatten() for column in columns])
            self.average_in(name, {"F": 0.5 * (H_DD + H_DD.T)})


class Method(Combination):
    """A custom combination; docs/preconditioners.md lists those that have a name.

    Args:
        curvature: "empirical", "mc" or "exact" (Gauss-Newton) Fisher matrix; "moment", mean of g
            g^T of minibatches, or "root_moment", its root; "hessian", or "absolute", |H|.
        representation: "dense", "kronecker" (inputs and outputs), "dimensions" (of the gradient),
            "gram" (vectors), "low_rank" (eigenvectors), "sparse" (weights given their bias) or
            "element" (diagonal).
        granularity: block: "full" (model), "layer", "unit" (output) or "element".
        solver: "cholesky", "eigen", "smw" or "division".
        rank: vectors of "gram" of minibatches, eigenvectors of "low_rank"; 0 (default) for others.
        options: see `Preconditioner`, and the named method of the same curvature.

    Raises:
        ConfigError: the choices do not fit together, with the reason.
    """

    curvature: str
    representation: str
    granularity: str
    solver: str
    rank: int = 0

    def __new__(cls, *_: Any, curvature: str = "", **_given: Any) -> Method:
        """Choose the class by the source of the curvature."""
        if cls is Method:
            return object.__new__(_OfRows if curvature in FISHERS else _OfProducts if curvature in ("hessian", "absolute") else cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        axes = Axes(self.curvature, self.representation, self.granularity, self.solver)
        self.title = f"Method({', '.join(axes)})"
        of_rows, has_mean = isinstance(self, FisherMethod), self.representation not in ("gram", "low_rank")
        self.traits = Traits(axes, fisher="any" if of_rows else "", has_mean=has_mean,  # type: ignore[misc]
                             measures_rows_only=of_rows, splits_work=of_rows and has_mean and self.granularity != "full",
                             agrees_over_ranks="moment" in self.curvature)
        super().__post_init__()

    def problems(self) -> list[str]:
        return [*super().problems(), *problems_of(self.traits.axes)]


class _OfRows(Method, FisherMethod):
    fisher: ClassVar[str]  # type: ignore[misc]

    def __post_init__(self) -> None:
        self.fisher = self.curvature  # type: ignore[misc]
        super().__post_init__()


class _OfProducts(Method, ProductCombination):
    pass
