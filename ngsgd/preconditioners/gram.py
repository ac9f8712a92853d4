"""Natural gradients through the Gram matrix of samples' gradients: F of one minibatch, of any number of parameters.

    (U^T U / R + d I)^-1 g = (1/d) [g - U^T (R d I + U U^T)^-1 U g],   U: one row g_n for each sample     (Woodbury)

    SMW-NG  all layers together (Ren and Goldfarb 2019); with `fisher="exact"` SMW-GN, the Gauss-Newton matrix
    SENG    layer by layer, the Gram matrix from sketched coordinates (Yang et al. 2020)

U is never written down for layers with one position: U U^T = (A A^T) * (E E^T).

Letters: V vectors, N samples, X = V N, T positions, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ngsgd.ops.linalg import damped_cholesky
from ngsgd.preconditioners.options import FisherOptions
from ngsgd.preconditioners.protocol import Preconditioner, State
from ngsgd.preconditioners.signals import Rows, Signal


@dataclass(frozen=True)
class GramOptions(FisherOptions):
    """Of methods that keep the rows of one minibatch: the past has no share in it."""

    ema_decay: float = 0.0

    def problems(self) -> list[str]:
        found = super().problems()
        if self.ema_decay or any("ema_decay" in own for own in (self.layer_options or {}).values()):
            found.append("ema_decay must be 0: rows of one minibatch are kept, which cannot be averaged with those of another.")
        return found


@dataclass(frozen=True)
class SENGOptions(GramOptions):
    """Of SENG."""

    sketch: int = 0    # coordinates of inputs and of outputs that the Gram matrix is estimated from; 0: all

    def problems(self) -> list[str]:
        found = super().problems()
        return found if self.sketch >= 0 else [*found, f"sketch is {self.sketch}; it must be at least 0, where 0 is all."]


class SENG(Preconditioner):
    """F of each layer by its own Gram matrix; exact with `sketch=0`.

    A sketch keeps `sketch` of d coordinates, drawn anew for each minibatch, times sqrt(d / sketch): the Gram matrix is right in the
    mean over draws.
    """

    Options = SENGOptions
    has_mean = False

    def measure(self, name: str, rows: Rows) -> State:
        a_NTI, e_VNTO = rows.a_NTI, rows.e_VNTO / rows.num_rows**0.5
        gram_XX = gram(self._sketched(a_NTI), self._sketched(e_VNTO))
        return {"a": a_NTI, "e": e_VNTO, "gram": gram_XX}

    def _sketched(self, x: Tensor) -> Tensor:
        d, q = x.shape[-1], self.options.sketch
        if not 0 < q < d:
            return x
        chosen = torch.randperm(d, generator=self.generator, device=x.device)[:q]
        scale: float = (d / q) ** 0.5
        sketched: Tensor = x[..., chosen] * scale
        return sketched

    def invert(self, name: str, known: State) -> State:
        return {"a": known["a"], "e": known["e"], "root": damped_cholesky(known["gram"], self.option(name, "damping"))}

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        a_NTI, e_VNTO = inverse["a"], inverse["e"]
        b_X = solved(inverse["root"], products(a_NTI, e_VNTO, g_OI))
        return (g_OI - combination(a_NTI, e_VNTO, b_X)) / self.option(name, "damping")


class SMWNG(Preconditioner):
    """F of all affine layers together by one Gram matrix; equals `FullNG(ema_decay=0)`, for models of any size."""

    Options = GramOptions
    has_mean = False

    def measure(self, name: str, rows: Rows) -> State:
        return {"a": rows.a_NTI, "e": rows.e_VNTO / rows.num_rows**0.5}

    def update_curvature(self, seen: Signal | Mapping[str, Tensor]) -> None:
        self.statistics.clear()   # the layers of one minibatch belong together
        super().update_curvature(seen)

    def refresh(self) -> None:
        # in the order of names: that of a dict is not the same after a restart
        affine = [known for _, known in sorted(self.statistics.items()) if "e" in known]
        super().refresh()
        if affine:
            total_XX = torch.stack([gram(known["a"], known["e"]) for known in affine]).sum(dim=0)
            first = next(name for name, known in self.statistics.items() if "e" in known)
            self.inverses[first]["root"] = damped_cholesky(total_XX, self.options.damping)

    def invert(self, name: str, known: State) -> State:
        return {"a": known["a"], "e": known["e"]}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(grads)
        joined = self._joined(grads)
        affine = {name: inverse for name, inverse in sorted(self.inverses.items()) if "e" in inverse and name in joined}
        for name, inverse in self.inverses.items():
            if "squares" in inverse and name in grads:
                found[name] = grads[name] / (inverse["squares"].view_as(grads[name]) + self.option(name, "damping"))
        if not affine:
            return found
        root_XX = next(inverse["root"] for inverse in affine.values() if "root" in inverse)
        Ug_X = torch.stack([products(inverse["a"], inverse["e"], joined[name]) for name, inverse in affine.items()]).sum(dim=0)
        b_X = solved(root_XX, Ug_X)
        for name, inverse in affine.items():
            direction_OI = (joined[name] - combination(inverse["a"], inverse["e"], b_X)) / self.options.damping
            found |= self._parted(name, direction_OI, grads)
        return found


def gram(a_NTI: Tensor, e_VNTO: Tensor) -> Tensor:
    """X x X: the products of samples' gradients sum_t e a^T, for X = V N."""
    V, N, T, O = e_VNTO.shape  # noqa: E741
    if T == 1:
        a_NI, e_XO = a_NTI[:, 0], e_VNTO.reshape(V * N, O)
        return (a_NI @ a_NI.T).repeat(V, V) * (e_XO @ e_XO.T)
    if T * (O + a_NTI.shape[2]) > O * a_NTI.shape[2]:   # gradients are smaller than the products of positions
        g_XD = torch.einsum("vnto,nti->vnoi", e_VNTO, a_NTI).reshape(V * N, -1)
        return g_XD @ g_XD.T
    a_XI, e_XO = a_NTI.expand(V, -1, -1, -1).reshape(V * N * T, -1), e_VNTO.reshape(V * N * T, O)
    return ((a_XI @ a_XI.T) * (e_XO @ e_XO.T)).view(V * N, T, V * N, T).sum(dim=(1, 3))


def products(a_NTI: Tensor, e_VNTO: Tensor, g_OI: Tensor) -> Tensor:
    """X: U g, the products of samples' gradients with g."""
    return ((a_NTI @ g_OI.T) * e_VNTO).sum(dim=(2, 3)).flatten()


def combination(a_NTI: Tensor, e_VNTO: Tensor, b_X: Tensor) -> Tensor:
    """O x I: U^T b, the sum of samples' gradients, each times its b."""
    weighted_NTO = (e_VNTO * b_X.view(*e_VNTO.shape[:2], 1, 1)).sum(dim=0)
    return weighted_NTO.flatten(0, 1).T @ a_NTI.flatten(0, 1)


def solved(root_XX: Tensor, right_X: Tensor) -> Tensor:
    """The solution for a Cholesky root."""
    return torch.cholesky_solve(right_X.to(root_XX.dtype)[:, None], root_XX)[:, 0].to(right_X.dtype)
