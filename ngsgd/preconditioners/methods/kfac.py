"""Kronecker-factored natural gradients: F of an affine layer is about B (x) A (outputs, inputs).

    K-FAC   (B + sqrt(d)/pi I)^-1 G (A + pi sqrt(d) I)^-1,  pi^2 = (tr A / dim A) / (tr B / dim B)
    SKFAC   the same for one minibatch, through N x N matrices
    EKFAC   U_B [(U_B^T G U_A) / (S + d)] U_A^T,  S_ij = 1/R sum_n (U_B^T G_n U_A)_ij^2
    KFRA    as K-FAC, B by a recursion from the output: B <- W^T B W, and the mean of each operation
    TNT     as K-FAC, with A = 1/R sum_n G_n^T G_n and B = 1/R sum_n G_n G_n^T, each over root of trace

Letters: N samples, T positions, X rows, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ngsgd.curvature.fisher_rows import FisherSample, Rows
from ngsgd.curvature.forms.kronecker import add_gram
from ngsgd.ops import gemm
from ngsgd.ops.linalg import damped_cholesky, damped_inverse, eigh, split_damping, woodbury_rows
from ngsgd.preconditioners.factored_grad import FactoredGrad
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.methods.combination import Combination, sides_of
from ngsgd.preconditioners.states import GROUPS, Layout, State

# Factor that belongs to the rows of a side.
_FACTOR = {"a": "A", "e": "B"}


class KFAC(Combination, FisherMethod, kind="kfac"):
    """K-FAC (Martens and Grosse 2015); with `fisher="exact"` the factors are those of KFLR.

    P g equals (F + damping I)^-1 g, up to the factored damping, if B or A is constant over samples.
    Otherwise it is an approximation.

    Args:
        sharing: positions of a sample are independent ("expand", default) or belong to one target
            ("reduce").
        fisher, num_draws: see `FisherMethod`.
        options: see `Preconditioner`.
    """

    sharing: str = "expand"

    def measure(self, name: str, rows: Rows) -> State:
        return super().measure(name, rows.shared(self.sharing))

    def update_statistics(self, name: str, rows: Rows) -> None:
        known, decay = self.statistics.get(name), self.option(name, "ema_decay")
        if type(self).measure is not KFAC.measure or known is None or not decay:
            super().update_statistics(name, rows)
            return
        sides = sides_of(rows.shared(self.sharing))
        # The trace bounds all products.
        if not all(bool(x_XD.square().sum().isfinite()) for _, x_XD, _ in sides):
            self.note_skipped()
            return
        # Add products directly to the averages, to avoid a second copy of the factors.
        for key, x_XD, scale in sides:
            add_gram(x_XD, known[key], keep=decay, scale=(1.0 - decay) * scale)
        self.statistics.decayed(name, decay)


class KFRA(KFAC, kind="kfra"):
    """K-FAC with the output factors of a recursion over averages (Botev et al. 2017).

    It needs one matrix for each operation, not a vector for each class. ConfigError if the network
    is not a chain of operations, or for a layer without factors: name it in skip.

    Options: see `KFAC`.
    """

    fisher: ClassVar[str] = "averages"  # type: ignore[misc]
    num_draws: ClassVar[int] = 1  # type: ignore[misc]
    sharing: ClassVar[str] = "expand"  # type: ignore[misc]


class SKFAC(KFAC, kind="skfac"):
    """`KFAC(ema_decay=0)` without matrices of a layer's width (Tang et al. 2021).

    Options: see `KFAC`; ema_decay must be 0, the default.
    """

    ema_decay: float = 0.0

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        # Rows of a side, or the factor of many rows.
        shapes: dict[str, tuple[int | str, ...]] = {"a": ("a", I), "e": ("e", O), "A": (I, I), "B": (O, O)}
        return {**{f"{group}.{key}?": shape for group in GROUPS for key, shape in shapes.items()},
                **{f"inverse.{key}_{side}?*": (side,) * rank for side in "ae" for key, rank in (("root", 2), ("damping", 0))}}

    def measure(self, name: str, rows: Rows) -> State:
        rows = rows.shared(self.sharing)
        a_XI, e_XO = rows.a_NTI.flatten(0, 1), rows.e_VNTO.flatten(0, 2)
        return {**self._smaller("a", a_XI / len(a_XI) ** 0.5), **self._smaller("e", e_XO / rows.num_rows**0.5)}

    @staticmethod
    def _smaller(side: str, x_XD: Tensor) -> State:
        """Return the rows, or their factor if there are more rows than columns (convolutions)."""
        return {side: x_XD} if len(x_XD) <= x_XD.shape[1] else {_FACTOR[side]: gemm.mm(x_XD.T, x_XD)}

    def invert(self, name: str, known: State) -> State:
        of_B, of_A = split_damping(_mean_square(known, "a"), _mean_square(known, "e"), self.option(name, "damping"))
        found: State = {}
        for side, damping in (("a", of_A), ("e", of_B)):
            if side in known:
                x_XD = known[side]
                found |= {side: x_XD, f"root_{side}": damped_cholesky(gemm.mm(x_XD, x_XD.T), damping),
                          f"damping_{side}": torch.tensor(damping, dtype=torch.float64)}
            else:
                found[_FACTOR[side]] = damped_inverse(known[_FACTOR[side]], damping)
        return found

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return None

    def can_hold(self, name: str, inverse: State) -> bool:
        return bool(inverse)

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        a_XI = torch.cat([rows.a_XI, rows.a_XI.new_ones(len(rows.a_XI), 1)], dim=1) if rows.has_bias else rows.a_XI
        a_XI, e_XO = self._solved(inverse, "a", a_XI), self._solved(inverse, "e", rows.e_XO)
        weight = gemm.mm(e_XO.T, a_XI[:, :-1] if rows.has_bias else a_XI)
        return weight, e_XO.T @ a_XI[:, -1] if rows.has_bias else None

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        return self._solved(inverse, "a", self._solved(inverse, "e", g_OI.T).T)

    @staticmethod
    def _solved(inverse: State, side: str, x_XD: Tensor) -> Tensor:
        if side not in inverse:
            return gemm.mm(x_XD, inverse[_FACTOR[side]])
        return woodbury_rows(inverse[side], inverse[f"root_{side}"], float(inverse[f"damping_{side}"]), x_XD)


class EKFAC(KFAC, kind="ekfac"):
    """Eigenvectors of K-FAC, with second moments of the gradient (George et al. 2018).

    Moments restart with the basis, from the minibatch of the inverse update. Options: see `KFAC`.
    """

    # Not split over ranks: each would have the moments of its rows only.
    def __post_init__(self) -> None:
        super().__post_init__()
        # rows of this step, for moments in a basis that is computed later
        self._rows: dict[str, Rows] = {}

    def measure(self, name: str, rows: Rows) -> State:
        self._rows[name] = rows
        return super().measure(name, rows)

    def update_curvature(self, seen: FisherSample) -> None:
        super().update_curvature(seen)
        for name, rows in self._rows.items():
            inverse = self.inverses.get(name)
            if inverse is not None and not self.is_due("inverse"):
                decay = self.option(name, "ema_decay")
                S_OI = self._moments(rows, inverse)
                if bool(S_OI.isfinite().all()):
                    inverse["S"].mul_(decay).add_(S_OI, alpha=1.0 - decay)
                    inverse["weight"].mul_(decay).add_(1.0 - decay)

    def step(self, lr: float | None = None) -> None:
        super().step(lr)
        self._rows.clear()

    def invert(self, name: str, known: State) -> State:
        (values_A, U_A), (values_B, U_B) = eigh(known["A"]), eigh(known["B"])
        # After averaging, use products of eigenvalues until rows are available.
        found = {"U_A": U_A, "U_B": U_B}
        if name not in self._rows:
            return {**found, "S": torch.outer(values_B, values_A).clamp(min=0.0), "weight": torch.ones((), device=values_A.device)}
        keep = 1.0 - self.option(name, "ema_decay")
        return {**found, "S": self._moments(self._rows[name], found) * keep,
                "weight": torch.full((), keep, dtype=torch.float64, device=values_A.device)}

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        U_A, U_B = inverse["U_A"], inverse["U_B"]
        damped_OI = inverse["S"] / inverse["weight"].to(g_OI) + self.option(name, "damping")
        rotated_OI = gemm.mm(gemm.mm(U_B.T, g_OI), U_A) / damped_OI
        return gemm.mm(gemm.mm(U_B, rotated_OI), U_A.T)

    def _moments(self, rows: Rows, basis: State) -> Tensor:
        """Return 1/R times the sum of squared gradients in the basis, O x I."""
        a_NTI, e_VNTO = gemm.linear(rows.a_NTI, basis["U_A"].T, None), gemm.linear(rows.e_VNTO, basis["U_B"].T, None)
        if self.sharing == "expand" or a_NTI.shape[1] == 1:
            e2_XO = e_VNTO.square().sum(dim=0).flatten(0, 1)
            return gemm.mm(e2_XO.T, a_NTI.flatten(0, 1).square()) / rows.num_rows
        return Rows(rows.weight, rows.bias, a_NTI, e_VNTO, rows.num_rows).individual().square().sum(dim=0) / rows.num_rows


class TNT(Combination, FisherMethod, kind="tnt"):
    """Tensor-normal training (Ren and Goldfarb 2021, with "mc"), of gradients of samples."""


def _mean_square(known: State, side: str) -> float:
    # The trace of a factor divided by its width.
    if side in known:
        return float(known[side].square().sum()) / known[side].shape[1]
    return float(known[_FACTOR[side]].trace()) / len(known[_FACTOR[side]])
