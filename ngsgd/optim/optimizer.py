"""Parameter groups, state, activity and warnings of `SGD`, `NGSGD` and `NaturalMuon`.

A `Rule` steps the layers, and AdamW those that are not its own.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.arguments import hints_of
from ngsgd.errors import ArgumentError, ConfigError, DivergenceError, has_grown, warn
from ngsgd.ops.max_change import Limits
from ngsgd.ops.orthonormal import constrain_orthonormal
from ngsgd.ops.tensors import DeviceNumbers
from ngsgd.optim import adamw, updates
from ngsgd.optim.groups import (
    OUTSIDE,
    components,
    require_non_negative,
    require_whole_parameters,
    saved_by_parameter,
    set_options,
    split_by_layer,
)
from ngsgd.optim.rule import Minibatch, Rule, Step

# Constrain a layer every fourth step; Kaldi does it at random with probability 1/4.
ORTHONORMAL_PERIOD = 4
# Look for parameters that the optimizer does not have at the first step, and so many steps apart.
_SEARCH_PERIOD = 100
# Warn after so many steps if limits shortened more than these fractions of them.
_MANY_STEPS = 64
_MOST_LAYER_STEPS, _MOST_MODEL_STEPS = 0.5, 0.9
# Steps whose counts are summed in one operation.
_MANY_UNCOUNTED = 64


# Torch decorates the method with an import of torch._dynamo, which is slower than `import torch`.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


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


class LimitCounts:
    """Counts of steps, skipped steps, and steps that each limit shortened; on the device."""

    def __init__(self, num_groups: int) -> None:
        self.num_steps = 0
        # skipped, shortened by max_param_change, shortened by max_change of each group
        self.hits = torch.zeros(2 + num_groups, dtype=torch.int64)
        # limits of the last steps, which `hits` does not include yet
        self._uncounted: list[tuple[list[int], Limits]] = []
        self._constant = DeviceNumbers()

    def add(self, limits: Limits, indices: list[int]) -> None:
        """Count a step whose groups `indices` have limits."""
        self.num_steps += 1
        # After model.double() or model.to(device) the numbers have another kind.
        if self._uncounted and (self._uncounted[0][0] != indices or len(self._uncounted) >= _MANY_UNCOUNTED
                                or self._uncounted[0][1].total.dtype != limits.total.dtype
                                or self._uncounted[0][1].total.device != limits.total.device):
            self.sum_up()
        self._uncounted.append((indices, limits))

    def sum_up(self) -> None:
        """Add the steps since the last call to `hits`, on the device in few operations."""
        if not self._uncounted:
            return
        (indices, *_), all_limits = self._uncounted[0], [limits for _, limits in self._uncounted]
        self._uncounted = []
        is_skipped_S1 = torch.stack([limits.total for limits in all_limits]).isnan()[:, None]
        ratios_SC = torch.stack([torch.cat([limits.model_ratio[None], limits.layer_ratios_C]) for limits in all_limits])
        hits_SC = torch.cat([is_skipped_S1, (ratios_SC < 1.0) & ~is_skipped_S1], dim=1)
        columns = self._constant(hits_SC, 0, 1, *(i + 2 for i in indices), dtype=torch.int64)
        self.hits = self.hits.to(hits_SC.device).index_add_(0, columns, hits_SC.sum(dim=0))

    def grow(self, num_groups: int) -> None:
        """Count the limits of further groups, too."""
        self.hits = torch.cat([self.hits, self.hits.new_zeros(num_groups + 2 - len(self.hits))])

    def activity(self, names: Sequence[str]) -> StepActivity:
        """Return the counts as fractions; waits for the device once."""
        self.sum_up()
        num_skipped, model_hits, *layer_hits = self.hits.tolist()
        steps = max(self.num_steps, 1)
        return StepActivity(self.num_steps, num_skipped, {name: hits / steps for name, hits in zip(names, layer_hits, strict=True)},
                            model_hits / steps)

    def state(self) -> dict[str, Any]:
        """Return the counts; the tensor is not copied."""
        self.sum_up()
        return {"num_steps": self.num_steps, "counts": self.hits}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state`."""
        self.num_steps, self.hits, self._uncounted = state["num_steps"], state["counts"].to(device), []


