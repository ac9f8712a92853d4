"""An optimiser for anybody's loop whose steps can be taken back, bit for bit.

Letters: P parameters, G components (layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, ReversalError
from ngsgd.hypergrad.exact_momentum import ExactMomentum
from ngsgd.hypergrad.step_limits import Shortened, shorten
from ngsgd.optim.sgd import components, require_non_negative, set_options

# elements of one parameter in each step; a look at all would cost a tenth of the step
_NUM_LOOKED_AT = 256


@dataclass(frozen=True)
class _Taken:
    """The settings of a step, as they were."""

    lr_G: list[float]
    momentum_G: list[float]
    decay_G: list[float]
    shortened: Shortened
    grad_P: Tensor | None  # Nesterov only


class ReversibleSGD(torch.optim.Optimizer):
    """SGD with momentum on the parameters of `model`; `undo` takes the last step back, with memory
    for a few bits a step.

    One step of a component: v = momentum v - (1 - momentum) (g + weight_decay w); w += lr v, so lr
    keeps its meaning whatever the momentum.  A component is a module that owns parameters; each is
    one param group, whose `lr`, `momentum`, `weight_decay` and `max_change` may differ and may
    change from step to step, as schedulers do.

    Args:
        model: the module to train; its parameters are all float32 or all float64, and frozen ones
            are left alone.
        lr: of the loss as it is, summed or averaged.
        momentum: at least 0; a step puts log2(1/momentum) bits per parameter aside, and all 64 with
            momentum 0.
        nesterov: the gradient is that at the point momentum leads to.  Such a step moves along its
            own gradient, which cannot be had again without knowing where it came from; so the
            gradient is put aside, 4 bytes per parameter and step.
        max_change: limit on the L2 norm of one component's change in a step; 0 = none.
        max_param_change: limit on the L2 norm of the whole model's change in a step; 0 = none.
        weight_decay: as torch's: adds weight_decay w to the gradient.
        layer_options: settings of single components by name or pattern, as for `ngsgd.NGSGD`.
        engine: "auto" takes compiled kernels where a C++ compiler is at hand, "eager" never; equal
            bits.

    The parameters may be changed by others before the first step only.  Later `step` raises
    ConfigError and `undo` ReversalError:
    at once for changes that torch counts, as by `load_state_dict`, and within as many steps as
    there are parameters for those through `p.data`.  Raises DivergenceError for a gradient that is
    not finite and for numbers out of range, and ReversalError where a step cannot be undone.
    """

    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.9,
                 nesterov: bool = False, max_change: float = 0.0,
                 max_param_change: float = 0.0, weight_decay: float = 0.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None,
                 engine: str = "auto") -> None:
        defaults = {"lr": lr, "momentum": momentum, "max_change": max_change,
                    "weight_decay": weight_decay}
        require_non_negative(max_param_change=max_param_change, **defaults)
        groups = components(model)
        if not groups:
            raise ValueError("the module has no parameter that requires a gradient")
        set_options(groups, layer_options or {}, set(defaults))
        super().__init__(groups, defaults)
        self.nesterov, self.max_param_change = nesterov, max_param_change
        self._params = [p for group in self.param_groups for p in group["params"]]
        if len({p.dtype for p in self._params}) != 1:
            raise ValueError("Invalid parameters: they must be of one type")
        self._engine = engine
        self.exact = self._exact()
        self._taken: list[_Taken] = []
        # of the parameters as the last step wrote them
        self._versions: list[int] = []

    def _exact(self) -> ExactMomentum:
        """Position and velocity 0 at the parameters as they are."""
        ends, first = [], 0
        for group in self.param_groups:
            ends.append(slice(first, first := first + sum(p.numel() for p in group["params"])))
        names = [group["name"] for group in self.param_groups]
        flat_P = torch.cat([p.detach().reshape(-1) for p in self._params])
        return ExactMomentum(flat_P, ends, names=names, engine=self._engine)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: earlier steps could not be undone."""
        if "exact" in self.__dict__:
            raise ConfigError("ReversibleSGD takes no further param groups, since its steps are "
                              "undone together; make a new one when layers are unfrozen.")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One step along the gradients in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.exact.num_steps:
            # the weights may have been loaded or initialized since
            self.exact = self._exact()
        elif changed := self._changed():
            raise ConfigError(f"{changed} was changed by others since the last step, and "
                              "ReversibleSGD would undo that; load the state of this optimizer, "
                              "too, or make a new one after setting the weights.")
        lr_G, momentum_G, decay_G, limit_G = (
            [float(group[key]) for group in self.param_groups]
            for key in ("lr", "momentum", "weight_decay", "max_change"))
        grad_P = self._direction(decay_G)
        self.exact.step_v(grad_P, momentum_G)
        norms_G = self._norms(grad_P, momentum_G) if self.max_param_change or any(limit_G) else [0.0] * len(lr_G)
        taken = _Taken(lr_G, momentum_G, decay_G,
                       shorten(norms_G, lr_G, limit_G, self.max_param_change),
                       grad_P if self.nesterov else None)
        self._move(taken, grad_P)
        self._taken.append(taken)
        self._write()
        return loss

    @torch.no_grad()
    def undo(self, closure: Callable[[], Any]) -> None:
        """Takes the last step back.

        `closure` clears the gradients and computes those of that step's minibatch, as it did then,
        with the same random numbers;
        it is called with the model as it was before the step; with Nesterov's momentum it is not
        needed.
        """
        if not self._taken:
            raise ReversalError(0, "no step has been taken that is not undone yet")
        if changed := self._changed():
            raise ReversalError(self.exact.num_steps, f"{changed} was changed by others since")
        taken = self._taken[-1]
        rate_G = taken.shortened.rates(taken.lr_G)
        if taken.grad_P is not None:
            self.exact.shift_x(taken.grad_P, _impulses(taken), 1)
            rate_G = [gamma * rate for gamma, rate in zip(taken.momentum_G, rate_G, strict=True)]
        self.exact.undo_x(rate_G)
        self._write()
        grad_P = taken.grad_P
        if grad_P is None:
            with torch.enable_grad():
                closure()
            grad_P = self._direction(taken.decay_G)
        self.exact.undo_v(grad_P)
        self._taken.pop()

    def state_dict(self) -> dict[str, Any]:
        """With all that going back needs, in tensors, numbers and tuples, which torch.load takes
        with weights_only.
        """
        packed = [(taken.lr_G, taken.momentum_G, taken.decay_G, tuple(taken.shortened),
                   taken.grad_P)
                  for taken in self._taken]
        return {**super().state_dict(), "exact": self.exact.state_dict(), "taken": packed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also sets the parameters: they are part of the state."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.exact.load_state_dict(state_dict["exact"])
        self._taken = [_unpacked(taken) for taken in state_dict["taken"]]
        with torch.no_grad():
            self._write()

    def __getstate__(self) -> dict[str, Any]:
        """`copy.deepcopy` also copies the parameters."""
        attributes = {key: value for key, value in self.__dict__.items()
                      if key not in ("exact", "step", "_taken") and not key.endswith("_hooks")}
        return {**attributes, "_state_dict": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "_state_dict"})
        # else torch's load_state_dict calls this
        if "_state_dict" in state:
            self.exact = self._exact()
            self.load_state_dict(state["_state_dict"])

    def _changed(self) -> str:
        """The layer whose parameters are not those that the last step wrote; "" if none is seen."""
        parts = self.exact.weights().split([p.numel() for p in self._params])
        index = self.exact.num_steps % len(parts)
        sample = self._params[index].detach().reshape(-1)[:_NUM_LOOKED_AT]
        if self._versions == [p._version
                              for p in self._params] and torch.equal(sample,
                                                                     parts[index][:_NUM_LOOKED_AT]):
            return ""
        for p, part in zip(self._params, parts, strict=True):
            if not torch.equal(p.detach().reshape(-1), part):
                return str(next(group["name"] for group in self.param_groups
                                if any(p is own for own in group["params"])))
        self._versions = [p._version for p in self._params]
        return ""

    def _direction(self, decay_G: list[float]) -> Tensor:
        """g + weight_decay w, P; the same operations both ways."""
        grad_P = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                            for p in self._params])
        w_P = self.exact.weights()
        for group, decay in zip(self.exact.groups, decay_G, strict=True):
            if decay:
                grad_P[group].add_(w_P[group], alpha=decay)
        return grad_P

    def _write(self) -> None:
        for p, part in zip(self._params,
                           self.exact.weights().split([p.numel() for p in self._params]),
                           strict=True):
            p.copy_(part.view_as(p))
        self._versions = [p._version for p in self._params]

    # Nesterov: the parameters are the point that momentum leads to, so a step moves them by lr
    # (momentum v - (1 - momentum) g)

    def _move(self, taken: _Taken, grad_P: Tensor) -> None:
        rate_G = taken.shortened.rates(taken.lr_G)
        if not self.nesterov:
            self.exact.step_x(rate_G)
            return
        self.exact.step_x([gamma * rate
                           for gamma, rate in zip(taken.momentum_G, rate_G, strict=True)])
        self.exact.shift_x(grad_P, _impulses(taken), -1)

    def _norms(self, grad_P: Tensor, momentum_G: list[float]) -> list[float]:
        """Of each component's change at learning rate 1."""
        if not self.nesterov:
            return self.exact.velocity_norms()
        v_P = self.exact.velocity()
        return [float((gamma * v_P[group] - (1.0 - gamma) * grad_P[group].double()).norm())
                for group, gamma in zip(self.exact.groups, momentum_G, strict=True)]


def _unpacked(taken: Any) -> _Taken:
    # of an earlier version
    if isinstance(taken, _Taken):
        return taken
    lr_G, momentum_G, decay_G, shortened, grad_P = taken
    return _Taken(lr_G, momentum_G, decay_G, Shortened(*shortened), grad_P)


def _impulses(taken: _Taken) -> list[float]:
    """lr (1 - momentum) of each component, shortened."""
    rates = taken.shortened.rates(taken.lr_G)
    return [rate * (1.0 - gamma) for rate, gamma in zip(rates, taken.momentum_G, strict=True)]
