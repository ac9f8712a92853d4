"""PSGD: P = Q^T Q with triangular Q, fitted on the Lie group of Q to Hessian-vector products.

    v ~ N(0, I), h = H v:  minimize E[h^T P h + v^T P^-1 v], whose minimum is at P = |H|^-1
    dense       a = Q h,         b = Q^-T v,          t = triu(a a^T - b b^T)
    Kronecker   a = Ql dG Qr^T,  b = Ql^-T dX Qr^-1,  dX = v,  dG = h,
                Ql by triu(a a^T - b b^T),  Qr by triu(a^T a - b^T b)
    diagonal    t = (q h)^2 - (v / q)^2

with the step Q <- Q - mu / max|t| t Q in all cases.

The Kronecker form is for affine layers, P g = Ql^T Ql G Qr^T Qr; other parameters use the diagonal.
Letters: O outputs, I inputs (with the 1 of the bias), D elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.forms.kronecker import add_gram
from ngsgd.ops import gemm
from ngsgd.ops.linalg import less_upper_product, upper_gram
from ngsgd.preconditioners.blocks import flat, require_small, unflat
from ngsgd.preconditioners.methods.second_derivatives import SecondOrderMethod
from ngsgd.preconditioners.states import GROUPS, Layout, State

# Key of the factor of the complete model, under its first parameter.
_ALL = "all"


class PSGD(SecondOrderMethod, kind="psgd"):
    """PSGD (Li 2018); a curvature update costs one product with H, to which damping is added.

    Args:
        form: of Q: "kronecker" per layer (default), or "full", one matrix for models of up to 20
            000 parameters.
        factor_lr: mu, in (0, 1): relative step size of Q. Default 0.1.
        options: see `Preconditioner`; ema_decay must be 0.
    """

    ema_decay: float = 0.0
    form: str = "kronecker"
    factor_lr: float = 0.1
    unused = (("ema_decay", "Q is updated by steps of factor_lr"),)

    @property
    def is_joint(self) -> bool:
        return self.form == "full"

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        if self.is_joint:
            return dict.fromkeys(("statistics.all", "inverse.all"), ("d", "d"))
        if name not in self.blocks.bias_of:
            return dict.fromkeys(("statistics.q", "inverse.P"), self.blocks.shape(name))
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        return {f"{group}.{key}": (size, size) for group in GROUPS for key, size in (("Ql", O), ("Qr", I))}

    def update_curvature(self, seen: Any) -> None:
        v = self.drawn(seen)
        h = self.product("hessian", v, is_last=True)
        self.forget_minibatch()
        for name, value in h.items():
            value.add_(v[name], alpha=self.option(name, "damping"))
        if not all(bool(value.isfinite().all()) for value in h.values()):
            self.note_skipped()
        elif self.is_joint:
            flat_v, flat_h = flat(v), flat(h)
            require_small("the model", len(flat_v))
            self.cover(sorted(v))
            known = self.statistics.get(min(v))
            Q_DD = known[_ALL] if known is not None else _identity(
                flat_v, len(flat_v), _first_scale(flat_v, flat_h) ** 0.5)
            a_D = Q_DD @ flat_h
            b_D = torch.linalg.solve_triangular(Q_DD.T, flat_v[:, None], upper=False)[:, 0]
            self._move(Q_DD, torch.outer(a_D, a_D).addr_(b_D, b_D, alpha=-1))
            self.statistics.put(min(v), {_ALL: Q_DD})
        else:
            # Layer by layer; free the pairs.
            for name in self.blocks.weights_of(v.keys()):
                fit = self._kronecker if name in self.blocks.bias_of else self._diagonal
                dX, dG = self.blocks.joined_one(name, v), self.blocks.joined_one(name, h)
                for each in self.blocks.names(name):
                    v.pop(each, None)
                    h.pop(each, None)
                self.statistics.put(name, fit(self.statistics.get(name), dX, dG))

    def _kronecker(self, known: State | None, dX_OI: Tensor, dG_OI: Tensor) -> State:
        if known is None:
            scale = _first_scale(dX_OI, dG_OI) ** 0.25
            Ql_OO, Qr_II = (_identity(dX_OI, size, scale) for size in dX_OI.shape)
        else:
            # Balance the scale between the factors, to keep both within float range.
            share = (known["Ql"].diagonal().max() / known["Qr"].diagonal().max()).sqrt()
            Ql_OO, Qr_II = known["Ql"].div_(share), known["Qr"].mul_(share)
        a_OI = gemm.mm(gemm.mm(Ql_OO, dG_OI), Qr_II.T)
        b_OI = torch.linalg.solve_triangular(Ql_OO.T, dX_OI, upper=False)
        b_OI = torch.linalg.solve_triangular(Qr_II, b_OI, upper=True, left=False)
        self._move(Ql_OO, _difference(a_OI.T, b_OI.T))
        self._move(Qr_II, _difference(a_OI, b_OI))
        return {"Ql": Ql_OO, "Qr": Qr_II}

    def _diagonal(self, known: State | None, v: Tensor, h: Tensor) -> State:
        q = torch.ones_like(v) * _first_scale(v, h) ** 0.5 if known is None else known["q"]
        t = (q * h).square() - (v / q).square()
        return {"q": q - self.factor_lr / _largest(t) * t * q}

    def _move(self, Q_DD: Tensor, t_DD: Tensor) -> None:
        """Take a step of Q in place; overwrites t."""
        t_DD.triu_()
        less_upper_product(Q_DD, t_DD.mul_(self.factor_lr / _largest(t_DD)))

    def invert(self, name: str, known: State) -> State:
        if "q" in known:
            return {"P": known["q"].square()}
        before = self.inverses.get(name, {})
        return {key: upper_gram(Q_DD, before[key] if key in before else torch.empty_like(Q_DD)) for key, Q_DD in known.items()}

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return (inverse["Ql"], inverse["Qr"]) if "Ql" in inverse else None

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        direction: Tensor = inverse["P"] * g
        return direction

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.is_joint or not self.inverses:
            return super().apply(grads)
        self.require_covered(grads)
        return unflat(next(iter(self.inverses.values()))[_ALL] @ flat(grads), grads)


def _difference(a_XD: Tensor, b_XD: Tensor) -> Tensor:
    """Return a^T a - b^T b."""
    found = a_XD.new_empty(a_XD.shape[1], a_XD.shape[1])
    add_gram(a_XD, found, keep=0.0)
    add_gram(b_XD, found, scale=-1.0)
    return found


def _first_scale(v: Tensor, h: Tensor) -> Tensor:
    """Return c of P = c I for one pair: |v| / |h|."""
    tiny = torch.finfo(v.dtype).tiny ** 0.5
    scale: Tensor = v.norm() / h.norm().clamp(min=tiny * v.norm())
    return scale


def _identity(like: Tensor, size: int, scale: Tensor) -> Tensor:
    found = like.new_zeros(size, size)
    found.diagonal().fill_(scale)
    return found


def _largest(t: Tensor) -> Tensor:
    low, high = t.aminmax()
    return torch.maximum(-low, high).clamp(min=torch.finfo(t.dtype).tiny)
