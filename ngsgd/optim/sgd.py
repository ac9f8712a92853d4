"""SGD with Kaldi's limits on parameter change: the update rule that NG-SGD shares.

Learning rates are per sample on a loss that is *summed* over the minibatch: with a mean-reduced loss, multiply them by
the minibatch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops.max_change import Limits, max_change_limits


@dataclass(frozen=True)
class StepActivity:
    """How often the limits were active since the last `reset_activity`."""

    num_steps: int
    num_skipped: int               # steps left out because a gradient was not finite
    layer_share: dict[str, float]  # component -> share of steps its max_change shortened, 0 to 1
    model_share: float             # share of steps max_param_change shortened, 0 to 1


class SGD(torch.optim.Optimizer):
    """Plain SGD on the parameters of `model`, with momentum, l2 and limits on the change per minibatch.

    A component is a module that owns parameters; each is one param group, named by its module path, so that a
    component's `lr`, `max_change` or `weight_decay` can be set in `param_groups`.

    Args:
        model: the module to train; frozen parameters are left alone.
        lr: per sample, on a loss summed over the minibatch.
        momentum: the velocity is multiplied by 1 - momentum when applied (Kaldi), so lr keeps its meaning.
        max_change: limit on the L2 norm of one component's change per minibatch; 0 = none.
        max_param_change: limit on the L2 norm of the whole model's change per minibatch; 0 = none.
        weight_decay: Kaldi's l2; adds weight_decay * |p|^2 per sample to the loss.  `step` then needs `num_samples`.
    """

    _counts: Tensor

    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.0, max_change: float = 0.75,
                 max_param_change: float = 2.0, weight_decay: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__} takes the module, not {type(model).__name__}: it limits the change "
                            "of each layer, and parameters alone do not say which belong together")
        _require_non_negative(lr=lr, max_change=max_change, max_param_change=max_param_change, weight_decay=weight_decay)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum: {momentum}")
        groups = _components(model)
        if not groups:
            raise ValueError("the module has no parameter that requires a gradient")
        super().__init__(groups, {"lr": lr, "max_change": max_change, "weight_decay": weight_decay})
        self.momentum = momentum
        self.max_param_change = max_param_change
        self.reset_activity()

    def step(self, closure: Callable[[], float] | None = None, *, scale: float = 1.0,  # type: ignore[override]
             num_samples: int | None = None) -> float | None:
        """Applies the gradients, shortened where a limit asks for it; skips the minibatch if one is not finite.

        `scale` multiplies the change and the limits; backstitch training (Kaldi) takes a step of -alpha, then, on
        fresh gradients, one of 1 + alpha.  `num_samples` is the number of samples summed in the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply(scale, num_samples)
        return loss

    @torch.no_grad()
    def _apply(self, scale: float, num_samples: int | None) -> None:
        moved = [(index, group, [p for p in group["params"] if p.grad is not None])
                 for index, group in enumerate(self.param_groups)]
        moved = [(index, group, params) for index, group, params in moved if params]
        if not moved:
            return
        deltas = [[self._delta(p, group, num_samples) for p in params] for _, group, params in moved]
        norms_C = torch.stack([torch.stack([_norm(delta) for delta in ds]).norm() for ds in deltas])
        max_changes_C = norms_C.new_tensor([group["max_change"] for _, group, _ in moved])
        limits = max_change_limits(norms_C, max_changes_C, self.max_param_change, scale=scale * (1.0 - self.momentum),
                                   max_change_scale=abs(scale))
        for (_, _, params), ds, factor in zip(moved, deltas, limits.factors_C.unbind(), strict=True):
            for p, delta in zip(params, ds, strict=True):
                p.add_(torch.where(limits.is_finite, delta * factor.to(delta.dtype), 0.0))
                if self.momentum:
                    # after a skipped minibatch the velocity starts again from zero, as in Kaldi
                    self.state[p]["velocity"] = torch.where(limits.is_finite, delta, 0.0)
        self._count(limits, [index for index, _, _ in moved])

    def _delta(self, p: Tensor, group: dict[str, Any], num_samples: int | None) -> Tensor:
        """The change of `p` before any limit, in the direction that lowers the loss."""
        assert p.grad is not None
        delta: Tensor = p.grad * -group["lr"]
        if group["weight_decay"]:
            if num_samples is None:
                raise ValueError("weight_decay is per sample: call step(num_samples=...) with the size of the minibatch")
            delta.add_(p, alpha=-2.0 * num_samples * group["weight_decay"] * group["lr"])
        if self.momentum and "velocity" in self.state[p]:
            delta.add_(self.state[p]["velocity"], alpha=self.momentum)
        return delta

    def _count(self, limits: Limits, indices: list[int]) -> None:
        self._num_steps += 1
        counts = self._counts.to(limits.factors_C.device)  # stays on the device: no sync per step
        self._counts = counts
        counts[0] += ~limits.is_finite
        counts[1] += limits.model_hit & limits.is_finite
        counts[torch.tensor(indices, device=counts.device) + 2] += limits.layer_hits_C & limits.is_finite

    def activity(self) -> StepActivity:
        """How often each limit was active; reading it waits for the device once."""
        num_skipped, model_hits, *layer_hits = self._counts.tolist()
        steps = max(self._num_steps, 1)
        names = [group["name"] for group in self.param_groups]
        return StepActivity(self._num_steps, num_skipped,
                            {name: hits / steps for name, hits in zip(names, layer_hits, strict=True)},
                            model_hits / steps)

    def reset_activity(self) -> None:
        self._num_steps = 0
        self._counts = torch.zeros(2 + len(self.param_groups), dtype=torch.int64)


def _norm(delta: Tensor) -> Tensor:
    # half precision would overflow in the sum of squares
    norm: Tensor = torch.linalg.vector_norm(delta, dtype=torch.promote_types(delta.dtype, torch.float32))
    return norm


def _components(model: nn.Module) -> list[dict[str, Any]]:
    """One param group per module that owns trainable parameters; a shared parameter belongs to its first owner."""
    groups, seen = [], set[int]()
    for name, module in model.named_modules():
        params = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in params)
        if params:
            groups.append({"params": params, "name": name or type(model).__name__})
    return groups


def _require_non_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0.0:  # also refuses NaN
            raise ValueError(f"Invalid {name}: {value}")
