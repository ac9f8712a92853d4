"""SGD with Kaldi's update-norm limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.arguments import checks_arguments
from ngsgd.ops.device.limited_update import Layout, is_supported, limited_step
from ngsgd.ops.device.triton_kernels import Tables
from ngsgd.ops.max_change import Limits, max_change_limits
from ngsgd.ops.tensors import HALF, DeviceNumbers, dense
from ngsgd.optim import updates
from ngsgd.optim.groups import OF_LAYERS
from ngsgd.optim.optimizer import Optimizer
from ngsgd.optim.rule import Factors, Group, Minibatch, Rule, Step, Stepped

# Parameters stay finite under 1e8 steps of this fraction of the largest number.
_LARGEST_STEP = 1e-8


class _Moving(NamedTuple):
    """Components with gradients in this step: C components, P parameters."""

    # indices of the param groups, C
    indices: list[int]
    params: list[list[Tensor]]     # C lists of parameters
    # update before multiplication by the rate below
    directions: list[list[Tensor]]
    rates: tuple[float, ...]       # C: update = rate * direction
    # learning rate of the first component; the others are relative to it
    momentum: float
    # C: whether the directions are velocities or temporary tensors rather than gradients
    are_own: list[bool]
    # C: whether the directions are velocities
    are_velocities: list[bool]
    # of the parameters
    dtypes: set[torch.dtype]


class Sgd(Rule):
    """SGD with momentum and limits on the norm of updates."""

    def __init__(self) -> None:
        self._constant = DeviceNumbers()
        self._layouts = Tables[Layout]()
        # Static memory of directions that are no velocities, by address and shape of the parameter.
        self._memory: dict[Any, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": {}}

    def step(self, optimizer: Stepped, minibatch: Minibatch, factors: Factors | None = None) -> Step | None:
        moving = self._moving(optimizer, minibatch)
        if not moving.indices:
            return None
        if factors is None and not moving.params[0][0].is_cpu and (
                optimizer.max_param_change or all(optimizer.param_groups[index]["max_change"] for index in moving.indices)):
            layout = self._layout(moving)
            if layout is not None:
                return self._step_of(layout, moving, optimizer, minibatch)
        norms_C = self._norms(moving)
        groups = [optimizer.param_groups[index] for index in moving.indices]
        own_C = None if factors is None else factors(groups, moving.params[0][0])
        if own_C is not None:
            norms_C = norms_C * own_C
        max_changes_C = self._constant(norms_C, *(float(group["max_change"]) or math.inf for group in groups))
        limits = max_change_limits(norms_C, max_changes_C, optimizer.max_param_change,
                                   scale=minibatch.scale * (1.0 - moving.momentum), max_change_scale=abs(minibatch.scale))
        if minibatch.others_finite is not None:
            limits = limits._replace(total=torch.where(minibatch.others_finite.to(norms_C.device), limits.total, math.nan))
        factors_C = limits.factors_C if own_C is None else limits.factors_C * own_C
        # The fused step subtracts.
        steps_C = factors_C * self._constant(norms_C, *(-rate for rate in moving.rates))
        proposed: dict[Tensor, Tensor] = {}
        if not (optimizer.max_param_change and moving.dtypes <= updates.FUSED):
            limits, proposed = _checked(moving, limits, steps_C, groups, optimizer.max_param_change)
        # No host synchronization: the kernel has no effect if this is not 0.
        found_inf = torch.ne(limits.total, limits.total, out=torch.empty((), dtype=torch.float32, device=norms_C.device))
        for params, directions, step in zip(moving.params, moving.directions, steps_C.unbind(), strict=True):
            fused, along = params, directions
            if proposed:
                pairs = [(p, d) for p, d in zip(params, directions, strict=True) if p not in proposed]
                fused, along = [p for p, _ in pairs], [d for _, d in pairs]
            if fused:
                torch._fused_sgd_(fused, along, [], weight_decay=0.0, momentum=0.0, lr=step, dampening=0.0, nesterov=False,
                                  maximize=False, is_first_step=False, grad_scale=None, found_inf=found_inf)
            # Fused kernels do not increment the version; autograd would not detect stale tensors.
            torch.autograd.graph.increment_version(params)
        for p, value in proposed.items():
            updates.replace(p, value, found_inf)
        # Velocities and temporary copies may be changed in place.
        own = [direction for directions, is_own in zip(moving.directions, moving.are_own, strict=True) if is_own
               for direction in directions]
        if own:
            is_skipped = found_inf.bool()
            for direction in own:
                # After a skipped minibatch the velocity restarts from zero, as in Kaldi.
                direction.masked_fill_(is_skipped, 0.0)
        optimizer.count(limits, moving.indices)
        return Step(moving.indices, found_inf)

    def _layout(self, moving: _Moving) -> Layout | None:
        """Return the layout of the parameters and directions; None without operators for them."""
        params = [p for own in moving.params for p in own]
        if not is_supported(params, [direction for own in moving.directions for direction in own]):
            return None
        static, memory, copied = [], [], []
        for own, directions, is_velocity in zip(moving.params, moving.directions, moving.are_velocities, strict=True):
            static.append(directions if is_velocity else [self._memory_of(p) for p in own])
            if not is_velocity:
                copied += directions
                memory += static[-1]
        if copied:
            torch._foreach_copy_(memory, copied)
        key = (tuple(map(len, moving.params)), *(tensor.data_ptr() for own in (*moving.params, *static) for tensor in own))
        return self._layouts.get(key, lambda: Layout(moving.params, static))

    def _memory_of(self, p: Tensor) -> Tensor:
        key = p.data_ptr(), p.shape
        if key not in self._memory:
            self._memory[key] = torch.empty_like(p)
        return self._memory[key]

    def _step_of(self, layout: Layout, moving: _Moving, optimizer: Stepped, minibatch: Minibatch) -> Step:
        limits = (float(optimizer.param_groups[index]["max_change"]) or math.inf for index in moving.indices)
        constants_2C = self._constant(layout.partials_T, *moving.rates, *limits).view(2, -1)
        others = minibatch.others_finite
        found, is_skipped = limited_step(
            layout, constants_2C, optimizer.max_param_change, scale=minibatch.scale, size_scale=1.0 - moving.momentum,
            others_finite=None if others is None else others.to(constants_2C.device))
        optimizer.count(found, moving.indices)
        return Step(moving.indices, is_skipped)

    def _moving(self, optimizer: Stepped, minibatch: Minibatch) -> _Moving:
        """Return the updates before limits; p.grad is not changed."""
        indices, params, directions, rates, are_own, are_velocities = [], [], [], [], [], []
        groups, state = optimizer.param_groups, optimizer.state
        common = float(groups[0]["momentum"])
        with_velocity: dict[tuple[float, float, float], list[Tensor]] = {}
        for index, group in enumerate(groups):
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient and group["rule"] != "adamw":
                lr, momentum = group["lr"] * group["lr_factor"] * minibatch.gradient_scale, float(group["momentum"])
                relative = 1.0 if momentum == common else (1.0 - momentum) / (1.0 - common)
                decay = _decay(optimizer, group, minibatch)
                indices.append(index)
                are_own.append(bool(decay or momentum))
                are_velocities.append(bool(momentum))
                if decay or momentum:
                    if momentum:
                        directions.append([updates.accumulator(state[p], "velocity", p) for p in with_gradient])
                        with_velocity.setdefault((momentum, lr, decay), []).extend(with_gradient)
                    else:
                        directions.append([
                            torch.add(dense(p.grad).to(updates.accumulator_dtype(p)) * -lr, p,
                                      alpha=-decay)
                            for p in with_gradient if p.grad is not None])
                    rates.append(relative)
                else:
                    directions.append([updates.laid_out_gradient(p) for p in with_gradient])
                    rates.append(-lr * relative)
                params.append(with_gradient)
        # All velocities of one kind together, because on a GPU each operation is a launch.
        for (momentum, lr, decay), moved in with_velocity.items():
            velocities = [state[p]["velocity"] for p in moved]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, [dense(p.grad) for p in moved if p.grad is not None], alpha=-lr)
            if decay:
                torch._foreach_add_(velocities, moved, alpha=-decay)
        dtypes = {p.dtype for own in params for p in own}
        if not dtypes.isdisjoint(updates.COMPLEX):
            params = [[updates.as_real(p.detach()) for p in own] for own in params]
            directions = [[updates.as_real(direction) for direction in own] for own in directions]
            dtypes = {p.dtype for own in params for p in own}
        return _Moving(indices, params, directions, tuple(rates), common, are_own, are_velocities, dtypes)

    def _norms(self, moving: _Moving) -> Tensor:
        # Half precision would overflow in the sum of squares.
        upcast = functools.reduce(torch.promote_types, moving.dtypes, torch.float32)
        norms = iter(torch._foreach_norm([d for ds in moving.directions for d in ds], 2, dtype=upcast))
        most = max(map(len, moving.directions))
        rows = [[next(norms) for _ in ds] for ds in moving.directions]
        if any(len(row) < most for row in rows):
            zero = self._constant(rows[0][0], 0.0)[0]
            rows = [row + [zero] * (most - len(row)) for row in rows]
        norms_P = torch.stack([norm for row in rows for norm in row])
        norms_C = norms_P if most == 1 else norms_P.square().view(-1, most).sum(dim=1).sqrt()
        return norms_C * self._constant(norms_P, *map(abs, moving.rates))


def _checked(moving: _Moving, limits: Limits, steps_C: Tensor, groups: list[Group],
             max_param_change: float) -> tuple[Limits, dict[Tensor, Tensor]]:
    """Return (limits, new values of parameters that the fused kernel does not update).

    Their total is NaN, which skips the minibatch, if a parameter might not stay finite.
    """
    proposed: dict[Tensor, Tensor] = {}
    if not moving.dtypes <= updates.FUSED:
        proposed = {p: torch.sub(p.float(), direction.float() * step).to(p.dtype)
                    for params, directions, step in zip(moving.params, moving.directions, steps_C.unbind(), strict=True)
                    for p, direction in zip(params, directions, strict=True)
                    # float16 overflows at 65504, so that its new values are checked first.
                    if p.dtype != direction.dtype
                    or (p.dtype in HALF and not (p.dtype == torch.bfloat16 and p.is_cuda))}
    if proposed:
        is_finite = updates.all_finite(list(proposed.values())).to(limits.total.device)
        limits = limits._replace(total=torch.where(is_finite, limits.total, math.nan))
    # Limits bound the update, except of layers without one.
    if not max_param_change and not all(group["max_change"] for group in groups):
        # New values in float16 were checked one by one.
        largest = min(torch.finfo(torch.float32 if dtype == torch.float16 else dtype).max for dtype in moving.dtypes)
        is_small = limits.total <= _LARGEST_STEP * largest
        limits = limits._replace(total=torch.where(is_small, limits.total, math.nan))
    return limits, proposed


def _decay(optimizer: Stepped, group: Group, minibatch: Minibatch) -> float:
    """Return the multiple of p that weight decay subtracts, before `scale`."""
    if not group["weight_decay"] or minibatch.scale <= 0.0:
        return 0.0
    num_samples = minibatch.num_samples
    if num_samples is None:
        num_samples = 1
        optimizer.warn_once("weight decay", "weight_decay is per sample and step() was called without num_samples: the loss is "
                                            "treated as a mean over the minibatch, num_samples=1; with a sum call "
                                            "step(num_samples=...).")
    return float(2.0 * num_samples * group["weight_decay"] * group["lr"] * group["lr_factor"] / minibatch.scale)


class SGD(Optimizer):
    """SGD with momentum, l2 regularization and limits on the norm of updates.

    A component is a module that owns parameters. Each is one param group, named by its module path.
    Settings of a component can be changed in `param_groups`: `lr`, `momentum`, `lr_factor`,
    `max_change`, `weight_decay` and `orthonormal_constraint`. `lr` corresponds to lr * (1 -
    momentum) in torch, and `weight_decay` subtracts 2 * num_samples * weight_decay * lr * p.

    Args:
        model: the module to train; frozen parameters are not changed.
        lr: learning rate per sample, on a loss summed over the minibatch; for a mean-reduced loss,
            multiply it by the minibatch size.
        momentum: 0 to below 1. The velocity is multiplied by 1 - momentum when applied (Kaldi), so
            the effective rate does not depend on it.
        max_change: maximum L2 norm of the update of a component per minibatch; 0 = none.
        max_param_change: maximum L2 norm of the update of the complete model per minibatch; 0 =
            none.
        weight_decay: Kaldi's l2; adds weight_decay * |p|^2 per sample to the loss. With a summed
            loss, `step` needs `num_samples`; without it, the loss is treated as a mean, with one
            warning.
        layer_options: settings of components by name or pattern, such as {"output": {"max_change":
            1.5}}; later entries win. Keys are lr_factor (multiplies lr), max_change, weight_decay,
            orthonormal_constraint and rule. The key orthonormal_constraint makes the rows of a
            weight semi-orthogonal, as in Kaldi; > 0 is a fixed scale, < 0 a free scale, 0 off. The
            key rule="adamw" trains the layer with AdamW at lr * lr_factor * adamw_lr_factor, with
            betas, eps and weight_decay as in torch. AdamW layers have no update-norm limits.
        adamw_lr_factor: learning rate of AdamW layers relative to `lr`.
        on_nonfinite: reaction to a gradient with NaN or Inf. "skip" skips and counts the minibatch.
            "raise" raises DivergenceError, which makes every step wait for the device.

    Raises:
        ConfigError: the model has sharded or uninitialized parameters.
        ArgumentError: an argument has another type than its annotation, a number is negative, an
            option is unknown, or no parameter requires a gradient. It is a ConfigError, a
            ValueError and a TypeError.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = SGD(model, lr=1e-3)
        >>> model(torch.randn(16, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.activity().num_skipped
        0
    """

    @checks_arguments(OF_LAYERS)
    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.0, max_change: float = 0.75,
                 max_param_change: float = 2.0, weight_decay: float = 0.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None,
                 on_nonfinite: str = "skip", adamw_lr_factor: float = 0.125) -> None:
        super().__init__(model, Sgd(), {"lr": lr, "momentum": momentum, "max_change": max_change,
                                        "weight_decay": weight_decay, "adamw_lr_factor": adamw_lr_factor},
                         layer_options=layer_options, max_param_change=max_param_change, on_nonfinite=on_nonfinite)
