"""Optimizers of other projects that the optimizer track compares with: NorMuon and ScaledAdam.

Both take the gradient of a summed loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops.orthonormal import orthogonalized

# Root mean square of NorMuon's steps, that of AdamW's; added to norms against a division by zero.
_RMS, _EPS = 0.2, 1e-7
# Constants of icefall's ScaledAdam: steps between two updates of a tensor's scale, rate of the
# scales, limits on r, on one change of a scale and on a scalar, steps between two thresholds.
_PERIOD, _SCALE_LR, _MAX_RMS, _MAX_SCALE_STEP, _MAX_SCALAR, _CLIPPING_PERIOD = 4, 0.1, 3.0, 0.1, 10.0, 100


class NorMuon:
    """Muon whose rows are divided by their root mean square over steps; AdamW for vectors.

    Source: Li et al. 2025, arXiv 2510.05491, algorithm 1, with the Nesterov momentum of Muon.
    """

    def __init__(self, params: Iterable[Tensor], *, momentum: float = 0.95, beta_2: float = 0.95, eps: float = 1e-8) -> None:
        params = list(params)
        self.momentum, self.beta_2, self.eps = momentum, beta_2, eps
        self.vectors = torch.optim.AdamW([p for p in params if p.ndim < 2], betas=(momentum, beta_2), eps=eps, weight_decay=0.0)
        self.param_groups = self.vectors.param_groups
        self.matrices = [(p, torch.zeros_like(p).flatten(1), p.new_zeros(len(p))) for p in params if p.ndim > 1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.vectors.zero_grad(set_to_none)
        for p, _, _ in self.matrices:
            p.grad = None

    @torch.no_grad()
    def step(self, num_samples: int | None = None) -> None:
        self.vectors.step()
        for p, m_OI, v_O in self.matrices:
            G_OI = p.grad.flatten(1)  # type: ignore[union-attr]
            m_OI.lerp_(G_OI, 1.0 - self.momentum)
            N_OI = orthogonalized(G_OI.lerp(m_OI, self.momentum), 5)
            v_O.lerp_(N_OI.square().mean(dim=1), 1.0 - self.beta_2)
            # A bias correction of v would cancel in the norm.
            N_OI = N_OI / (v_O.sqrt() + self.eps)[:, None]
            length = _RMS * math.sqrt(N_OI.numel()) / (N_OI.norm() + _EPS)
            p.sub_(N_OI.mul_(length).view_as(p), alpha=self.param_groups[0]["lr"])


class ScaledAdam(torch.optim.Optimizer):
    """icefall's optimizer for Zipformer: Adam with steps proportional to the RMS r of each tensor.

    The scale of a tensor is learned as a parameter, with gradient s and second moment V. m is the
    momentum of updates, v the second moment of the gradient.

    Source: Yao et al. 2024, "Zipformer", section 3.5; icefall's zipformer/optim.py.
    """

    def __init__(self, params: Iterable[Tensor], *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
                 clipping_scale: float = 2.0, min_rms: float = 0.05) -> None:
        super().__init__(params, {"lr": 0.045})
        self.betas, self.eps, self.clipping_scale, self.min_rms = betas, eps, clipping_scale, min_rms
        self.norms, self.threshold, self.num_steps = torch.zeros(_CLIPPING_PERIOD, dtype=torch.float64), math.inf, 0
        self.params: list[Any] = self.param_groups[0]["params"]
        for p in self.params:
            self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            if p.numel() > 1:
                self.state[p] |= {"r": _rms(p.detach()), "V": p.new_zeros(()), "s": p.new_zeros(_PERIOD)}

    @torch.no_grad()
    def step(self, num_samples: int | None = None) -> None:  # type: ignore[override]
        lr, (beta_1, beta_2) = self.param_groups[0]["lr"], self.betas
        factor, number = self._clipping_factor(), self.num_steps + 1
        for p in self.params:
            state = self.state[p]
            # 0 times NaN is NaN.
            g = p.grad * factor if factor else torch.zeros_like(p)
            v = state["v"].mul_(beta_2).addcmul_(g, g, value=1.0 - beta_2)
            correction = 1.0 - beta_2 ** number
            root = (v / correction if correction < 0.99 else v).sqrt() + self.eps
            step = g * (-lr * (1.0 if "r" in state else _SCALE_LR)) / root
            if "r" in state:
                phase = self.num_steps % _PERIOD
                state["s"][phase] = torch.dot(p.flatten(), g.flatten())
                if phase == _PERIOD - 1:
                    state["r"].copy_(_rms(p))
                step.mul_(state["r"].clamp(min=self.min_rms))
                if phase == _PERIOD - 1:
                    step.addcmul_(p, self._scale_step(state, lr, number // _PERIOD))
            state["m"].mul_(beta_1).add_(step, alpha=1.0 - beta_1)
            p.add_(state["m"])
            if "r" not in state:
                p.clamp_(-_MAX_SCALAR, _MAX_SCALAR)
        self.num_steps += 1

    def _scale_step(self, state: dict[str, Tensor], lr: float, number: int) -> Tensor:
        """Return the relative change of a tensor at the `number`-th update of its scale."""
        beta = self.betas[1] ** _PERIOD
        r, s, V = state["r"], state["s"], state["V"]
        V.mul_(beta).add_(s.square().mean(), alpha=1.0 - beta)
        q = -lr * _SCALE_LR * math.sqrt(1.0 - beta ** number) * s.sum() / (V.sqrt() + self.eps)
        # Do not shrink a tensor that is too small, and do not grow one beyond the maximum.
        q = q.masked_fill(r < self.min_rms, 0.0).clamp(-_MAX_SCALE_STEP, _MAX_SCALE_STEP)
        return torch.minimum(q, (_MAX_RMS - r) / r)

    def _clipping_factor(self) -> float:
        """Return the factor that limits the gradient norm to a multiple of the last 100's median.

        The threshold is also updated at steps 10, 20 and 40, and is doubled there. 0: not finite.
        """
        norms = torch.stack([p.grad.norm() * self.state[p].get("r", _SCALE_LR) for p in self.params])
        norm, step = float(norms.norm()), self.num_steps
        # Step 0 is not recorded, as in icefall.
        if step > 0:
            self.norms[step % _CLIPPING_PERIOD] = norm
        if (step > 0 and step % _CLIPPING_PERIOD == 0) or step in (10, 20, 40):
            num = min(step, _CLIPPING_PERIOD)
            # Entries that were not recorded yet are zeros, which are sorted first.
            median = float(self.norms.sort().values[-num:][num // 4 * 2])
            self.threshold = self.clipping_scale * median * (2.0 if step < _CLIPPING_PERIOD else 1.0)
        return min(1.0, self.threshold / (norm + 1e-20)) if math.isfinite(norm) else 0.0


def _rms(p: Tensor) -> Tensor:
    return p.square().mean().sqrt()


# by the setting of their runs in results/, when they were kinds of `ngsgd train`
RIVALS: dict[str, Any] = {"optimizer=normuon": NorMuon, "optimizer=scaled_adam": ScaledAdam}
