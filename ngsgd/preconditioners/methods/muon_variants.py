"""Variants of Muon: normalized neurons, weights of constant norm, and whitened inputs.

All share Muon's momentum m <- beta m + (1 - beta) G and u = (1 - beta) G + beta m. O(.) is the
orthogonalization by Newton-Schulz iterations.

    NorMuon       0.2 sqrt(O I) N / |N|,  N = O(u) / (sqrt(v) + d),  v: mean square of each row
    MuonH         (W - R x / |x|) / lr,  x = W - lr R O(u) / |O(u)|,  R: initial norm of W
    Newton-Muon   sqrt(max(1, O / I)) O(u (K I / tr K + d 1)^-1),  K: mean of a a^T over input rows

Norms are Frobenius norms. Dimensions of a weight after the first are flattened. AdamW trains
vectors, with beta 1 = momentum and beta 2 = ema_decay.

Sources: Li et al. 2025, arXiv 2510.05491 (NorMuon); the optimization track of modded-nanogpt,
April 2026 (MuonH); Du and Su 2026, arXiv 2604.01472 (Newton-Muon).

Letters: O outputs, I inputs (without the 1 of the bias), X rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ngsgd.curvature.forms.kronecker import add_gram
from ngsgd.curvature.layers import upcast
from ngsgd.ops import gemm
from ngsgd.ops.linalg import damped_inverse
from ngsgd.ops.newton_schulz import orthogonalized
from ngsgd.preconditioners.methods.torch_optimizers import Muon, MuonOptions, moment_problems, orthogonal_problems
from ngsgd.preconditioners.options import FisherOptions, Interval, Options
from ngsgd.preconditioners.states import Layout

# Root mean square of NorMuon's steps, that of AdamW's.
_RMS = 0.2
# Added to norms, so that a zero gradient gives a zero direction.
_EPS = 1e-7


class MuonVariant(Muon):
    """Base of the variants: `matrix_direction` for matrices, AdamW for vectors."""

    def parameter_direction(self, name: str, g: Tensor, p: Tensor) -> Tensor:
        if g.ndim < 2:
            return super().parameter_direction(name, g, p)
        G_OI = self.viewed(g)
        W_OI = self.viewed(self.oriented(name, upcast(p)))
        return self.matrix_direction(name, self._with_momentum(name, G_OI), W_OI).view_as(g)

    def matrix_direction(self, name: str, u_OI: Tensor, W_OI: Tensor) -> Tensor:
        """Return the direction of a matrix from u, the gradient with Nesterov momentum."""
        raise NotImplementedError

    def _with_momentum(self, name: str, G_OI: Tensor) -> Tensor:
        m_OI = self.statistics.setdefault(name, {}).setdefault("momentum_buffer", G_OI.new_zeros(G_OI.shape))
        m_OI.lerp_(G_OI, 1.0 - self.options.momentum)
        return G_OI.lerp(m_OI, self.options.momentum)

    def _orthogonalized(self, u_OI: Tensor) -> Tensor:
        return orthogonalized(u_OI, self.options.orthogonal_steps)

    def _decayed(self, direction_OI: Tensor, W_OI: Tensor) -> Tensor:
        decay = self.options.weight_decay
        return direction_OI.add_(W_OI, alpha=decay) if decay else direction_OI


@dataclass(frozen=True)
class NorMuonOptions(MuonOptions):
    """Options of NorMuon."""

    # beta 2: decay of the mean squares of rows, and of AdamW for vectors
    ema_decay: float = 0.95


class NorMuon(MuonVariant):
    """Muon whose rows (neurons) are divided by their root mean square over steps.

    The direction of a matrix has the root mean square 0.2, so that learning rates of AdamW apply.

    Args:
        model: the module to precondition.
        damping: eps, added to the roots of second moments. Default 1e-8.
        ema_decay: beta 2, decay of the rows' mean squares and of AdamW for vectors. Default 0.95.
        options: see `Muon`.

    Source: Li et al. 2025, algorithm 1, with the Nesterov momentum of `Muon`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = NorMuon(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    Options: ClassVar[type[Options]] = NorMuonOptions

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        found = super().layout(name, entry)
        return {**found, "statistics.second_moment": (self._sides(name)[0],)} if "statistics.momentum_buffer" in found else found

    def matrix_direction(self, name: str, u_OI: Tensor, W_OI: Tensor) -> Tensor:
        N_OI = self._orthogonalized(u_OI)
        v_O = self.statistics[name].setdefault("second_moment", N_OI.new_zeros(len(N_OI)))
        v_O.lerp_(N_OI.square().mean(dim=1), 1.0 - self.options.ema_decay)
        # A bias correction of v would cancel in the norm.
        N_OI = N_OI / (v_O.sqrt() + self.options.damping)[:, None]
        return self._decayed(N_OI.mul_(_RMS * math.sqrt(N_OI.numel()) / (N_OI.norm() + _EPS)), W_OI)


@dataclass(frozen=True)
class MuonHOptions(MuonOptions):
    """Options of MuonH."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.graft != "none":
            found.append(f"graft is {self.graft!r}; it must be \"none\", because the learning rate is "
                         "relative to the norm of a weight.")
        return found


class MuonH(MuonVariant):
    """Muon whose matrices keep their initial Frobenius norm R (hyperball).

    A step changes a matrix by the fraction lr of its norm and then scales it to R. `step` needs the
    learning rate. The optimizer must subtract lr times the direction, without momentum. If a limit
    shortens a step, the next one restores the norm.

    R is the norm at the first step of the state. Matrices that are 0 then get the steps of Muon.

    Args:
        model: the module to precondition.
        weight_decay: multiple of vectors in the direction; matrices do not decay. Default 0.
        options: see `Muon`; graft is not supported.

    Source: the optimization track of modded-nanogpt, April 2026.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = MuonH(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step(lr=0.01)
    """

    Options: ClassVar[type[Options]] = MuonHOptions
    needs_lr = True

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        found = super().layout(name, entry)
        return {**found, "statistics.radius": ()} if "statistics.momentum_buffer" in found else found

    def matrix_direction(self, name: str, u_OI: Tensor, W_OI: Tensor) -> Tensor:
        N_OI, lr = self._orthogonalized(u_OI), self._lr
        R = self.statistics[name].setdefault("radius", W_OI.norm())
        step_OI = N_OI * (R / (N_OI.norm() + _EPS))
        scale = R / torch.sub(W_OI, step_OI, alpha=lr).norm()
        # (W - scale (W - lr step)) / lr
        found_OI = torch.addcmul(step_OI * scale, W_OI, (1.0 - scale) / lr) if lr else step_OI
        return torch.where(R > 0.0, found_OI, N_OI * _muon_scale(N_OI))


@dataclass(frozen=True)
class NewtonMuonOptions(FisherOptions):
    """Options of Newton-Muon."""

    # added to the second moment of the inputs, relative to its mean eigenvalue
    damping: float = 0.2
    inverse_interval: Interval = 64
    # decay of the second moment of the inputs, and beta 2 of AdamW for vectors
    ema_decay: float = 0.95
    # momentum of Muon, and beta 1 of AdamW for vectors
    momentum: float = 0.95
    # multiple of the parameter in the direction
    weight_decay: float = 0.0
    # Newton-Schulz iterations
    orthogonal_steps: int = 5

    def problems(self) -> list[str]:
        found = [*super().problems(), *moment_problems(self), *orthogonal_problems(self)]
        if self.fisher != "empirical":
            found.append(f"fisher is {self.fisher!r}; it must be \"empirical\", because only inputs of "
                         "layers are used.")
        return found


class NewtonMuon(MuonVariant):
    """Muon whose momentum is multiplied by the inverse second moment of the layer's inputs.

    The inputs do not include the 1 of the bias, which AdamW trains. Matrices without input rows,
    such as embeddings, get the steps of Muon. The paper multiplies the gradient; here the momentum
    is multiplied, so that a new inverse applies to all of it.

    Args:
        model: the module to precondition.
        damping: added to the second moment K of the inputs, relative to its mean eigenvalue.
            Default 0.2.
        curvature_interval: steps between updates of K. Default 1.
        inverse_interval: steps between inversions. Default 64.
        ema_decay: decay of K, and beta 2 of AdamW for vectors. Default 0.95.
        options: see `Muon`; fisher must be "empirical" (default).

    Source: Du and Su 2026.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = NewtonMuon(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    Options: ClassVar[type[Options]] = NewtonMuonOptions
    # Each rank would use the inputs of its rows.
    agrees_over_ranks = False

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        own = self.options
        return torch.optim.AdamW([copy], lr=1.0, betas=(own.momentum, own.ema_decay), weight_decay=own.weight_decay)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        if len(self._shape(name)) < 2:
            return super().layout(name, entry)
        O, _, J = self._sides(name)  # noqa: E741
        # Embeddings have no K, and minibatches without a finite gradient no momentum.
        return {"statistics.momentum_buffer?": (O, J), "statistics.K?": (J, J), "inverse.K?": (J, J)}

    def update_curvature(self, seen: Any) -> None:
        moments = {}
        for name, rows in seen.layers():
            a_XI = rows.a_NTI.flatten(0, 1)
            a_XI = a_XI if rows.bias is None else a_XI[:, :-1]
            moments[name] = a_XI.new_empty(a_XI.shape[1], a_XI.shape[1])
            add_gram(a_XI, moments[name], keep=0.0, scale=1.0 / len(a_XI))
        for name in self.finite(moments):
            K_II, weight = moments[name], 1.0 - self.options.ema_decay
            known = self.statistics.setdefault(name, {}).setdefault("K", torch.zeros_like(K_II))
            known.lerp_(K_II, weight)
            self.weights[name] = 1.0

    def refresh(self) -> None:
        for name, known in self.statistics.items():
            if "K" in known:
                # The bias correction of K cancels.
                mean = known["K"].diagonal().mean().clamp(min=torch.finfo(known["K"].dtype).tiny ** 0.5)
                self.inverses[name] = {"K": damped_inverse(known["K"] / mean, self.options.damping).contiguous()}

    def matrix_direction(self, name: str, u_OI: Tensor, W_OI: Tensor) -> Tensor:
        if name in self.inverses:
            u_OI = gemm.mm(u_OI, self.inverses[name]["K"])
        N_OI = self._orthogonalized(u_OI)
        return self._decayed(N_OI * _muon_scale(N_OI), W_OI)

    def _warn_of_plain(self, grads: Mapping[str, Tensor], covered: Collection[str | None]) -> None:
        """Do nothing; parameters without rows get the steps of Muon and AdamW."""


def _muon_scale(N_OI: Tensor) -> float:
    """Return the factor of torch.optim.Muon."""
    return math.sqrt(max(1.0, N_OI.shape[0] / N_OI.shape[1]))
