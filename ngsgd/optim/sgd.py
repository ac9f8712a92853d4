"""SGD with Kaldi's limits on parameter change: the update rule that NG-SGD shares.

Learning rates are per sample on a loss that is *summed* over the minibatch: with a mean-reduced loss, multiply them by
the minibatch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.errors import DivergenceError
from ngsgd.ops.max_change import Limits, max_change_limits
from ngsgd.ops.orthonormal import constrain_orthonormal

_ORTHONORMAL_PERIOD = 4  # a layer is pulled back every fourth step; Kaldi draws lots with probability 1/4


@dataclass(frozen=True)
class StepActivity:
    """How often the limits were active since the last `reset_activity`."""

    num_steps: int
    num_skipped: int               # steps left out because a gradient was not finite
    layer_share: dict[str, float]  # component -> share of steps its max_change shortened, 0 to 1
    model_share: float             # share of steps max_param_change shortened, 0 to 1


class _Moving(NamedTuple):
    """The components that have gradients in this step: C components, P parameters."""

    indices: list[int]             # of the param groups, C
    params: list[list[Tensor]]     # C x its parameters
    directions: list[list[Tensor]]  # the change, but for the rate below
    rates: tuple[float, ...]       # C: change = rate * direction


class SGD(torch.optim.Optimizer):
    """Plain SGD on the parameters of `model`, with momentum, l2 and limits on the change per minibatch.

    A component is a module that owns parameters; each is one param group, named by its module path, so that a
    component's `lr`, `lr_factor`, `max_change`, `weight_decay` or `orthonormal_constraint` can be set in `param_groups`.

    Args:
        model: the module to train; frozen parameters are left alone.
        lr: per sample, on a loss summed over the minibatch.
        momentum: the velocity is multiplied by 1 - momentum when applied (Kaldi), so lr keeps its meaning.
        max_change: limit on the L2 norm of one component's change per minibatch; 0 = none.
        max_param_change: limit on the L2 norm of the whole model's change per minibatch; 0 = none.
        weight_decay: Kaldi's l2; adds weight_decay * |p|^2 per sample to the loss.  `step` then needs `num_samples`.
        layer_options: settings of single components by name or pattern, as {"output": {"max_change": 1.5}}; later entries win.
            Keys: lr_factor (multiplies lr), max_change, weight_decay, orthonormal_constraint (0 none, > 0 the scale that the
            rows of the weight are pulled to, < 0 a scale of their own; Kaldi's semi-orthogonal layers).
        on_nonfinite: what a gradient with NaN or Inf does: "skip" leaves the minibatch out and counts it, "raise" raises
            DivergenceError, for which every step waits for the device.
    """

    _counts: Tensor

    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.0, max_change: float = 0.75,
                 max_param_change: float = 2.0, weight_decay: float = 0.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None, on_nonfinite: str = "skip") -> None:
        self._init_groups(model, {"lr": lr, "lr_factor": 1.0, "max_change": max_change, "weight_decay": weight_decay,
                                  "orthonormal_constraint": 0.0}, layer_options)
        require_non_negative(max_param_change=max_param_change)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum: {momentum}")
        if on_nonfinite not in ("skip", "raise"):
            raise ValueError(f"Invalid on_nonfinite: {on_nonfinite!r}; choose skip or raise")
        self.momentum = momentum
        self.max_param_change = max_param_change
        self.on_nonfinite = on_nonfinite
        self._step_count = 0
        self._constants: dict[Any, Tensor] = {}
        self.reset_activity()

    def _init_groups(self, model: nn.Module, defaults: dict[str, Any],
                     layer_options: Mapping[str, Mapping[str, Any]] | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(self).__name__} takes the module, not {type(model).__name__}: it limits the change "
                            "of each layer, and parameters alone do not say which belong together")
        groups = components(model)
        if not groups:
            raise ValueError("the module has no parameter that requires a gradient")
        set_options(groups, layer_options or {}, set(defaults) - {"lr"})
        for group in groups:
            require_non_negative(**{key: group.get(key, default) for key, default in defaults.items()
                                    if key != "orthonormal_constraint" and isinstance(default, (int, float))})
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], float] | None = None, *, scale: float = 1.0,  # type: ignore[override]
             num_samples: int | None = None) -> float | None:
        """Applies the gradients, shortened where a limit asks for it; skips the minibatch if one is not finite.

        `scale` multiplies the change and the limits; backstitch training takes a step of -alpha, then, on fresh gradients, one
        of 1 + alpha.  Weight decay is not multiplied, and is left out of a step back.  `num_samples` is the number of samples
        summed in the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply(scale, num_samples)
        return loss

    @torch.no_grad()
    def _apply(self, scale: float, num_samples: int | None) -> None:
        moving = self._moving(scale, num_samples)
        if not moving.indices:
            return
        norms_C = self._norms(moving)
        factors_C = self._own_factors(moving)
        if factors_C is not None:
            norms_C = norms_C * factors_C
        groups = [self.param_groups[index] for index in moving.indices]
        max_changes_C = self._constant(norms_C, *(float(group["max_change"]) for group in groups))
        limits = max_change_limits(norms_C, max_changes_C, self.max_param_change, scale=scale * (1.0 - self.momentum),
                                   max_change_scale=abs(scale))
        if self.on_nonfinite == "raise" and not bool(limits.is_finite):
            bad = [group["name"] for group, norm in zip(groups, norms_C.tolist(), strict=True) if not norm < float("inf")]
            raise DivergenceError(f"the gradient of {', '.join(bad)} is not finite; lower the learning rate or skip such "
                                  "minibatches with on_nonfinite=\"skip\".")
        factors_C = limits.factors_C if factors_C is None else limits.factors_C * factors_C
        # the fused step subtracts, hence the sign
        _add(moving, -factors_C * self._constant(norms_C, *moving.rates), ~limits.is_finite)
        self._count(limits, moving.indices)
        if scale > 0.0:  # once per minibatch, also with backstitch
            self._constrain(groups)

    def _moving(self, scale: float, num_samples: int | None) -> _Moving:
        """What to add, but for the limits; p.grad is left as it is."""
        indices, params, directions, rates = [], [], [], []
        for index, group in enumerate(self.param_groups):
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient:
                lr = group["lr"] * group["lr_factor"]
                decay = self._decay(group, scale, num_samples)
                indices.append(index)
                params.append(with_gradient)
                if decay or self.momentum:
                    directions.append([self._delta(p, lr, decay) for p in with_gradient])
                    rates.append(1.0)
                else:
                    directions.append([_laid_out(p) for p in with_gradient])
                    rates.append(-lr)
        return _Moving(indices, params, directions, tuple(rates))

    def _decay(self, group: dict[str, Any], scale: float, num_samples: int | None) -> float:
        """The multiple of p that weight decay takes off, before `scale` is applied."""
        if not group["weight_decay"] or scale <= 0.0:
            return 0.0
        if num_samples is None:
            raise ValueError("weight_decay is per sample: call step(num_samples=...) with the size of the minibatch")
        return float(2.0 * num_samples * group["weight_decay"] * group["lr"] * group["lr_factor"] / scale)

    def _delta(self, p: Tensor, lr: float, decay: float) -> Tensor:
        """The change of `p` before any limit, in the direction that lowers the loss; with momentum, the velocity itself."""
        assert p.grad is not None
        if not self.momentum:
            return torch.add(p.grad * -lr, p, alpha=-decay)
        if "velocity" not in self.state[p]:
            self.state[p]["velocity"] = torch.zeros_like(p)
        velocity: Tensor = self.state[p]["velocity"]
        velocity.mul_(self.momentum).add_(p.grad, alpha=-lr)
        return velocity.add_(p, alpha=-decay) if decay else velocity

    def _norms(self, moving: _Moving) -> Tensor:
        """L2 norm of each component's change."""
        norms_P = torch.stack([norm for ds in moving.directions for norm in _norms(ds)])
        component_P = tuple(c for c, ds in enumerate(moving.directions) for _ in ds)
        index_P = self._constant(norms_P, *component_P, dtype=torch.int64)
        sum_sq_C = norms_P.new_zeros(len(moving.indices)).index_add_(0, index_P, norms_P.square())
        return sum_sq_C.sqrt() * self._constant(norms_P, *moving.rates).abs()

    def _own_factors(self, moving: _Moving) -> Tensor | None:
        """Factors of a subclass on the change of each component, before the limits."""
        return None

    def _constant(self, like: Tensor, *values: float, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers on the device, sent there only when they change."""
        key = (values, dtype or like.dtype, like.device)
        if key not in self._constants:
            if len(self._constants) > 1000:  # rates of a scheduler that are past
                self._constants.clear()
            self._constants[key] = torch.tensor(values, dtype=dtype or like.dtype, device=like.device)
        return self._constants[key]

    def _count(self, limits: Limits, indices: list[int]) -> None:
        self._num_steps += 1
        hits = torch.cat([(~limits.is_finite)[None], torch.cat([limits.model_hit[None], limits.layer_hits_C]) & limits.is_finite])
        counts = self._counts.to(hits.device)  # stays on the device: no sync per step
        self._counts = counts.index_add_(0, self._constant(hits, 0, 1, *(i + 2 for i in indices), dtype=torch.int64),
                                         hits.to(counts.dtype))

    def _constrain(self, groups: Iterable[dict[str, Any]]) -> None:
        """Pulls the weights of semi-orthogonal layers back, one layer after the other."""
        self._step_count += 1
        for index, group in enumerate(groups):
            if group["orthonormal_constraint"] and (self._step_count + index) % _ORTHONORMAL_PERIOD == 0:
                for p in group["params"]:
                    if p.ndim > 1:
                        constrain_orthonormal(p, group["orthonormal_constraint"])

    def activity(self) -> StepActivity:
        """How often each limit was active; reading it waits for the device once."""
        num_skipped, model_hits, *layer_hits = self._counts.tolist()
        steps = max(self._num_steps, 1)
        names = [group["name"] for group in self.param_groups]
        return StepActivity(self._num_steps, num_skipped,
                            {name: hits / steps for name, hits in zip(names, layer_hits, strict=True)},
                            model_hits / steps)

    def state_dict(self) -> dict[str, Any]:
        """torch's state plus "step_count", which says whose turn it is among semi-orthogonal layers."""
        return {**super().state_dict(), "step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where the state was taken."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._step_count = int(state_dict.get("step_count", 0))

    def reset_activity(self) -> None:
        self._num_steps = 0
        self._counts = torch.zeros(2 + len(self.param_groups), dtype=torch.int64)


def _add(moving: _Moving, steps_C: Tensor, is_skipped: Tensor) -> None:
    """p -= step * direction for each component in one kernel, nothing where `is_skipped`; no host sync."""
    found_inf = is_skipped.to(torch.float32)
    for params, directions, step in zip(moving.params, moving.directions, steps_C.unbind(), strict=True):
        torch._fused_sgd_(params, directions, [], weight_decay=0.0, momentum=0.0, lr=step, dampening=0.0, nesterov=False,
                          maximize=False, is_first_step=False, grad_scale=None, found_inf=found_inf)
        torch.autograd.graph.increment_version(params)  # fused kernels leave that out, and autograd would not see stale tensors
        if directions[0] is not params[0].grad:  # a velocity, or a copy that nobody sees again
            # after a skipped minibatch the velocity starts again from zero, as in Kaldi
            for direction in directions:
                direction.masked_fill_(is_skipped, 0.0)


def _laid_out(p: Tensor) -> Tensor:
    """The gradient with the strides of the parameter, as the fused step needs it; itself where it has them."""
    grad = p.grad
    assert grad is not None
    if grad.is_sparse or grad.stride() != p.stride():
        return torch.empty_like(p).copy_(grad.to_dense())
    return grad


def _norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    # half precision would overflow in the sum of squares
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch._foreach_norm(tensors, 2, dtype=wide)


def components(model: nn.Module) -> list[dict[str, Any]]:
    """One param group per module that owns trainable parameters; a shared parameter belongs to its first owner."""
    groups, seen = [], set[int]()
    for name, module in model.named_modules():
        params = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in params)
        if params:
            groups.append({"params": params, "name": name or name_of(model)})
    return groups


def name_of(model: nn.Module) -> str:
    """What a model that is a single layer is called: its class, also while that is changed."""
    return type(model).__name__.removeprefix("NaturalGradient")


def set_options(groups: list[dict[str, Any]], layer_options: Mapping[str, Mapping[str, Any]], known: set[str]) -> None:
    names = [group["name"] for group in groups]
    for pattern, options in layer_options.items():
        if unknown := sorted(set(options) - known):
            raise ValueError(f"Invalid layer_options[{pattern!r}]: no setting {', '.join(unknown)}; there are "
                             f"{', '.join(sorted(known))}")
        matching = [group for group in groups if fnmatchcase(group["name"], pattern)]
        if not matching:
            raise ValueError(f"Invalid layer_options: no component is called {pattern!r}; there are {', '.join(names)}")
        for group in matching:
            group.update(options)


def require_non_negative(**values: float) -> None:
    """Refuses negative numbers and NaN, in torch's words."""
    for name, value in values.items():
        if not value >= 0.0:
            raise ValueError(f"Invalid {name}: {value}")