class _ParameterSlot(NamedTuple):
    """Location of a parameter in the model."""

    parameters: dict[str, Any]     # dictionary of its module
    name: str
    p: Tensor
    shape: torch.Size


class Optimizer(torch.optim.Optimizer):
    """Base class of `SGD`, `NGSGD` and `NaturalMuon`.

    Args:
        rule: steps of all layers but those of AdamW.
        settings: defaults of the groups: lr, momentum, max_change, weight_decay, adamw_lr_factor.
        layer_options, max_param_change, on_nonfinite: see `SGD`.
    """

    # a parameter, its gradient and the version of that, of the step before the next warning
    _last_grad: tuple[Tensor, Tensor, int] | None = None

    def __init__(self, model: nn.Module, rule: Rule, settings: Mapping[str, Any], *,
                 layer_options: Mapping[str, Mapping[str, Any]] | None, max_param_change: float, on_nonfinite: str) -> None:
        require_whole_parameters(model, type(self).__name__)
        self.rule, self.model = rule, model
        self._places: list[_ParameterSlot] | None = None
        groups = components(model)
        if not groups:
            raise ArgumentError(f"{type(self).__name__} has nothing to train: no parameter of the "
                                "module requires a gradient; call requires_grad_(True) on layers.")
        defaults = {**settings, "lr_factor": 1.0, "orthonormal_constraint": 0.0, "rule": rule.names[0], **rule.settings}
        set_options(groups, layer_options or {}, {*defaults, "betas", "eps"} - {"lr", "momentum"},
                    hints_of(type(self).__init__))
        for group in groups:
            require_non_negative(**{key: group.get(key, default) for key, default in defaults.items()
                                    if key != "orthonormal_constraint" and isinstance(default, (int, float))})
            if group.get("rule", rule.names[0]) not in rule.names:
                raise ArgumentError(f"Invalid rule: {group['rule']!r}; choose {' or '.join(rule.names)}.")
        super().__init__(groups, defaults)
        self._places = self._find_parameters()
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        # The warning of layers that were unfrozen is another one.
        self._known = [p for _, p in self._frozen]
        self._num_searches = 0
        require_non_negative(max_param_change=max_param_change)
        if not 0.0 <= settings["momentum"] < 1.0:
            raise ArgumentError(f"Invalid momentum: {settings['momentum']}; it must be at least 0 and below 1.")
        if on_nonfinite not in ("skip", "raise"):
            raise ArgumentError(f"Invalid on_nonfinite: {on_nonfinite!r}; choose skip or raise.")
        self.max_param_change = max_param_change
        self.on_nonfinite = on_nonfinite
        self.step_count = 0
        self._warned = set[str]()
        # in the last warning
        self._num_skipped_reported = 0
        # 0-d norm of the last proposed update, on the device; NaN if the step was skipped
        self.last_update: Tensor | None = None
        self.reset_activity()
        rule.attach(self)
        self._prepare_state()

    @property
    def momentum(self) -> float:
        """Largest momentum of the components; each component has its value in `param_groups`."""
        return max(float(group["momentum"]) for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as those of unfrozen layers.

        Each layer becomes a group, a second one named "<layer>#2". Missing settings have the values
        of the constructor.

        Raises:
            ConfigError: a parameter is frozen.
        """
        for group in [param_group] if "name" in param_group else split_by_layer(self.model, param_group, self.param_groups):
            _add_param_group(self, group)
        # The constructor of torch also calls this.
        if "counts" in self.__dict__:
            self._places = self._find_parameters()
            self.counts.grow(len(self.param_groups))
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            self.rule.attach(self)
            self._prepare_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch does, without its label for profilers (10 % of a step)."""
        if not set_to_none:
            _zero_grad(self, set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _prepare_state(self) -> None:
        """Create the keys in `state` of each parameter that `state_dict` fills."""
        # torch.distributed.checkpoint loads no others, and takes a step with zero gradients if
        # `state` is empty.
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("step", None)
        for group in self.rule.adamw_groups(self.param_groups):
            for p in group["params"]:
                adamw.prepare_state(p, self.state[p])

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
        with torch.no_grad():
            self._take(Minibatch(scale, num_samples))
        return loss

    def _take(self, minibatch: Minibatch) -> None:
        self.rule.begin(self, minibatch)
        self._require_own_parameters()
        groups = self.rule.adamw_groups(self.param_groups)
        proposed: list[adamw.Proposal | None] = []
        if groups:
            proposed, minibatch.others_finite = adamw.propose(groups, self.state)
        taken = self.rule.step(self, minibatch)
        if taken is None and minibatch.others_finite is not None:
            self.count(~minibatch.others_finite, [])
            taken = Step([], (~minibatch.others_finite).to(torch.float32))
        if taken is not None:
            if self.on_nonfinite == "raise" and bool(taken.is_skipped):
                bad = [group["name"] for group in self.param_groups
                       if (are_finite := updates.gradients_are_finite(group["params"])) is not None and not are_finite]
                reason = f"the gradient of {', '.join(bad)} is not finite" if bad else "the step would make parameters infinite"
                raise DivergenceError(f"{reason}; lower the learning rate or skip such minibatches with on_nonfinite=\"skip\".")
            # AdamW steps once per minibatch, also with backstitch.
            if minibatch.scale > 0.0:
                if groups:
                    adamw.step(groups, proposed, self.state, taken.is_skipped)
                self.step_count += 1
                # Constrain the weights of semi-orthogonal layers, one layer per step.
                for number, index in enumerate(taken.indices):
                    group = self.param_groups[index]
                    target = group["orthonormal_constraint"]
                    if target and (self.step_count + number) % ORTHONORMAL_PERIOD == 0:
                        for p in (p for p in group["params"] if p.ndim > 1):
                            constrain_orthonormal(p, target)
        self.rule.end(self)

    def count(self, limits: Limits | Tensor, indices: list[int]) -> None:
        """Count a step with the limits of groups, or with whether it was skipped without any."""
        counts = self.counts
        if isinstance(limits, Limits):
            self.last_update = limits.total
            counts.add(limits, indices)
        else:
            self.last_update = torch.where(limits, math.nan, 0.0)
            counts.num_steps += 1
            counts.hits = counts.hits.to(limits.device)
            counts.hits[0] += limits
        before, self._last_grad = self._last_grad, None
        # Rare, because it waits for the device.
        if counts.num_steps & (counts.num_steps - 1) == 0:
            # Torch counts changes in place. A backward pass is one, and clearing would be another.
            is_added = before is not None and before[0].grad is before[1] and before[1]._version == before[2] + 1
            self._warn_of_activity([self.param_groups[index]["name"] for index in indices], is_added=is_added)
        elif counts.num_steps & (counts.num_steps + 1) == 0 and indices:
            p = self.param_groups[indices[0]]["params"][-1]
            self._last_grad = (p, p.grad, p.grad._version) if p.grad is not None else None

    def _warn_of_activity(self, limited: Sequence[str], *, is_added: bool) -> None:
        done = self.activity()
        if has_grown(done.num_skipped, self._num_skipped_reported):
            self._num_skipped_reported = done.num_skipped
            warn(f"{type(self).__name__}: {done.num_skipped} of {done.num_steps} steps were skipped, since a "
                 "gradient was not finite; activity().num_skipped counts them. If they continue, lower lr "
                 "or look for NaN in the data.")
        layers = statistics.mean([done.layer_share[name] for name in limited] or [0.0])
        if done.num_steps >= _MANY_STEPS and (layers > _MOST_LAYER_STEPS or done.model_share > _MOST_MODEL_STEPS):
            reason = ("Gradients of several steps were added up: call optimizer.zero_grad() before each backward pass."
                      if is_added else "Lower lr, or raise the limits (0: none).")
            self.warn_once("limits", f"max_change shortened {layers:.0%} of the layer updates and max_param_change "
                                     f"{done.model_share:.0%} of the model updates; update-norm limits rather than lr determine "
                                     f"the step length. {reason}")

    def warn_once(self, subject: str, message: str) -> None:
        """Warn if no warning of this subject has been given."""
        if subject not in self._warned:
            self._warned.add(subject)
            warn(f"{type(self).__name__}: {message}")

    def _require_own_parameters(self) -> None:
        """Raise ConfigError if parameters were replaced or sharded; warn of unfrozen layers."""
        if self._places is None:
            self._places = self._find_parameters()
        for parameters, name, p, shape in self._places:
            if parameters.get(name) is not p or p.shape != shape:
                self._places = self._find_parameters(changed=f"{name} {tuple(shape)}")
                break
        if any(p.requires_grad for _, p in self._frozen):
            names = [name for name, p in self._frozen if p.requires_grad]
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            self.warn_once("unfrozen", f"{', '.join(names)} were unfrozen after the optimizer was created and are not trained; "
                                       "call add_param_group with them.")
        self._num_searches += 1
        if self._num_searches % _SEARCH_PERIOD != 1:
            return
        known = {id(p) for group in self.param_groups for p in group["params"]} | {id(p) for p in self._known}
        if new := [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in known]:
            self.warn_once("new parameters", f"{', '.join(new)} came into the model after the optimizer was created, as "
                                             "when a layer is replaced, and are not trained; create the optimizer after "
                                             "the last change of the model.")

    def _find_parameters(self, changed: str = "") -> list[_ParameterSlot]:
        require_whole_parameters(self.model, type(self).__name__)
        shapes = {id(place.p): place.shape for place in self._places or ()}
        found = {id(p): _ParameterSlot(module._parameters, name, p, shapes.get(id(p), p.shape))
                 for module in self.model.modules() for name, p in module._parameters.items() if p is not None}
        own = [p for group in self.param_groups if not group["name"].startswith(OUTSIDE) for p in group["params"]]
        places = [found[id(p)] for p in own if id(p) in found]
        if len(places) < len(own) or any(p.shape != shape for _, _, p, shape in places):
            raise ConfigError(f"parameters of this {type(self).__name__} are no longer those of the model ({changed or 'all'}), "
                              "as after fully_shard, FSDP or load_state_dict(assign=True); create the optimizer after that "
                              "(FSDP and DTensor are not supported).")
        self.rule.check(self.model)
        return places

    def activity(self) -> StepActivity:
        """Return how often each limit was active; waits for the device once."""
        return self.counts.activity([group["name"] for group in self.param_groups])

    def reset_activity(self) -> None:
        """Set the counts of `activity` to zero."""
        self.counts = LimitCounts(len(self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state plus "step_count" and settings of the model.

        "step_count" selects the next semi-orthogonal layer; "step" of each parameter is the same
        count.
        """
        # torch.distributed.checkpoint fills only existing entries of `state`.
        for group in self.param_groups:
            for p in group["params"]:
                if self.rule.has_velocity(group, p):
                    updates.accumulator(self.state[p], "velocity", p)
        state = super().state_dict()
        state["state"] = {index: {**values, "step": self.step_count} for index, values in state["state"].items()}
        return {**state, "step_count": self.step_count, "max_param_change": self.max_param_change,
                "on_nonfinite": self.on_nonfinite}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its settings; OptimizerStateError if it belongs to another model."""
        saved = saved_by_parameter(self.param_groups, state_dict, type(self).__name__)
        names = [group["name"] for group in self.param_groups]
        step_count = state_dict.get("step_count", saved[0][1].get("step", 0))
        state = {index: {key: value for key, value in values.items() if key in ("velocity", *adamw.STATE)}
                 for index, values in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        self.step_count = int(step_count or 0)
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

    def __getstate__(self) -> dict[str, Any]:
        """Return all but hooks and cached objects; `copy.deepcopy` also copies the model."""
        # A scheduler replaces `step`.
        return {key: value for key, value in self.__dict__.items()
                if key not in ("step", "_places") and not key.endswith("_hooks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_places": None})

    def training_state(self) -> dict[str, Any]:
        """Return the state that steps change, without settings; tensors are not copied.

        With `load_training_state`, an equal optimizer on an equal model continues bitwise
        identically, including `activity`.
        """
        parameters = [{key: value for key, value in self.state[p].items() if isinstance(value, Tensor)}
                      for group in self.param_groups for p in group["params"]]
        return {"parameters": parameters, "step_count": self.step_count, **self.counts.state()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `training_state` of an equal optimizer; tensors are not copied."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p, values in zip(params, state["parameters"], strict=True):
            self.state[p].update({key: value.to(p.device) for key, value in values.items()})
        self.step_count = state["step_count"]
        self.counts.load(state, params[0].device)
