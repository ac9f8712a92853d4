"""Natural gradients (F + d I)^-1 g with exact parts of F.

Diagonal, unit-wise, layer-wise or full.

    diagonal    g / (1/R sum_n g_n^2 + d)
    unit-wise   F_o = 1/R sum_n e_no^2 [a; 1][a; 1]^T for each output o
    layer-wise  F = 1/R sum_n vec(g_n) vec(g_n)^T of one layer
    full        the same of all layers together

Source of the unit-wise form: Roux et al. 2008; Ollivier 2015.

Letters: V vectors, N samples, O outputs, I inputs (with the 1 of the bias), D = O I.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngsgd.config.traits import TRAITS
from ngsgd.curvature.forms.grad_forms import DenseInputs, OuterProduct, RowSum
from ngsgd.curvature.forms.memory import empty
from ngsgd.errors import ConfigError
from ngsgd.ops import gemm
from ngsgd.ops.linalg import damped_inverse
from ngsgd.preconditioners.blocks import flat, unflat
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.fisher_recorder import FisherSample, Rows
from ngsgd.preconditioners.options import own_options
from ngsgd.preconditioners.states import GROUPS, Layout, State

# of a dense matrix: 1.6 GB in float32
_MAX_DIMENSION = 20_000
# Key of the statistic of the complete model, under its first weight.
_ALL = "all"


class DiagonalNG(FisherMethod):
    """Diagonal of F; with `fisher="exact"`, of the generalized Gauss-Newton matrix.

    Args:
        model: the module to precondition.
        fisher: "empirical" (default), "mc" (Monte Carlo samples of the targets) or "exact"
            (Gauss-Newton).
        num_draws: Monte Carlo samples per row with "mc". Default 1.
        options: see `Preconditioner`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = DiagonalNG(model, damping=1e-2)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    traits = TRAITS["diagonal"]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, J = self.blocks.sides(name)  # noqa: E741
        shapes: dict[str, tuple[int, ...]] = {"weight": (O, J), **({"bias": (O,)} if I > J else {})}
        return {f"{group}.{key}": shape for group in GROUPS for key, shape in shapes.items()}

    def measure(self, name: str, rows: Rows) -> State:
        return self._squares(rows, None)

    def update_statistics(self, name: str, rows: Rows) -> None:
        known = self.inverses.get(name, {}).get("weight")
        if known is None or rows.a_NTI.shape[1] > 1 or not self.is_passed_on(name):
            super().update_statistics(name, rows)
        elif bool((rows.a_NTI.norm() * rows.e_VNTO.norm()).square().isfinite()):
            # In the memory of the last statistics, because new memory is mapped page by page.
            self.pass_on(name, self._squares(rows, known))
        else:
            self.note_skipped()

    @staticmethod
    def _squares(rows: Rows, memory_OI: Tensor | None) -> State:
        """Return the squares of the weight, over `memory_OI` if there is one position, and of the
        bias.

        The column of ones is separate, so that rows are aligned and as long as those of the
        gradient.
        """
        a_NTI = rows.a_NTI if rows.bias is None else rows.a_NTI[:, :, :-1]
        if a_NTI.shape[1] > 1:
            weight = OuterProduct(DenseInputs(a_NTI), rows.e_VNTO / rows.num_rows**0.5)
            found = {"weight": weight.sum_of_squares().view(rows.e_VNTO.shape[3], -1)}
            return found if rows.bias is None else {**found,
                                                    "bias": RowSum(weight.e_VNTO,
                                                                   weight).sum_of_squares()}
        e2_NO = rows.e_VNTO[:, :, 0].square().sum(dim=0).div_(rows.num_rows)
        memory_OI = empty(e2_NO, e2_NO.shape[1], a_NTI.shape[2]) if memory_OI is None else memory_OI
        found = {"weight": gemm.mm(e2_NO.T, a_NTI[:, 0].square(), out=memory_OI)}
        return found if rows.bias is None else {**found, "bias": e2_NO.sum(dim=0)}

    def invert(self, name: str, known: State) -> State:
        damping = self.option(name, "damping")
        return {key: (value.add_(damping) if self.overwrites else value + damping).reciprocal_() for key, value in known.items()}

    def block_direction(self, name: str, inverse: State, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if "squares" in inverse:
            return super().block_direction(name, inverse, grads)
        block = zip(("weight", "bias"), self.blocks.names(name), strict=False)
        shares = {each: inverse[key].view_as(grads[each]) for key, each in block if each in grads}
        return {each: grads[each].mul_(share) if self.overwrites else grads[each] * share for each, share in shares.items()}


class UnitWiseNG(FisherMethod):
    """Unit-wise F: one I x I matrix for each output unit, O I^2 numbers per layer.

    Args:
        model: the module to precondition.
        fisher, num_draws: see `DiagonalNG`.
        options: see `Preconditioner`.

    Source: Roux et al. 2008; Ollivier 2015.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = UnitWiseNG(model, damping=1e-2)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    traits = TRAITS["unit"]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        return dict.fromkeys(("statistics.F", "inverse.F"), (O, I, I))

    def measure(self, name: str, rows: Rows) -> State:
        O, I = rows.e_VNTO.shape[3], rows.a_NTI.shape[2]  # noqa: E741
        F_OII = rows.a_NTI.new_zeros(O, I, I)
        if rows.a_NTI.shape[1] == 1:
            weight_NO = rows.e_VNTO[:, :, 0].square().sum(dim=0)
            a_NI = rows.a_NTI[:, 0]
            for o in range(O):  # avoids N x O x I floats
                torch.mm((a_NI * weight_NO[:, o, None]).T, a_NI, out=F_OII[o])
        else:
            g_XOI = rows.individual()
            torch.bmm(g_XOI.permute(1, 2, 0), g_XOI.permute(1, 0, 2), out=F_OII)
        return {"F": F_OII / rows.num_rows}

    def invert(self, name: str, known: State) -> State:
        return {"F": damped_inverse(known["F"], self.option(name, "damping"))}

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        return torch.bmm(inverse["F"], g_OI[:, :, None])[:, :, 0]


class LayerWiseNG(FisherMethod):
    """Dense F of each layer, for layers of up to a few thousand parameters.

    Args:
        model: the module to precondition.
        fisher, num_draws: see `DiagonalNG`.
        options: see `Preconditioner`.

    Raises:
        ConfigError: a layer has more than 20 000 parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = LayerWiseNG(model, damping=1e-2)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    traits = TRAITS["layer"]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        return dict.fromkeys(("statistics.F", "inverse.F"), (O * I, O * I))

    def measure(self, name: str, rows: Rows) -> State:
        require_small(name, rows.e_VNTO.shape[3] * rows.a_NTI.shape[2])
        g_XD = rows.individual().flatten(1)
        return {"F": g_XD.T @ g_XD / rows.num_rows}

    def invert(self, name: str, known: State) -> State:
        return {"F": damped_inverse(known["F"], self.option(name, "damping"))}

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        return (inverse["F"] @ g_OI.flatten()).view_as(g_OI)


class FullNG(FisherMethod):
    """Dense F of all affine layers together, for models of up to a few thousand parameters.

    Args:
        model: the module to precondition.
        fisher, num_draws: see `DiagonalNG`.
        options: see `Preconditioner`; layers cannot have a separate damping.

    Raises:
        ConfigError: the model has more than 20 000 parameters.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = FullNG(model, damping=1e-2)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    traits = TRAITS["full"]

    @property
    def is_joint(self) -> bool:
        return True

    def problems(self) -> list[str]:
        found = super().problems()
        if "damping" in own_options(self.layer_options):
            found.append("layers cannot have a separate damping, because all layers are one block; set damping.")
        return found

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return dict.fromkeys(("statistics.all", "inverse.all"), ("d", "d"))

    def update_curvature(self, seen: FisherSample) -> None:
        super().update_curvature(FisherSample({}, seen.squares))
        if not seen.rows:
            return
        rows = list(seen.rows.values())
        require_small("the model", sum(one.e_VNTO.shape[3] * one.a_NTI.shape[2] for one in rows))
        for one in rows:
            self.blocks.bias_of[one.weight] = one.bias
        self.cover(sorted(each for one in rows for each in self.blocks.names(one.weight)))
        g_XD = torch.cat([one.individual().flatten(1) for one in sorted(rows, key=lambda one: one.weight)], dim=1)
        self.average_in(min(seen.rows), {_ALL: g_XD.T @ g_XD / rows[0].num_rows})

    def invert(self, name: str, known: State) -> State:
        return {_ALL: damped_inverse(known[_ALL], self.damping)}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = next((name for name, inverse in self.inverses.items() if _ALL in inverse), None)
        if name is None:
            return super().apply(grads)
        squares = {key: inverse for key, inverse in self.inverses.items() if key != name and key in grads}
        joined = {key: g for key, g in self.blocks.joined(grads).items() if key not in squares and key in self.blocks.bias_of}
        self.require_covered([each for name in joined for each in self.blocks.names(name)])
        found = dict(grads)
        for key, inverse in squares.items():
            found |= self.block_direction(key, inverse, grads)
        for key, direction in unflat(self.inverses[name][_ALL] @ flat(joined), joined).items():
            found |= self.blocks.parted(key, direction, grads)
        return found


def require_small(name: str, dimension: int) -> None:
    """Raise ConfigError for a dense matrix that is too large."""
    if dimension > _MAX_DIMENSION:
        raise ConfigError(f"{name} has {dimension} parameters, whose dense curvature would take "
                          f"{dimension**2 * 4 / 1e9:.0f} GB; choose KFAC, SMWNG or SENG, or skip "
                          "the layer.")
