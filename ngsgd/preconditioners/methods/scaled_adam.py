"""ScaledAdam, the optimizer of icefall's Zipformer recipe, as a preconditioner.

The direction is minus the update divided by the learning rate. Each update is proportional to the
root mean square of its tensor, whose scale is learned as a parameter. Adam's moment v normalizes
the gradient first, and the momentum averages complete updates last.

Letters: p is a parameter tensor with gradient g and root mean square r. The gradient of its scale
is s. The momentum of updates is m. The second moments of g and s are v and V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import upcast
from ngsgd.errors import DivergenceError, OptimizerStateError, warn
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.options import EveryStepOptions, momentum_problems
from ngsgd.preconditioners.states import OWN, Layout, State, real_tensor, require_counters

# Constants of icefall, which no recipe changes.
# steps between two updates of r and of the scale
_PERIOD = 4
# learning rate of scales and scalars, relative to that of other parameters
_SCALE_LR = 0.1
# limits on r, on one change of the scale, and on the absolute value of a scalar
_MAX_RMS, _MAX_SCALE_STEP, _MAX_SCALAR = 3.0, 0.1, 10.0
# steps between two updates of the clipping threshold, and earlier steps that also update it
_CLIPPING_PERIOD, _EARLY_STEPS = 100, (10, 20, 40)
# Adam's bias correction ends at this value of its divisor.
_CORRECTED = 0.99


@dataclass(frozen=True)
class ScaledAdamOptions(EveryStepOptions):
    """Options of ScaledAdam."""

    # eps: added to the root of second moments
    damping: float = 1e-8
    # beta 2: decay of second moments
    ema_decay: float = 0.98
    # beta 1: decay of the average of updates, in [0, 1)
    momentum: float = 0.9
    # limit on the gradient norm, relative to its recent median (icefall: 2); 0 = none
    clipping_scale: float = 2.0
    # smallest r of a step: tensors that start at 0 need 0.01 to 0.1
    min_rms: float = 1e-5

    def problems(self) -> list[str]:
        found = [*super().problems(), *momentum_problems(self.momentum)]
        if not self.clipping_scale >= 0.0:
            found.append(f"clipping_scale is {self.clipping_scale}; it must be at least 0, where 0 is no limit.")
        if not 0.0 < self.min_rms <= _MAX_RMS:
            found.append(f"min_rms is {self.min_rms}; it must be above 0 and at most {_MAX_RMS:g}.")
        if self.layer_options:
            found.append("layer_options is set; this method has no settings of single layers.")
        return found


class ScaledAdam(Preconditioner):
    """icefall's ScaledAdam: Adam with steps proportional to the RMS of each tensor.

    `step` needs the learning rate, typically 0.045 with the schedule `ngsgd.optim.Eden`.
    `torch.optim.SGD` with this rate and momentum 0 then takes the steps of ScaledAdam. Use the
    gradient of a summed loss as in icefall: the steps do not depend on the scale of the loss as
    long as the gradient is far above eps. A gradient that is not finite counts as zero.

    Args:
        model: the module to precondition.
        damping: eps, added to the root of second moments. Default 1e-8.
        ema_decay: beta 2, decay of second moments. Default 0.98.
        momentum: beta 1, decay of the average of updates, in [0, 1). Default 0.9.
        clipping_scale: limit on the norm of the gradients times r, relative to the median of the
            last 100 norms; 0 = none. Default 2.
        min_rms: smallest r of a step. Default 1e-5, with which tensors that start at 0 hardly
            change; use 0.01 to 0.1 for models with such weights.
        options: see `Preconditioner`; layer_options is not supported.

    Raises:
        DivergenceError: half of the last 100 minibatches had a gradient that is not finite.

    Source: Yao et al. 2024, "Zipformer", section 3.5; icefall's zipformer/optim.py.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = ScaledAdam(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
        >>> loss = preconditioner.evaluate(lambda: cross_entropy(model(x), y))
        >>> preconditioner.step(lr=0.045)
    """

    Options = ScaledAdamOptions
    joins_bias = False
    agrees_over_ranks = True
    needs_lr = True
    after_skip = "Their gradient counted as zero."

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._clipping = MedianClipping(self.options.clipping_scale)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self._shape(name)
        found: dict[str, Sequence[int]] = {"statistics.m": shape, "statistics.v": shape}
        if math.prod(shape) > 1:
            found |= {"statistics.r": (), "statistics.V": (), "statistics.s": (_PERIOD,)}
        return found

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the moments."""

    def refresh(self) -> None:
        """Do nothing; the moments are applied directly."""

    def curvature(self, name: str) -> State:
        """Return m, v, r, V and the last four s of a parameter."""
        return dict(self.statistics[name])

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not grads:
            return {}
        parameters = dict(self.model.named_parameters())
        params = [self.oriented(name, upcast(parameters[name].detach())) for name in grads]
        new = {name: p for name, p in zip(grads, params, strict=True) if name not in self.statistics}
        for name, p in new.items():
            # The weight of a parameter is the number of its steps.
            self.statistics[name], self.weights[name] = _initial_state(p), 0.0
        self._warn_of_zeros(new)
        states = [self.statistics[name] for name in grads]
        steps = [int(self.weights[name]) for name in grads]
        gs = self._clipped(list(grads.values()), states)
        updates = self._adam_updates(gs, states, steps)
        self._scale(updates, params, gs, states, steps)
        ms = [state["m"] for state in states]
        torch._foreach_mul_(ms, self.options.momentum)
        torch._foreach_add_(ms, updates, alpha=1.0 - self.options.momentum)
        for name in grads:
            self.weights[name] += 1.0
        return dict(zip(grads, self._directions(ms, params), strict=True))

    def _warn_of_zeros(self, params: Mapping[str, Tensor]) -> None:
        """Warn of new matrices of zeros, whose steps have the length lr * min_rms."""
        matrices = [name for name, p in params.items() if p.ndim > 1 and p.numel() > 1]
        if not matrices or self.options.min_rms >= 1e-3:
            return
        sizes = torch.stack([self.statistics[name]["r"] for name in matrices]).tolist()
        if zeros := [name for name, r in zip(matrices, sizes, strict=True) if r < self.options.min_rms]:
            warn(f"ScaledAdam hardly changes {', '.join(zeros[:5])}, because the initial values are 0 and steps are proportional "
                 "to them; set min_rms to 0.01 to 0.1, or initialize them.")

    def _clipped(self, gs: list[Tensor], states: Sequence[State]) -> list[Tensor]:
        """Return the gradients times the clipping factor; zeros if a gradient is not finite."""
        norms = torch.stack(torch._foreach_norm(gs))
        factors = torch.stack([state["r"] if "r" in state else norms.new_tensor(_SCALE_LR) for state in states])
        # the only wait for the device in a step
        norm = torch.linalg.vector_norm(norms * factors).item()
        factor = self._clipping.factor(norm, self.num_steps)
        if not math.isfinite(norm):
            self.note_skipped()
            # 0 times NaN is NaN.
            return [torch.zeros_like(g) for g in gs]
        return gs if factor == 1.0 else list(torch._foreach_mul(gs, factor))

    def _adam_updates(self, gs: list[Tensor], states: Sequence[State], steps: Sequence[int]) -> list[Tensor]:
        """Return -lr g / (sqrt(v) + eps)."""
        beta_2, vs = self.options.ema_decay, [state["v"] for state in states]
        torch._foreach_mul_(vs, beta_2)
        torch._foreach_addcmul_(vs, gs, gs, value=1.0 - beta_2)
        divisors = [1.0 - beta_2 ** (step + 1) for step in steps]
        roots = torch._foreach_mul(vs, [1.0 / x if x < _CORRECTED else 1.0 for x in divisors])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, self.options.damping)
        updates = torch._foreach_mul(gs, [-self._lr * (1.0 if "r" in state else _SCALE_LR) for state in states])
        torch._foreach_div_(updates, roots)
        return list(updates)

    def _scale(self, updates: Sequence[Tensor], params: Sequence[Tensor], gs: Sequence[Tensor], states: Sequence[State],
               steps: Sequence[int]) -> None:
        """Multiply updates by r, and add the change of the scale in every fourth step."""
        for d, p, g, state, step in zip(updates, params, gs, states, steps, strict=True):
            if "r" not in state:
                continue
            phase = step % _PERIOD
            state["s"][phase] = torch.dot(p.flatten(), g.flatten())
            if phase == _PERIOD - 1:
                state["r"].copy_(_rms(p))
            d.mul_(state["r"].clamp(min=self.options.min_rms))
            if phase == _PERIOD - 1:
                d.addcmul_(p, self._scale_step(state, (step + 1) // _PERIOD))

    def _scale_step(self, state: State, number: int) -> Tensor:
        """Return the relative change q of a tensor at the `number`-th update of its scale."""
        beta = self.options.ema_decay ** _PERIOD
        r, s, V = state["r"], state["s"], state["V"]
        V.mul_(beta).add_(s.square().mean(), alpha=1.0 - beta)
        lr = self._lr * _SCALE_LR * math.sqrt(1.0 - beta ** number)
        q = -lr * s.sum() / (V.sqrt() + self.options.damping)
        # Do not shrink a tensor that is too small, and do not grow one beyond the maximum.
        q = q.masked_fill(r < self.options.min_rms, 0.0).clamp(-_MAX_SCALE_STEP, _MAX_SCALE_STEP)
        return torch.minimum(q, (_MAX_RMS - r) / r)

    def _directions(self, ms: list[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
        """Return the directions with which SGD takes the steps m."""
        # SGD with rate 0 takes no step, whatever the direction.
        if self._lr == 0.0:
            return [torch.zeros_like(m) for m in ms]
        steps = [m if p.numel() > 1 else m.clamp(-_MAX_SCALAR - p, _MAX_SCALAR - p) for m, p in zip(ms, params, strict=True)]
        return list(torch._foreach_div(steps, -self._lr))

    def counters(self) -> dict[str, Any]:
        return {**super().counters(), **self._clipping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        require_counters(state, self.counters(), type(self).__name__, dict(self.model.named_parameters()))
        clipping = MedianClipping(self.options.clipping_scale)
        clipping.load_state_dict(state[OWN])
        super().load_state_dict(state)
        self._clipping = clipping


class MedianClipping:
    """Factor that limits gradient norms to a multiple of the median of the last 100.

    The threshold is updated every 100 steps. It is also updated at steps 10, 20 and 40, and is
    doubled there, because norms change fast at the start.

    Args:
        scale: the multiple of the median; 0 disables clipping.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.norms = torch.zeros(_CLIPPING_PERIOD, dtype=torch.float64)
        self.threshold = math.inf

    def factor(self, norm: float, step: int) -> float:
        """Record the norm of a step, counted from 0, and return the factor of its gradients."""
        # Step 0 is not recorded, as in icefall.
        if step > 0:
            self.norms[step % _CLIPPING_PERIOD] = norm
            if step % _CLIPPING_PERIOD == 0 or step in _EARLY_STEPS:
                self._update(step)
        # 1e-20: a gradient of zeros
        return min(1.0, self.threshold / (norm + 1e-20)) if math.isfinite(norm) else 0.0

    def _update(self, step: int) -> None:
        is_early = step in _EARLY_STEPS
        num = step if is_early else _CLIPPING_PERIOD
        # Entries that were not recorded yet are zeros, which are sorted first.
        median = float(self.norms.sort().values[-num:][num // 4 * 2])
        if not math.isfinite(median):
            raise DivergenceError(f"half of the last {num} gradients given to ScaledAdam were not finite; lower the learning rate.")
        if self.scale:
            self.threshold = self.scale * median * (2.0 if is_early else 1.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"clipping_norms": self.norms.clone(),
                "clipping_threshold": torch.tensor(self.threshold, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norms, threshold = (real_tensor(state[key], key) for key in ("clipping_norms", "clipping_threshold"))
        if norms.shape != self.norms.shape or threshold.numel() != 1 or not float(threshold) >= 0.0:
            raise OptimizerStateError(f"the state of ScaledAdam has {norms.numel()} gradient norms and the threshold {threshold}; "
                                      f"it must have {len(self.norms)} norms and a threshold of at least 0.")
        self.norms, self.threshold = norms.to("cpu", torch.float64, copy=True), float(threshold)


def _initial_state(p: Tensor) -> State:
    """Return the state of a parameter before its first step; scalars have no scale."""
    state = {"m": torch.zeros_like(p, memory_format=torch.contiguous_format),
             "v": torch.zeros_like(p, memory_format=torch.contiguous_format)}
    if p.numel() <= 1:
        return state
    return {**state, "r": _rms(p), "V": p.new_zeros(()), "s": p.new_zeros(_PERIOD)}


def _rms(p: Tensor) -> Tensor:
    return p.square().mean().sqrt()
