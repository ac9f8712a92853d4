"""SGD with Kaldi's update-norm limits, the base class of NG-SGD.

Learning rates are per sample on a loss that is *summed* over the minibatch. For a mean-reduced
loss, multiply them by the minibatch size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import statistics
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.arguments import checked, checks_arguments, hints_of, require_state
from ngsgd.errors import ArgumentError, ConfigError, DivergenceError, OptimizerStateError, has_grown, warn
from ngsgd.ops.max_change import Limits, max_change_limits
from ngsgd.ops.orthonormal import constrain_orthonormal
from ngsgd.ops.tensors import dense, refuse_sharded
from ngsgd.optim import adamw, updates
from ngsgd.optim.layers.fast_linear import attach_fast_linear, detach_fast_linear

# settings that only layer_options have
_LAYER_HINTS = {"lr_factor": float, "orthonormal_constraint": float, "rule": str, "betas": Sequence[float], "eps": float}
_BY_LAYER = ("it is a setting of the layers that AdamW trains: give it by layer, as in "
             "layer_options={\"embedding\": {\"betas\": (0.9, 0.95), \"eps\": 1e-8}}.")
# arguments of torch.optim.AdamW that are not arguments of the constructors
OF_LAYERS = {"betas": _BY_LAYER, "eps": _BY_LAYER}
# name of a group of such parameters
_OUTSIDE = "(outside of the model)"
# Recreated when needed; a scheduler replaces `step`.
_NOT_COPIED = ("step", "_places", "_constants")
# Steps whose clipping counts are summed in one operation.
_MANY_UNCOUNTED = 64
# Constrain a layer every fourth step; Kaldi does it at random with probability 1/4.
_ORTHONORMAL_PERIOD = 4
# Look for parameters that the optimizer does not have at the first step, and so many steps apart.
_SEARCH_PERIOD = 100
# Warn after so many steps if limits shortened more than these fractions of them.
_MANY_STEPS = 64
_MOST_LAYER_STEPS, _MOST_MODEL_STEPS = 0.5, 0.9


@dataclass(frozen=True)
class StepActivity:
    """How often update-norm limits were active since the last `reset_activity`."""

    num_steps: int
    # steps skipped because of a non-finite gradient
    num_skipped: int
    # component -> fraction of steps that its max_change shortened, 0 to 1
    layer_share: dict[str, float]
    # fraction of steps that max_param_change shortened, 0 to 1
    model_share: float


class _StepInputs(NamedTuple):
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
    # of the parameters
    dtypes: set[torch.dtype]


class StepRecord(NamedTuple):
    """Calls of Fisher estimates and their updates, which a replay of a step does not repeat."""

    calls: list[Any]
    updates: list[Any]


# Torch decorates the method with an import of torch._dynamo, which is slower than `import torch`.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class _ParameterSlot(NamedTuple):
    """Location of a parameter in the model."""

    parameters: dict[str, Any]     # dictionary of its module
    name: str
    p: Tensor
    shape: torch.Size


class SGD(torch.optim.Optimizer):
    """SGD with momentum, l2 regularization and limits on the norm of updates.

    A component is a module that owns parameters. Each is one param group, named by its module path.
    Settings of a component can be changed in `param_groups`: `lr`, `momentum`, `lr_factor`,
    `max_change`, `weight_decay` and `orthonormal_constraint`. `lr` corresponds to lr * (1 -
    momentum) in torch, and `weight_decay` subtracts 2 * num_samples * weight_decay * lr * p.

    Args:
        model: the module to train; frozen parameters are not changed.
        lr: learning rate per sample, on a loss summed over the minibatch.
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
        fast_gemm: on processors where `ngsgd.ops.gemm` is faster than torch, replace the class of
            each `nn.Linear` in place to use it. Gradients then differ in the last bits.

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

    _counts: Tensor
    # limits of the last steps, which `_counts` does not include yet
    _uncounted: list[tuple[list[int], Limits]]
    # rules of a component; the first is the default
    _rules: tuple[str, ...] = ("sgd", "adamw")
    # number of samples of the minibatch if the loss is their mean
    _gradient_scale = 1.0

    @checks_arguments(OF_LAYERS)
    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.0, max_change: float = 0.75,
                 max_param_change: float = 2.0, weight_decay: float = 0.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None,
                 on_nonfinite: str = "skip", fast_gemm: bool = True, adamw_lr_factor: float = 0.125) -> None:
        self._init_groups(model, {"lr": lr, "momentum": momentum, "lr_factor": 1.0, "max_change": max_change,
                                  "weight_decay": weight_decay, "orthonormal_constraint": 0.0, "rule": self._rules[0],
                                  "adamw_lr_factor": adamw_lr_factor}, layer_options)
        require_non_negative(max_param_change=max_param_change)
        if not 0.0 <= momentum < 1.0:
            raise ArgumentError(f"Invalid momentum: {momentum}; it must be at least 0 and below 1.")
        if on_nonfinite not in ("skip", "raise"):
            raise ArgumentError(f"Invalid on_nonfinite: {on_nonfinite!r}; choose skip or raise.")
        self.max_param_change = max_param_change
        self.on_nonfinite = on_nonfinite
        self._step_count = 0
        self._constants: dict[Any, Tensor] = {}
        self._warned = set[str]()
        # in the last warning
        self._num_skipped_reported = 0
        # 0-d norm of the last proposed update, on the device; NaN if the step was skipped
        self.last_update: Tensor | None = None
        self.reset_activity()
        if fast_gemm:
            owner = object()
            layers = attach_fast_linear(model.modules(), owner)
            # The finalizer is not an attribute, because those are copied.
            weakref.finalize(self, detach_fast_linear, layers, owner).atexit = False

    def _init_groups(self, model: nn.Module, defaults: dict[str, Any],
                     layer_options: Mapping[str, Mapping[str, Any]] | None) -> None:
        _require_whole_parameters(model, type(self).__name__)
        self._model = model
        self._places: list[_ParameterSlot] | None = None
        groups = components(model)
        if not groups:
            raise ArgumentError(f"{type(self).__name__} has nothing to train: no parameter of the "
                                "module requires a gradient; call requires_grad_(True) on layers.")
        set_options(groups, layer_options or {}, {*defaults, "betas", "eps"} - {"lr", "momentum"},
                    hints_of(type(self).__init__))
        for group in groups:
            require_non_negative(**{key: group.get(key, default) for key, default in defaults.items()
                                    if key != "orthonormal_constraint" and isinstance(default, (int, float))})
            if group.get("rule", self._rules[0]) not in self._rules:
                raise ArgumentError(f"Invalid rule: {group['rule']!r}; choose {' or '.join(self._rules)}.")
        super().__init__(groups, defaults)
        self._places = self._find_parameters()
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        # The warning of layers that were unfrozen is another one.
        self._known = [p for _, p in self._frozen]
        self._num_searches = 0

    @property
    def momentum(self) -> float:
        """Largest momentum of the components; each component has its value in `param_groups`."""
        return max(float(group["momentum"]) for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as those of unfrozen layers.

        Each layer becomes a group.

        Missing settings have the values of the constructor. A second group of a layer is named
        "<layer>#2".

        Raises:
            ConfigError: a parameter is frozen.
        """
        for group in [param_group] if "name" in param_group else self._by_layer(param_group):
            _add_param_group(self, group)
        self._prepare_state()
        if "_counts" in self.__dict__:
            self._places = self._find_parameters()
            added = len(self.param_groups) + 2 - len(self._counts)
            self._counts = torch.cat([self._counts, self._counts.new_zeros(added)])
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch does, without its label for profilers (10 % of a step)."""
        if not set_to_none:
            _zero_grad(self, set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _prepare_state(self) -> None:
        """Create the keys in `state` of each parameter that `state_dict` fills.

        torch.distributed.checkpoint loads no others, and takes a step with zero gradients if
        `state` is empty.
        """
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("step", None)
        for group in self._adamw_groups():
            for p in group["params"]:
                adamw.prepare_state(p, self.state[p])

    def _by_layer(self, param_group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        owners = {id(p): name or name_of(self._model) for name, module in reversed(list(self._model.named_modules()))
                  for p in module.parameters(recurse=False)}
        members: dict[str, list[Tensor]] = {}
        for p in params:
            name = owners.get(id(p), _OUTSIDE)
            if not p.requires_grad:
                raise ConfigError(f"a parameter of {name} is frozen; call requires_grad_(True) on it before add_param_group.")
            members.setdefault(name, []).append(p)
        taken = {group["name"] for group in self.param_groups}
        for name, of_layer in members.items():
            numbers = (f"{name}#{number}" for number in itertools.count(2))
            free = name if name not in taken else next(number for number in numbers if number not in taken)
            yield {**param_group, "params": of_layer, "name": free}

    def step(self, closure: Callable[[], float] | None = None, *, scale: float = 1.0,  # type: ignore[override]
             num_samples: int | None = None) -> float | None:
        """Apply the gradients, shortened to the limits; skip the minibatch if one is not finite.

        Args:
            closure: reevaluates the model and returns the loss.
            scale: multiplies the update and the limits. Backstitch takes a step of -alpha, then one
                of 1 + alpha on new gradients. Weight decay is not multiplied, and not applied if
                scale is negative.
            num_samples: number of samples summed in the loss; 1 for a mean.

        Raises:
            ConfigError: the parameters are no longer those of the model.
            DivergenceError: a gradient is not finite and on_nonfinite is "raise".
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply(scale, num_samples)
        return loss

    @torch.no_grad()
    def _apply(self, scale: float, num_samples: float | None) -> None:
        self._require_own_parameters()
        moving = self._moving(scale, num_samples)
        # AdamW steps once per minibatch, also with backstitch.
        adamw_groups = self._adamw_groups()
        proposed: list[adamw.Proposal | None] = []
        is_finite: Tensor | None = None
        if adamw_groups:
            proposed = adamw.proposals(adamw_groups, self.state)
            is_finite = updates.gradients_are_finite([p for group in adamw_groups for p in group["params"]])
        if any(proposed) and (are_finite := adamw.are_finite(proposed)) is not None:
            is_finite = are_finite if is_finite is None else is_finite & are_finite.to(is_finite.device)
        if moving.indices:
            is_skipped = self._step_with_limits(moving, scale, is_finite)
        elif is_finite is not None:
            is_skipped = (~is_finite).to(torch.float32)
            self._count_without_limits(~is_finite)
        else:
            return
        if self.on_nonfinite == "raise" and bool(is_skipped):
            bad = [group["name"] for group in self.param_groups
                   if (are_finite := updates.gradients_are_finite(group["params"])) is not None and not are_finite]
            reason = f"the gradient of {', '.join(bad)} is not finite" if bad else "the step would make parameters infinite"
            raise DivergenceError(f"{reason}; lower the learning rate or skip such minibatches with on_nonfinite=\"skip\".")
        if scale > 0.0:
            if adamw_groups:
                adamw.step(adamw_groups, proposed, self.state, is_skipped)
            self._constrain(self.param_groups[index] for index in moving.indices)

    def _next_step_key(self) -> Hashable | None:
        """Return all that the operations of the next step depend on, except the data.

        None if the step waits for the device, so that a CUDA graph cannot contain it.
        """
        number = self._num_steps + 1
        if self.on_nonfinite == "raise" or number & (number - 1) == 0:
            return None
        groups = tuple(tuple(value for key, value in group.items() if key != "params") for group in self.param_groups)
        is_constrained = any(group["orthonormal_constraint"] for group in self.param_groups)
        return (groups, self.max_param_change, self._counts.data_ptr(),
                self._step_count % _ORTHONORMAL_PERIOD if is_constrained else 0)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[StepRecord]:
        """Keep what a replay of the step inside does not repeat."""
        yield StepRecord([], [])

    def _count_replay(self, record: StepRecord) -> None:
        """Count a step that a CUDA graph takes."""
        self._num_steps += 1
        self._step_count += 1

    def _send_updates(self, record: StepRecord) -> None:
        """Complete a step that a CUDA graph has taken."""

    def _adamw_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["rule"] == "adamw"]

    def _step_with_limits(self, moving: _StepInputs, scale: float,
                          others_finite: Tensor | None) -> Tensor:
        """Update all components without AdamW; return 1 (0-d float32) if the minibatch was skipped.
        """
        norms_C = self._norms(moving)
        own_C = self._own_factors(moving)
        if own_C is not None:
            norms_C = norms_C * own_C
        groups = [self.param_groups[index] for index in moving.indices]
        max_changes_C = self._constant(
            norms_C, *(float(group["max_change"]) or math.inf for group in groups))
        limits = max_change_limits(norms_C, max_changes_C, self.max_param_change,
                                   scale=scale * (1.0 - moving.momentum), max_change_scale=abs(scale))
        if others_finite is not None:
            limits = limits._replace(
                total=torch.where(others_finite.to(norms_C.device), limits.total, math.nan))
        factors_C = limits.factors_C if own_C is None else limits.factors_C * own_C
        # The fused step subtracts.
        steps_C = factors_C * self._constant(norms_C, *(-rate for rate in moving.rates))
        proposed: dict[Tensor, Tensor] = {}
        if not (self.max_param_change and moving.dtypes <= updates.FUSED):
            limits, proposed = self._checked(moving, limits, steps_C)
        # No host synchronization: the kernel has no effect if this is not 0.
        found_inf = torch.ne(limits.total, limits.total,
                             out=torch.empty((), dtype=torch.float32, device=norms_C.device))
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
        self._count(limits, moving.indices)
        return found_inf

    def _checked(self, moving: _StepInputs, limits: Limits, steps_C: Tensor) -> tuple[Limits, dict[Tensor, Tensor]]:
        """Return (limits, new values of parameters that the fused kernel does not update).

        Their total is NaN, which skips the minibatch, if a parameter might not stay finite.
        """
        proposed: dict[Tensor, Tensor] = {}
        if not moving.dtypes <= updates.FUSED:
            proposed = {p: torch.sub(p.float(), direction.float() * step).to(p.dtype)
                        for params, directions, step in zip(moving.params, moving.directions, steps_C.unbind(), strict=True)
                        for p, direction in zip(params, directions, strict=True) if not updates.is_fused(p, direction)}
        if proposed:
            is_finite = updates.all_finite(list(proposed.values())).to(limits.total.device)
            limits = limits._replace(total=torch.where(is_finite, limits.total, math.nan))
        # Limits bound the update, except of layers without one.
        if not self.max_param_change and not all(self.param_groups[index]["max_change"] for index in moving.indices):
            largest = updates.largest_update(moving.dtypes)
            limits = limits._replace(total=torch.where(limits.total <= largest, limits.total, math.nan))
        return limits, proposed

    def _moving(self, scale: float, num_samples: float | None) -> _StepInputs:
        """Return the updates before limits; p.grad is not changed."""
        indices, params, directions, rates, are_own = [], [], [], [], []
        common = float(self.param_groups[0]["momentum"])
        for index, group in enumerate(self.param_groups):
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if with_gradient and group["rule"] != "adamw":
                lr, momentum = group["lr"] * group["lr_factor"] * self._gradient_scale, float(group["momentum"])
                relative = 1.0 if momentum == common else (1.0 - momentum) / (1.0 - common)
                decay = self._decay(group, scale, num_samples)
                indices.append(index)
                are_own.append(bool(decay or momentum))
                if decay or momentum:
                    directions.append([self._delta(p, lr, decay, momentum) for p in with_gradient])
                    rates.append(relative)
                else:
                    directions.append([updates.laid_out_gradient(p) for p in with_gradient])
                    rates.append(-lr * relative)
                params.append(with_gradient)
        dtypes = {p.dtype for own in params for p in own}
        if not dtypes.isdisjoint(updates.COMPLEX):
            params = [[updates.as_real(p.detach()) for p in own] for own in params]
            directions = [[updates.as_real(direction) for direction in own] for own in directions]
            dtypes = {p.dtype for own in params for p in own}
        return _StepInputs(indices, params, directions, tuple(rates), common, are_own, dtypes)

    def _decay(self, group: dict[str, Any], scale: float, num_samples: float | None) -> float:
        """Return the multiple of p that weight decay subtracts, before `scale`."""
        if not group["weight_decay"] or scale <= 0.0:
            return 0.0
        if num_samples is None:
            num_samples = 1
            self._warn_once("weight decay", "weight_decay is per sample and step() was called "
                                            "without num_samples: the loss is treated as a mean "
                                            "over the minibatch, num_samples=1; with a sum call "
                                            "step(num_samples=...).")
        return float(2.0 * num_samples * group["weight_decay"] * group["lr"] * group["lr_factor"] / scale)

    def _delta(self, p: Tensor, lr: float, decay: float, momentum: float) -> Tensor:
        """Return the update of `p` before limits, in the descent direction.

        With momentum, the velocity itself.
        """
        assert p.grad is not None
        gradient = dense(p.grad)
        if not momentum:
            return torch.add(gradient.to(updates.accumulator_dtype(p)) * -lr, p, alpha=-decay)
        velocity = updates.accumulator(self.state[p], "velocity", p)
        velocity.mul_(momentum).add_(gradient, alpha=-lr)
        return velocity.add_(p, alpha=-decay) if decay else velocity

    def _norms(self, moving: _StepInputs) -> Tensor:
        """Return the L2 norm of the update of each component."""
        norms = iter(_norms([d for ds in moving.directions for d in ds], moving.dtypes))
        most = max(map(len, moving.directions))
        rows = [[next(norms) for _ in ds] for ds in moving.directions]
        if any(len(row) < most for row in rows):
            zero = self._constant(rows[0][0], 0.0)[0]
            rows = [row + [zero] * (most - len(row)) for row in rows]
        norms_P = torch.stack([norm for row in rows for norm in row])
        norms_C = norms_P if most == 1 else norms_P.square().view(-1, most).sum(dim=1).sqrt()
        return norms_C * self._constant(norms_P, *map(abs, moving.rates))

    def _own_factors(self, moving: _StepInputs) -> Tensor | None:
        """Return factors of a subclass on the update of each component, before the limits."""
        return None

    def _constant(self, like: Tensor, *values: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers on the device; they are copied only when they change."""
        key = (values, dtype or like.dtype, like.device)
        if key not in self._constants:
            # Remove learning rates of past scheduler steps.
            if len(self._constants) > 1000:
                self._constants.clear()
            self._constants[key] = torch.tensor(values, dtype=dtype or like.dtype, device=like.device)
        return self._constants[key]

    def _count(self, limits: Limits, indices: list[int]) -> None:
        self._num_steps += 1
        self.last_update = limits.total
        # After model.double() or model.to(device) the numbers have another kind.
        if self._uncounted and (self._uncounted[0][0] != indices or len(self._uncounted) >= _MANY_UNCOUNTED
                                or self._uncounted[0][1].total.dtype != limits.total.dtype
                                or self._uncounted[0][1].total.device != limits.total.device):
            self._count_all()
        self._uncounted.append((indices, limits))
        self._look_at_activity([self.param_groups[index]["name"] for index in indices])

    def _count_without_limits(self, is_skipped: Tensor) -> None:
        """Count a step in which no update has a limit."""
        self._num_steps += 1
        self.last_update = torch.where(is_skipped, math.nan, 0.0)
        self._counts = self._counts.to(is_skipped.device)
        self._counts[0] += is_skipped
        self._look_at_activity([])

    def _look_at_activity(self, limited: Sequence[str]) -> None:
        # Rare, because it waits for the device.
        if self._num_steps & (self._num_steps - 1) == 0:
            self._warn_of_activity(limited)

    def _count_all(self) -> None:
        """Sum the counts that `_count` has collected, on the device in few operations."""
        if not self._uncounted:
            return
        (indices, *_), all_limits = self._uncounted[0], [limits for _, limits in self._uncounted]
        self._uncounted = []
        is_skipped_S1 = torch.stack([limits.total for limits in all_limits]).isnan()[:, None]
        ratios_SC = torch.stack([torch.cat([limits.model_ratio[None], limits.layer_ratios_C])
                                 for limits in all_limits])
        hits_SC = torch.cat([is_skipped_S1, (ratios_SC < 1.0) & ~is_skipped_S1], dim=1)
        counts = self._counts.to(hits_SC.device)
        columns = self._constant(hits_SC, 0, 1, *(i + 2 for i in indices), dtype=torch.int64)
        self._counts = counts.index_add_(0, columns, hits_SC.sum(dim=0))

    def _warn_of_activity(self, limited: Sequence[str]) -> None:
        done = self.activity()
        if has_grown(done.num_skipped, self._num_skipped_reported):
            self._num_skipped_reported = done.num_skipped
            warn(f"{type(self).__name__}: {done.num_skipped} of {done.num_steps} steps were skipped, since a "
                 "gradient was not finite; activity().num_skipped counts them. If they continue, lower lr "
                 "or look for NaN in the data.")
        layers, model = (
            statistics.mean([done.layer_share[name] for name in limited] or [0.0]),
            done.model_share,
        )
        if done.num_steps >= _MANY_STEPS and (
            layers > _MOST_LAYER_STEPS or model > _MOST_MODEL_STEPS
        ):
            self._warn_once(
                "limits",
                f"max_change shortened {layers:.0%} of the layer updates and max_param_change "
                f"{model:.0%} of the model updates; update-norm limits rather than lr determine "
                "the step length. Lower lr, or raise the limits (0: none).",
            )

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warn(f"{type(self).__name__}: {message}")

    def _require_own_parameters(self) -> None:
        """Raise ConfigError if a parameter was replaced or sharded; warn of layers unfrozen later.
        """
        if self._places is None:
            self._places = self._find_parameters()
        for parameters, name, p, shape in self._places:
            if parameters.get(name) is not p or p.shape != shape:
                self._places = self._find_parameters(changed=f"{name} {tuple(shape)}")
                break
        if any(p.requires_grad for _, p in self._frozen):
            names = [name for name, p in self._frozen if p.requires_grad]
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            self._warn_once("unfrozen", f"{', '.join(names)} were unfrozen after the optimizer was "
                                        "created and are not trained; call add_param_group with "
                                        "them.")
        if self._num_searches % _SEARCH_PERIOD == 0:
            self._warn_of_new_parameters()
        self._num_searches += 1

    def _warn_of_new_parameters(self) -> None:
        """Warn of parameters that the model did not have when the optimizer was created."""
        known = {id(p) for group in self.param_groups for p in group["params"]} | {id(p) for p in self._known}
        if new := [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in known]:
            self._warn_once("new parameters", f"{', '.join(new)} came into the model after the optimizer was created, as "
                                              "when a layer is replaced, and are not trained; create the optimizer "
                                              "after the last change of the model.")

    def _find_parameters(self, changed: str = "") -> list[_ParameterSlot]:
        _require_whole_parameters(self._model, type(self).__name__)
        shapes = {id(place.p): place.shape for place in self._places or ()}
        found = {id(p): _ParameterSlot(module._parameters, name, p, shapes.get(id(p), p.shape))
                 for module in self._model.modules() for name, p in module._parameters.items() if p is not None}
        own = [p for group in self.param_groups if not group["name"].startswith(_OUTSIDE) for p in group["params"]]
        places = [found[id(p)] for p in own if id(p) in found]
        if len(places) < len(own) or any(p.shape != shape for _, _, p, shape in places):
            raise ConfigError(f"parameters of this {type(self).__name__} are no longer those of "
                              f"the model ({changed or 'all'}), as after fully_shard, FSDP or "
                              "load_state_dict(assign=True); create the optimizer after that "
                              "(FSDP and DTensor are not supported).")
        return places

    def _constrain(self, groups: Iterable[dict[str, Any]]) -> None:
        """Constrain the weights of semi-orthogonal layers, one layer per step."""
        self._step_count += 1
        for index, group in enumerate(groups):
            if group["orthonormal_constraint"] and (self._step_count + index) % _ORTHONORMAL_PERIOD == 0:
                for p in group["params"]:
                    if p.ndim > 1:
                        constrain_orthonormal(p, group["orthonormal_constraint"])

    def activity(self) -> StepActivity:
        """Return how often each limit was active; waits for the device once."""
        self._count_all()
        num_skipped, model_hits, *layer_hits = self._counts.tolist()
        steps = max(self._num_steps, 1)
        names = [group["name"] for group in self.param_groups]
        return StepActivity(self._num_steps, num_skipped,
                            {name: hits / steps for name, hits in zip(names, layer_hits, strict=True)},
                            model_hits / steps)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state plus "step_count" and settings of the model.

        "step_count" selects the next semi-orthogonal layer; "step" of each parameter is the same
        count. Velocities exist before the first step, because torch.distributed.checkpoint fills
        only existing entries of `state`.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if self._has_velocity(group, p):
                    updates.accumulator(self.state[p], "velocity", p)
        state = super().state_dict()
        state["state"] = {index: {**values, "step": self._step_count} for index, values in state["state"].items()}
        return {**state, "step_count": self._step_count, "max_param_change": self.max_param_change,
                "on_nonfinite": self.on_nonfinite}

    def _has_velocity(self, group: Mapping[str, Any], p: Tensor) -> bool:
        return bool(group["momentum"]) and group["rule"] != "adamw"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its settings.

        Raises:
            OptimizerStateError: the state belongs to another model.
        """
        saved = self._state_by_parameter(state_dict)
        names = [group["name"] for group in self.param_groups]
        step_count = state_dict.get("step_count", saved[0][1].get("step", 0))
        state = {index: {key: value for key, value in values.items() if key in ("velocity", *adamw.STATE)}
                 for index, values in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        self._step_count = int(step_count or 0)
        for p, values in saved:
            # Torch casts them to the dtype of the parameter, or shares them with the saved state.
            dtypes = dict.fromkeys(("velocity", *adamw.MOMENTS), updates.accumulator_dtype(p)) | {"num_adamw_steps": torch.float32}
            self.state[p].update({key: torch.as_tensor(values[key]).to(p.device, dtype, copy=True)
                                  for key, dtype in dtypes.items() if values.get(key) is not None})
        self.max_param_change = state_dict.get("max_param_change", self.max_param_change)
        self.on_nonfinite = state_dict.get("on_nonfinite", self.on_nonfinite)
        for group, name in zip(self.param_groups, names, strict=True):
            group["name"] = name
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._prepare_state()

    def _state_by_parameter(self, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return (parameter, saved state) in order; raise OptimizerStateError if they do not fit.
        """
        kind = type(self).__name__
        require_state(state_dict, ("state", "param_groups"), kind, OptimizerStateError)
        groups = state_dict["param_groups"]
        if any("name" not in group for group in groups):
            raise OptimizerStateError(f"this is not a state of {kind}: its param_groups have no "
                                      "names, as those of torch optimizers; load the state_dict "
                                      f"of {kind}, or start without it.")
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise OptimizerStateError("the state is of the layers "
                                      f"{', '.join(group['name'] for group in groups)}, this "
                                      f"{kind} of "
                                      f"{', '.join(group['name'] for group in self.param_groups)}; "
                                      "load it with the same model, and freeze layers after the optimizer is created.")
        found = []
        for group, saved in zip(self.param_groups, groups, strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                values = state_dict["state"].get(index, {})
                for key in ("velocity", "exp_avg", "exp_avg_sq"):
                    if values.get(key) is not None and values[key].shape != p.shape:
                        raise OptimizerStateError(f"the state of {saved['name']} is of shape "
                                                  f"{tuple(values[key].shape)}, the parameter "
                                                  f"of shape {tuple(p.shape)}; load it with the same "
                                                  "model.")
                found.append((p, values))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return all but hooks and cached objects; `copy.deepcopy` also copies the model."""
        self._count_all()
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_COPIED and not key.endswith("_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_places": None, "_constants": {}})

    def training_state(self) -> dict[str, Any]:
        """Return the state that steps change, without settings; tensors are not copied.

        With `load_training_state`, an equal optimizer on an equal model continues bitwise
        identically, including `activity`.
        """
        self._count_all()
        parameters = [{key: value for key, value in self.state[p].items() if isinstance(value, Tensor)}
                      for group in self.param_groups for p in group["params"]]
        return {"parameters": parameters, "step_count": self._step_count, "num_steps": self._num_steps, "counts": self._counts}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `training_state` of an equal optimizer; tensors are not copied."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p, values in zip(params, state["parameters"], strict=True):
            self.state[p].update({key: value.to(p.device) for key, value in values.items()})
        self._step_count, self._num_steps = state["step_count"], state["num_steps"]
        self._counts, self._uncounted = state["counts"].to(params[0].device), []

    def reset_activity(self) -> None:
        """Set the counts of `activity` to zero."""
        self._num_steps = 0
        self._uncounted = []
        self._counts = torch.zeros(2 + len(self.param_groups), dtype=torch.int64)


def _require_whole_parameters(model: nn.Module, kind: str) -> None:
    """Reject sharded and uninitialized parameters: limits and rows of a layer need complete ones.
    """
    refuse_sharded(model, kind)
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None and nn.parameter.is_lazy(p):
                raise ConfigError(f"{name or 'the model'} has an uninitialized parameter; run the "
                                  f"model once before creating {kind}.")
            if p is not None and p.requires_grad and p.dtype not in updates.DTYPES:
                raise ConfigError(f"{name or 'the model'} has a parameter of {p.dtype}, which {kind} does not train; keep the "
                                  "parameter in bfloat16 or float32, or freeze it with requires_grad_(False).")


def _norms(tensors: list[Tensor], dtypes: Iterable[torch.dtype]) -> tuple[Tensor, ...]:
    # Half precision would overflow in the sum of squares.
    upcast = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return torch._foreach_norm(tensors, 2, dtype=upcast)


def components(model: nn.Module) -> list[dict[str, Any]]:
    """Return one param group per module with trainable parameters.

    Shared ones belong to the first owner.
    """
    groups, seen = [], set[int]()
    for name, module in model.named_modules():
        params = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in params)
        if params:
            groups.append({"params": params, "name": name or name_of(model)})
    return groups


def name_of(model: nn.Module) -> str:
    """Return the name of a model that is a single layer: its class before replacement."""
    return getattr(model, "plain_class", type(model)).__name__


def set_options(groups: list[dict[str, Any]], layer_options: Mapping[str, Mapping[str, Any]], known: set[str],
                hints: Mapping[str, Any]) -> None:
    """Apply `layer_options` to the groups whose names match.

    Args:
        groups: param groups with names, which this changes.
        layer_options: settings by name or pattern of layers.
        known: settings that layers have.
        hints: types of settings that the constructor also has.
    """
    names = [group["name"] for group in groups]
    for pattern, options in layer_options.items():
        if unknown := sorted(set(options) - known):
            raise ArgumentError(f"Invalid layer_options[{pattern!r}]: no setting {', '.join(unknown)}; there are "
                             f"{', '.join(sorted(known))}" + ("; lr_factor multiplies lr" if "lr" in unknown else ""))
        matching = [group for group in groups if fnmatchcase(group["name"], pattern)]
        if not matching:
            raise ArgumentError(f"Invalid layer_options: no layer is called {pattern!r}; there are {', '.join(names)}")
        settings = checked(options, {**hints, **_LAYER_HINTS}, f"layer_options[{pattern!r}]")
        for group in matching:
            group.update(settings)


def require_non_negative(**values: float) -> None:
    """Reject negative numbers and NaN with torch's message."""
    for name, value in values.items():
        if not value >= 0.0:
            raise ArgumentError(f"Invalid {name}: {value}; it must be at least 0.")
