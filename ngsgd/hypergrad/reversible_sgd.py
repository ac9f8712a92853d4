"""Optimizer for custom loops with exactly reversible steps; P parameters, G components (layers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.arguments import checks_arguments, hints_of, require_state
from ngsgd.errors import ArgumentError, ConfigError, OptimizerStateError, ReversalError
from ngsgd.hypergrad.adjoint import Shortened, shorten, with_decay
from ngsgd.hypergrad.exact_momentum import ExactMomentum
from ngsgd.ops.tensors import dense
from ngsgd.optim.groups import components, require_non_negative, set_options

# Elements checked per parameter in each step; checking all would cost a tenth of the step.
_NUM_LOOKED_AT = 256


@dataclass(frozen=True)
class _Taken:
    """Settings of a past step."""

    lr_G: list[float]
    momentum_G: list[float]
    decay_G: list[float]
    shortened: Shortened
    # Nesterov only: the parameters are the point after momentum, so a step changes them by lr
    # (momentum v - (1 - momentum) g).
    grad_P: Tensor | None

    def rates(self) -> list[float]:
        """Return the factor of the velocity of each component, after limits."""
        rate_G = self.shortened.rates(self.lr_G)
        if self.grad_P is None:
            return rate_G
        return [gamma * rate for gamma, rate in zip(self.momentum_G, rate_G, strict=True)]

    def impulses(self) -> list[float]:
        """Return lr (1 - momentum) of each component, after limits."""
        rate_G = self.shortened.rates(self.lr_G)
        return [rate * (1.0 - gamma) for rate, gamma in zip(rate_G, self.momentum_G, strict=True)]


class ReversibleSGD(torch.optim.Optimizer):
    """SGD with momentum whose steps `undo` reverses exactly, with memory for a few bits per step.

    One step of a component: v = momentum v - (1 - momentum) (g + weight_decay w); w += lr v. The
    effective learning rate therefore does not depend on momentum. A component is a module that owns
    parameters. Each is one param group, whose `lr`, `momentum`, `weight_decay` and `max_change` may
    differ and may change between steps, as schedulers do.

    Change the parameters by other means before the first step only. Later `step` raises ConfigError
    and `undo` ReversalError. Detection is immediate for changes that torch counts, such as
    `load_state_dict`. Changes through `p.data` are detected within as many steps as there are
    parameters.

    Args:
        model: the module to train; its parameters are all float32 or all float64. Frozen ones are
            not changed.
        lr: learning rate for the loss, summed or averaged.
        momentum: at least 0; a step stores log2(1/momentum) bits per parameter, and all 64 with
            momentum 0.
        nesterov: evaluate gradients at the point after momentum. Such a step has a term along its
            gradient, which is stored: 4 bytes per parameter and step.
        max_change: maximum L2 norm of the update of a component per step; 0 = none.
        max_param_change: maximum L2 norm of the update of the model per step; 0 = none.
        weight_decay: as in torch: adds weight_decay w to the gradient.
        layer_options: settings of components by name or pattern, as for `ngsgd.NGSGD`.
        engine: "auto" uses compiled kernels if a C++ compiler is available, "eager" never; results
            are bitwise identical.

    Raises:
        DivergenceError: a gradient is not finite, or a number exceeds its range.
        ReversalError: a step cannot be reversed.

    Source: arXiv 1502.03492.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer, x = ReversibleSGD(model, lr=0.1), torch.randn(8, 4)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     model(x).square().mean().backward()
        >>> before = model.weight.detach().clone()
        >>> closure()
        >>> optimizer.step()
        >>> optimizer.undo(closure)
        >>> torch.equal(model.weight, before)
        True
    """

    @checks_arguments()
    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.9, nesterov: bool = False, max_change: float = 0.0,
                 max_param_change: float = 0.0, weight_decay: float = 0.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None, engine: str = "auto") -> None:
        defaults = {"lr": lr, "momentum": momentum, "max_change": max_change, "weight_decay": weight_decay}
        require_non_negative(max_param_change=max_param_change, **defaults)
        groups = components(model)
        if not groups:
            raise ArgumentError("ReversibleSGD has nothing to train: no parameter of the module "
                                "requires a gradient; call requires_grad_(True) on layers.")
        set_options(groups, layer_options or {}, set(defaults), hints_of(type(self).__init__))
        super().__init__(groups, defaults)
        self.nesterov, self.max_param_change = nesterov, max_param_change
        self._params = [p for group in self.param_groups for p in group["params"]]
        if len({p.dtype for p in self._params}) != 1:
            raise ArgumentError("Invalid parameters: they must have one dtype; convert the model, as in model.float().")
        self._engine = engine
        self.exact = self._exact()
        self._taken: list[_Taken] = []
        # versions of the parameters after the last step
        self._versions: list[int] = []

    def _exact(self) -> ExactMomentum:
        ends, first = [], 0
        for group in self.param_groups:
            ends.append(slice(first, first := first + sum(p.numel() for p in group["params"])))
        names = [group["name"] for group in self.param_groups]
        flat_P = torch.cat([p.detach().reshape(-1) for p in self._params])
        return ExactMomentum(flat_P, ends, names=names, engine=self._engine)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Reject groups after construction, because earlier steps could not be reversed."""
        if "exact" in self.__dict__:
            raise ConfigError("ReversibleSGD does not support further param groups, because its "
                              "steps are reversed together; create a new one when layers are unfrozen.")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Take one step along the gradients, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.exact.num_steps:
            # The weights may have been loaded or initialized after the construction.
            self.exact = self._exact()
        elif changed := self._changed():
            raise ConfigError(f"{changed} was changed outside the optimizer since the last step, "
                              "and ReversibleSGD would revert that; also load the state of this "
                              "optimizer, or create a new one after setting the weights.")
        lr_G, momentum_G, decay_G, limit_G = (
            [float(group[key]) for group in self.param_groups] for key in ("lr", "momentum", "weight_decay", "max_change"))
        grad_P = self._direction(decay_G)
        self.exact.step_v(grad_P, momentum_G)
        norms_G = self._norms(grad_P, momentum_G) if self.max_param_change or any(limit_G) else [0.0] * len(lr_G)
        shortened = shorten(norms_G, lr_G, limit_G, self.max_param_change)
        taken = _Taken(lr_G, momentum_G, decay_G, shortened, grad_P if self.nesterov else None)
        self.exact.step_x(taken.rates())
        if self.nesterov:
            self.exact.shift_x(grad_P, taken.impulses(), -1)
        self._taken.append(taken)
        self._write()
        return loss

    @torch.no_grad()
    def undo(self, closure: Callable[[], Any]) -> None:
        """Reverse the last step.

        Args:
            closure: clears the gradients and computes those of the minibatch of that step, with the
                same random numbers. It is called with the model as it was before the step. Nesterov
                momentum does not use it.

        Raises:
            ReversalError: there is no step to reverse, or the result differs from the forward pass.
        """
        if not self._taken:
            raise ReversalError(0, "there is no step that can be reversed")
        if changed := self._changed():
            raise ReversalError(self.exact.num_steps, f"{changed} was changed outside the optimizer since")
        taken = self._taken[-1]
        if taken.grad_P is not None:
            self.exact.shift_x(taken.grad_P, taken.impulses(), 1)
        self.exact.undo_x(taken.rates())
        self._write()
        grad_P = taken.grad_P
        if grad_P is None:
            with torch.enable_grad():
                closure()
            grad_P = self._direction(taken.decay_G)
        self.exact.undo_v(grad_P)
        self._taken.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the data for reversal, for torch.load with weights_only."""
        packed = [(taken.lr_G, taken.momentum_G, taken.decay_G, tuple(taken.shortened), taken.grad_P) for taken in self._taken]
        return {**super().state_dict(), "exact": self.exact.state_dict(), "taken": packed, "dtype": str(self.exact.dtype)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and its parameters, which are part of it.

        Nothing is changed if the state does not fit.

        Raises:
            OptimizerStateError: this is not a state of ReversibleSGD on the same model.
            ReversalError: its numbers were changed.
        """
        kind = type(self).__name__
        require_state(state_dict, ("state", "param_groups", "exact", "taken", "dtype"), kind, OptimizerStateError)
        if state_dict["dtype"] != str(self._params[0].dtype):
            raise OptimizerStateError(f"the state of {kind} is {state_dict['dtype']}, and the model {self._params[0].dtype}; load "
                                      "it with a model of the same dtype.")
        _require_groups(state_dict, self.param_groups)
        exact = self._exact()
        exact.load_state_dict(state_dict["exact"])
        try:
            taken = [_Taken(lr_G, momentum_G, decay_G, Shortened(*shortened), grad_P)
                     for lr_G, momentum_G, decay_G, shortened, grad_P in state_dict["taken"]]
        except (TypeError, ValueError) as error:
            raise OptimizerStateError(f"the steps of the state of {kind} are damaged ({error}); load a complete state.") from error
        if len(taken) != exact.num_steps or any(len(one.lr_G) != len(self.param_groups) for one in taken):
            raise OptimizerStateError(f"the state of {kind} has the settings of {len(taken)} of {exact.num_steps} steps; load a "
                                      "complete state.")
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.exact, self._taken = exact, taken
        with torch.no_grad():
            self._write()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy.deepcopy`, with the parameters."""
        attributes = {key: value for key, value in self.__dict__.items()
                      if key not in ("exact", "step", "_taken") and not key.endswith("_hooks")}
        return {**attributes, "_state_dict": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "_state_dict"})
        # Otherwise torch's load_state_dict is the caller.
        if "_state_dict" in state:
            self.exact = self._exact()
            self.load_state_dict(state["_state_dict"])

    def _changed(self) -> str:
        """Return the layer whose parameters changed since the last step, or ""."""
        for group in self.param_groups:
            if any(p.dtype != self.exact.dtype for p in group["params"]):
                return f"the dtype of {group['name']}"
        parts = self.exact.weights().split([p.numel() for p in self._params])
        index = self.exact.num_steps % len(parts)
        sample = self._params[index].detach().reshape(-1)[:_NUM_LOOKED_AT]
        versions = [p._version for p in self._params]
        if self._versions == versions and torch.equal(sample, parts[index][:_NUM_LOOKED_AT]):
            return ""
        for p, part in zip(self._params, parts, strict=True):
            if not torch.equal(p.detach().reshape(-1), part):
                return str(next(group["name"] for group in self.param_groups if any(p is own for own in group["params"])))
        self._versions = versions
        return ""

    def _direction(self, decay_G: list[float]) -> Tensor:
        """Return g + weight_decay w, P; the same operations in both directions."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        grad_P = torch.cat([dense(g).reshape(-1) for g in grads])
        return with_decay(grad_P, self.exact.weights(), decay_G, self.exact.groups)

    def _write(self) -> None:
        parts = self.exact.weights().split([p.numel() for p in self._params])
        for p, part in zip(self._params, parts, strict=True):
            p.copy_(part.view_as(p))
        self._versions = [p._version for p in self._params]

    def _norms(self, grad_P: Tensor, momentum_G: list[float]) -> list[float]:
        """Return the norm of the update of each component at learning rate 1."""
        if not self.nesterov:
            return self.exact.velocity_norms()
        v_P = self.exact.velocity()
        return [float((gamma * v_P[group] - (1.0 - gamma) * grad_P[group].double()).norm())
                for group, gamma in zip(self.exact.groups, momentum_G, strict=True)]


def _require_groups(state: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    saved = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(saved, list) or not all(isinstance(one, Mapping) for one in saved):
        raise OptimizerStateError("the state of ReversibleSGD has no param_groups; load the result of its state_dict().")
    found, wanted = ([(group.get("name"), len(group.get("params", ()))) for group in each] for each in (saved, groups))
    if found != wanted:
        raise OptimizerStateError(f"the state of ReversibleSGD is of the layers {found}, and the model has {wanted} (name, number "
                                  "of parameters); load it with the same model.")
    for one, group in zip(saved, groups, strict=True):
        if wrong := sorted(key for key in {*one} | {*group} if key != "params" and type(one.get(key)) is not type(group.get(key))
                           and not isinstance(one.get(key), int | float)):
            raise OptimizerStateError(f"{wrong[0]} of {group['name']} is {one.get(wrong[0])!r} in the state of ReversibleSGD; load "
                                      "a complete state.")
