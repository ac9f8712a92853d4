"""Natural gradients through the Gram matrix of per-sample gradients, the rows of U, of a minibatch.

    (U^T U / R + d I)^-1 g = (1/d) [g - U^T (R d I + U U^T)^-1 U g]     (Woodbury)

    SMW-NG  all layers together (Ren and Goldfarb 2019)
    SENG    layer by layer, with the Gram matrix of sketched coordinates (Yang et al. 2020)

For layers with one position U U^T = (A A^T) * (E E^T), and U is never formed.
Letters: V vectors, N samples, X = V N, T positions, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ngsgd.curvature.fisher_rows import FisherSample, Rows
from ngsgd.ops import gemm
from ngsgd.ops.linalg import damped_cholesky
from ngsgd.preconditioners.factored_grad import FactoredGrad, products_of
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.states import GROUPS, Layout, State


class _FromRows(FisherMethod):
    """P g from stored rows: for the empirical F, g_n = U_n / s, U g = K 1 / s and
    P g = (1/d) sum_n (1 - s b_n) e_n a_n^T, with the Gram matrix K.
    """

    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # s, if the gradient consists of the rows of this curvature update; 0 at other steps.
        self._scale = 0.0
        self._gradients: dict[str, FactoredGrad] = {}   # factored gradients of this step

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        rows: Layout = {"a": ("n", "t", I), "e": ("v", "n", "t", O)}
        X, Y = (math.prod(entry[key].shape[:2]) if key in entry else "x" for key in ("statistics.e", "inverse.e"))
        return {**{f"{group}.{key}": shape for group in GROUPS for key, shape in rows.items()},
                "statistics.gram?": (X, X), "statistics.sums?": (X,), "inverse.root?*": (Y, Y)}

    def update_curvature(self, seen: FisherSample) -> None:
        if self.fisher == "empirical" and self.is_due("inverse"):
            self._scale = seen.scale / max(seen.num_rows, 1) ** 0.5
        super().update_curvature(seen)

    def update_statistics(self, name: str, rows: Rows) -> None:
        last = self.statistics.pop(name, None)
        super().update_statistics(name, rows)
        if name in self.statistics and self.is_due("inverse"):
            # Free the rows of the last minibatch, which these replace.
            self.inverses.pop(name, None)
        elif last is not None:
            self.statistics.setdefault(name, last)
        known, held = self.statistics.get(name, {}), self._gradients.get(name)
        # Store rows shared by the gradient and U once, unless the gradient norm is needed.
        if held is not None and self.graft == "none" and self.are_own(known, held):
            self._gradients[name] = FactoredGrad(known["a"][:, 0, :held.a_XI.shape[1]], known["e"][0, :, 0], held.has_bias)

    def _held_scale(self, inverse: State, rows: FactoredGrad) -> float:
        """Return the ratio of the stored rows to those of the gradient; s if stored once."""
        return self._scale if rows.e_XO.data_ptr() == inverse["e"].data_ptr() else 1.0

    def held_alone(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, FactoredGrad]:
        self._gradients = super().held_alone(parameters)
        return self._gradients

    def _step(self, lr: float | None) -> None:
        try:
            super()._step(lr)
        finally:
            self._scale, self._gradients = 0.0, {}

    def can_hold(self, name: str, inverse: State) -> bool:
        return "e" in inverse and inverse["a"].shape[1] == 1 and len(inverse["e"]) == 1

    def are_own(self, inverse: State, rows: FactoredGrad) -> bool:
        """Return whether the rows are those of the latest curvature update."""
        return self._scale > 0.0 and self.can_hold("", inverse) and len(rows.a_XI) == len(inverse["a"])

    def products_of_rows(self, inverse: State, rows: FactoredGrad) -> Tensor:
        """Return U g, of rows with one position."""
        a_NI, e_NO = inverse["a"][:, 0], inverse["e"][0, :, 0]
        held_scale = self._held_scale(inverse, rows)
        if len(a_NI) * (a_NI.shape[1] + e_NO.shape[1]) < a_NI.shape[1] * e_NO.shape[1]:
            of_a_NX = gemm.mm(a_NI[:, :rows.a_XI.shape[1]], rows.a_XI.T)
            if rows.has_bias:
                of_a_NX = of_a_NX.add_(1.0)
            return (of_a_NX * gemm.mm(e_NO, rows.e_XO.T)).sum(dim=1) / held_scale
        weight, bias = rows.product()
        found: Tensor = (gemm.mm(a_NI[:, :weight.shape[1]], weight.T) * e_NO).sum(dim=1)
        return (found if bias is None else found + e_NO @ bias) / held_scale

    def combined(self, inverse: State, rows: FactoredGrad, b_N: Tensor, damping: float) -> tuple[Tensor, Tensor | None]:
        """Return (g - U^T b) / d, of the weight and of the bias."""
        if self.are_own(inverse, rows):
            factor_N = (1.0 - self._scale * b_N) / (damping * self._held_scale(inverse, rows))
            return rows._replace(e_XO=rows.e_XO * factor_N[:, None]).product()
        a_NI, e_NO = inverse["a"][:, 0], inverse["e"][0, :, 0] * (b_N / damping)[:, None]
        weight, bias = rows._replace(e_XO=rows.e_XO / damping).product()
        weight = gemm.sub_matmul(weight, e_NO.T, a_NI[:, :weight.shape[1]], weight)
        return weight, None if bias is None else bias - e_NO.sum(dim=0)


class SENG(_FromRows, kind="seng"):
    """Natural gradient of each layer through its Gram matrix; exact with `sketch=0`.

    A sketch keeps `sketch` of d coordinates, sampled again for each minibatch, times sqrt(d /
    sketch). The expected Gram matrix is then exact.

    Args:
        sketch: sampled coordinates of inputs and of outputs for the Gram matrix; 0 uses all
            (default).
        fisher, num_draws: see `FisherMethod`.
        options: see `Preconditioner`; ema_decay must be 0 (default).
    """

    sketch: int = 0

    def measure(self, name: str, rows: Rows) -> State:
        a_NTI, e_VNTO = rows.a_NTI, rows.e_VNTO / rows.num_rows**0.5
        gram_XX = gram(self._sketched(a_NTI), self._sketched(e_VNTO))
        found = {"a": a_NTI, "e": e_VNTO, "gram": gram_XX}
        # U g uses the matrix without a sketch.
        is_sketched = 0 < self.sketch < max(rows.a_NTI.shape[-1], rows.e_VNTO.shape[-1])
        if self._scale and is_sketched and self.can_hold(name, found):
            found["sums"] = gram(a_NTI, e_VNTO).sum(dim=1)
        return found

    def _sketched(self, x: Tensor) -> Tensor:
        d, q = x.shape[-1], self.sketch
        if not 0 < q < d:
            return x
        chosen = torch.randperm(d, generator=self.generator, device=x.device)[:q]
        return x[..., chosen] * float((d / q) ** 0.5)

    def invert(self, name: str, known: State) -> State:
        return {"a": known["a"], "e": known["e"], "root": damped_cholesky(known["gram"], self.option(name, "damping"))}

    def direction_of_rows(self, name: str, inverse: State, rows: FactoredGrad) -> tuple[Tensor, Tensor | None]:
        if self.are_own(inverse, rows):
            known = self.statistics[name]
            Ug_N = known["sums"] if "sums" in known else known["gram"].sum(dim=1)
            Ug_N = Ug_N / self._scale
        else:
            Ug_N = self.products_of_rows(inverse, rows)
        return self.combined(inverse, rows, solved(inverse["root"], Ug_N), self.option(name, "damping"))

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        a_NTI, e_VNTO = inverse["a"], inverse["e"]
        b_X = solved(inverse["root"], sample_products(a_NTI, e_VNTO, g_OI))
        return (g_OI - combination(a_NTI, e_VNTO, b_X)) / self.option(name, "damping")


class SMWNG(_FromRows, kind="smw"):
    """Natural gradient of all affine layers together through one Gram matrix.

    Equals `FullNG(ema_decay=0)`, for models of any size.

    Options: see `FisherMethod` ("exact": SMW-GN) and `Preconditioner`; ema_decay must be 0
    (default).
    """


    def __post_init__(self) -> None:
        super().__post_init__()
        # K 1 of the last curvature update
        self._sums: Tensor | None = None

    def measure(self, name: str, rows: Rows) -> State:
        return {"a": rows.a_NTI, "e": rows.e_VNTO / rows.num_rows**0.5}

    def update_curvature(self, seen: FisherSample) -> None:
        # The layers of one minibatch belong together.
        self.statistics.clear()
        super().update_curvature(seen)

    def refresh(self) -> None:
        # Sorted by name, because a restart may change the order.
        affine = [known for _, known in sorted(self.statistics.items()) if "e" in known]
        super().refresh()
        if affine:
            total_XX = gram(affine[0]["a"], affine[0]["e"])
            for known in affine[1:]:
                total_XX += gram(known["a"], known["e"])
            self._sums = total_XX.sum(dim=1)
            first = next(name for name, known in self.statistics.items() if "e" in known)
            self.inverses[first]["root"] = damped_cholesky(total_XX, self.damping)

    def invert(self, name: str, known: State) -> State:
        return {"a": known["a"], "e": known["e"]}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.apply_all(grads, {})

    def apply_all(self, grads: Mapping[str, Tensor], held: dict[str, FactoredGrad]) -> dict[str, Tensor]:
        found = dict(grads)
        joined = self.blocks.joined(grads)
        affine = {name: inverse for name, inverse in sorted(self.inverses.items())
                  if "e" in inverse and (name in joined or name in held)}
        for name, inverse in self.inverses.items():
            if "squares" in inverse and name in grads:
                found |= self.block_direction(name, inverse, grads)
        if not affine:
            return found
        # Its layer may have no gradient in this step.
        root_XX = next(inverse["root"] for inverse in self.inverses.values() if "root" in inverse)
        if self._sums is not None and all(name in held and self.are_own(inverse, held[name]) for name, inverse in affine.items()):
            Ug_X = self._sums / self._scale
        else:
            Ug_X = torch.stack([self.products_of_rows(inverse, held[name]) if name in held else sample_products(inverse["a"],
                                inverse["e"], joined[name]) for name, inverse in affine.items()]).sum(dim=0)
        b_X = solved(root_XX, Ug_X)
        for name, inverse in affine.items():
            if name in held:
                rows = held.pop(name) if self.overwrites else held[name]
                found |= self.blocks.named(name, self.combined(inverse, rows, b_X, self.damping))
            else:
                direction_OI = (joined[name] - combination(inverse["a"], inverse["e"], b_X)) / self.damping
                found |= self.blocks.parted(name, direction_OI, grads)
        return found


def gram(a_NTI: Tensor, e_VNTO: Tensor) -> Tensor:
    """Return the products of per-sample gradients sum_t e a^T, X x X for X = V N."""
    V, N, T, O = e_VNTO.shape  # noqa: E741
    if T == 1:
        a_NI, e_XO = a_NTI[:, 0], e_VNTO.reshape(V * N, O)
        return products_of(e_XO).mul_(products_of(a_NI).repeat(V, V))
    # Gradients are smaller than the products of positions.
    if T * (O + a_NTI.shape[2]) > O * a_NTI.shape[2]:
        g_XD = torch.einsum("vnto,nti->vnoi", e_VNTO, a_NTI).reshape(V * N, -1)
        return gemm.mm(g_XD, g_XD.T)
    a_XI, e_XO = a_NTI.expand(V, -1, -1, -1).reshape(V * N * T, -1), e_VNTO.reshape(V * N * T, O)
    return (gemm.mm(a_XI, a_XI.T) * gemm.mm(e_XO, e_XO.T)).view(V * N, T, V * N, T).sum(dim=(1, 3))


def sample_products(a_NTI: Tensor, e_VNTO: Tensor, g_OI: Tensor) -> Tensor:
    """Return U g, the products of per-sample gradients with g, of length X."""
    return ((a_NTI @ g_OI.T) * e_VNTO).sum(dim=(2, 3)).flatten()


def combination(a_NTI: Tensor, e_VNTO: Tensor, b_X: Tensor) -> Tensor:
    """Return U^T b, the sum of per-sample gradients times b, O x I."""
    weighted_NTO = (e_VNTO * b_X.view(*e_VNTO.shape[:2], 1, 1)).sum(dim=0)
    return gemm.mm(weighted_NTO.flatten(0, 1).T, a_NTI.flatten(0, 1))


def solved(root_XX: Tensor, right_X: Tensor) -> Tensor:
    """Solve with a Cholesky root."""
    return torch.cholesky_solve(right_X.to(root_XX.dtype)[:, None], root_XX)[:, 0].to(right_X.dtype)
