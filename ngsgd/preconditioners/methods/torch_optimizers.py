"""Adam, AdamW, Muon and any other optimizer of torch's interface as preconditioners.

The direction of the first three is the update at learning rate 1 of a copy of the parameters,
zeros before the step. That of others is their update of a copy, divided by the learning rate. A
GradScaler must unscale first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig
from ngsgd.config.traits import TRAITS, Traits
from ngsgd.errors import ConfigError
from ngsgd.imports import find, first_line
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.estimates import CurvatureAverage
from ngsgd.preconditioners.states import Layout

# begins the names of numbers of a param group among the tensors of its first parameter
_OF_GROUP = "group "
_NUMBERS = {"int": int, "float": float, "bool": bool}


class Adam(Preconditioner):
    """torch.optim.Adam (Kingma and Ba 2015) as a preconditioner.

    Args:
        damping: eps, added to the root of second moments. Default 1e-8.
        ema_decay: beta 2, decay of second moments. Default 0.999.
        momentum: beta 1, decay of the gradient average, in [0, 1). Default 0.9.
        weight_decay: multiple of the parameter in the gradient. Default 0.
        options: see `Preconditioner`; layer_options is not supported.
    """

    damping: float = 1e-8
    ema_decay: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0
    traits = TRAITS["adam"]

    def problems(self) -> list[str]:
        found = [*super().problems(), *self.decay("momentum"), *self.at_least("weight_decay", 0)]
        if self.layer_options:
            found.append("layer_options is set; these methods have no settings of single layers.")
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        # by parameter, from its first step on
        self._copies: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        """Create the torch optimizer of one parameter, with learning rate 1."""
        return torch.optim.Adam([copy], lr=1.0, betas=(self.momentum, self.ema_decay), eps=self.damping,
                                weight_decay=self.weight_decay)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return {"statistics.step*": (), "statistics.exp_avg": shape, "statistics.exp_avg_sq": shape}

    def forget(self, name: str) -> None:
        super().forget(name)
        self._copies.pop(name, None)
        self._optimizers.pop(name, None)

    def viewed(self, x: Tensor) -> Tensor:
        """Return the shape in which the torch optimizer gets a parameter."""
        return x.detach()

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the moments."""

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(grads)
        for name in self.finite(grads):
            found[name] = self.parameter_direction(name, grads[name], self.parameters[name])
            self.statistics.weights[name] = 1.0
        return found

    def parameter_direction(self, name: str, g: Tensor, p: Tensor) -> Tensor:
        """Return the direction of one parameter and update its moments."""
        if name not in self._copies or self._copies[name].dtype != g.dtype or self._copies[name].device != g.device:
            self._copies[name] = nn.Parameter(torch.zeros_like(self.viewed(g)))
            self._optimizers[name] = self.optimizer(name, self._copies[name])
        copy = self._copies[name]
        # With weight decay start from the parameter, because decay is relative to it.
        before = torch.zeros_like(copy)
        if self.weight_decay:
            before = self.viewed(self.blocks.oriented(name, p)).to(copy)
        copy.copy_(before)
        copy.grad = self.viewed(g).to(copy)
        self._optimizers[name].state[copy] = self.statistics.setdefault(name, {})
        with torch.enable_grad():
            self._optimizers[name].step()
        copy.grad = None
        return (before - copy.detach()).view_as(g)

    def finite(self, grads: Mapping[str, Tensor]) -> list[str]:
        """Return the names of finite gradients; count the minibatch as skipped if others exist."""
        if not grads:
            return []
        flags = [g.isfinite().all() for g in grads.values()]
        # One wait for all of them.
        is_finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        if not all(is_finite):
            self.note_skipped()
        return [name for name, one in zip(grads, is_finite, strict=True) if one]

    def refresh(self) -> None:
        """Do nothing; the moments are applied directly."""


class AdamW(Adam):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) as a preconditioner.

    Args:
        weight_decay: multiple of the parameter in the direction. Default 0.01.
        options: see `Adam`.
    """

    weight_decay: float = 0.01
    traits = TRAITS["adamw"]

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        return torch.optim.AdamW([copy], lr=1.0, betas=(self.momentum, self.ema_decay), eps=self.damping,
                                 weight_decay=self.weight_decay)


class Muon(AdamW):
    """torch.optim.Muon (Jordan et al. 2024) for matrices O x rest; AdamW for vectors.

    Args:
        momentum: momentum of Muon, and beta 1 of AdamW for vectors. Default 0.95.
        orthogonal_steps: Newton-Schulz iterations. Default 5.
        options: see `AdamW`.
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    orthogonal_steps: int = 5
    traits = TRAITS["muon"]

    def problems(self) -> list[str]:
        return [*super().problems(), *self.at_least("orthogonal_steps", 1)]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return super().layout(name, entry) if len(shape) < 2 else {"statistics.momentum_buffer": self.blocks.sides(name)[::2]}

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizer(self, name: str, copy: Tensor) -> torch.optim.Optimizer:
        if copy.ndim < 2:
            return super().optimizer(name, copy)
        return torch.optim.Muon([copy], lr=1.0, momentum=self.momentum, weight_decay=self.weight_decay,
                                ns_steps=self.orthogonal_steps)


class CustomOptimizer(Preconditioner):
    """Steps of an optimizer for copies of the parameters, with the learning rate of the job.

    Its state, with numbers of its param groups that change, is saved and loaded as a state of a
    preconditioner; it may hold tensors and numbers.

    Args:
        make: returns the optimizer of parameters and a learning rate.
        options: see `Preconditioner`; only skip, averaging and seed have an effect.
    """

    make: Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer] = torch.optim.SGD
    traits = Traits(every_step=True, fixed_length=True, joins_bias=False, agrees_over_ranks=True, has_mean=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lr = 1.0
        self._copies: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        # of every param group, as the optimizer was made
        self._initial: list[dict[str, Any]] = []

    def _step(self, lr: float | None) -> None:
        self._lr = 1.0 if lr is None else float(lr)
        super()._step(lr)

    def update_curvature(self, seen: Any) -> None:
        """Do nothing; `apply` updates the state."""

    def refresh(self) -> None:
        """Do nothing; the state is applied directly."""

    def forget(self, name: str) -> None:
        # the optimizer of all parameters starts again
        super().forget(name)
        self._optimizer = None

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not grads or not bool(torch.stack([g.isfinite().all() for g in grads.values()]).all()):
            self.note_skipped()
            return dict(grads)
        optimizer = self._optimizer or self._made()
        for group, initial in zip(optimizer.param_groups, self._initial, strict=True):
            group["lr"] = self._lr * initial["share"]
        before = {name: self._current(name) for name in grads}
        for name, copy in self._copies.items():
            copy.grad = grads[name].to(copy) if name in grads else None
            if name in grads:
                copy.copy_(before[name])
        with torch.enable_grad():
            optimizer.step()
        # a step of zero length has no direction
        return {name: (before[name] - self._copies[name].detach()) / (self._lr or 1.0) for name in grads}

    def _current(self, name: str) -> Tensor:
        p = self.blocks.oriented(name, self.parameters[name].detach())
        return p.to(torch.promote_types(p.dtype, torch.float32))

    def _made(self) -> torch.optim.Optimizer:
        names = [name for name, p in self.parameters.items() if p.requires_grad and name not in self.skipped]
        self._copies = {name: nn.Parameter(self._current(name).clone()) for name in names}
        self._optimizer = optimizer = self.make(list(self._copies.values()), self._lr or 1.0)
        self._initial = [{**group, "share": float(group["lr"]) / (self._lr or 1.0)} for group in optimizer.param_groups]
        if self.statistics:
            self._restore(optimizer)
        return optimizer

    def state_dict(self) -> dict[str, dict[str, Any]]:
        if self._optimizer is not None:
            self._store(self._optimizer)
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super().load_state_dict(state)
        self._optimizer = None

    def _store(self, optimizer: torch.optim.Optimizer) -> None:
        self.statistics = CurvatureAverage()
        names, saved = list(self._copies), optimizer.state_dict()
        for index, entry in saved["state"].items():
            self.statistics.put(names[index], dict(_tensors(entry)))
        for group, initial in zip(saved["param_groups"], self._initial, strict=True):
            changed = {key: value for key, value in group.items() if key not in ("lr", "params")
                       and isinstance(value, (int, float, Tensor)) and (isinstance(value, Tensor) or value != initial[key])}
            if changed:
                first = names[group["params"][0]]
                of_group = {f"{_OF_GROUP}{key}": value for key, value in _tensors(changed)}
                self.statistics.put(first, {**self.statistics.get(first, {}), **of_group})

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the state in the statistics, as torch loads it."""
        saved, names = optimizer.state_dict(), list(self._copies)
        for index, name in enumerate(names):
            # as `_tensors` made it
            kept = self.statistics.get(name, {})
            split = {key: key.rpartition(":") for key in kept}
            entry = {(own if kind in _NUMBERS and own else key): _NUMBERS[kind](kept[key].item()) if kind in _NUMBERS and own
                     else kept[key] for key, (own, _, kind) in split.items()}
            for group in saved["param_groups"]:
                if index in group["params"]:
                    group |= {key.removeprefix(_OF_GROUP): value for key, value in entry.items() if key.startswith(_OF_GROUP)}
            if state := {key: value for key, value in entry.items() if not key.startswith(_OF_GROUP)}:
                saved["state"][index] = state
        optimizer.load_state_dict(saved)


def _tensors(entry: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of a state as tensors; the names of numbers end with their type."""
    for key, value in entry.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            yield key, value.detach().clone()
        elif kind in _NUMBERS:
            yield f"{key}:{kind}", torch.tensor(float(value), dtype=torch.float64)
        elif value is not None:
            raise ConfigError(f"the state of optimizer._target_ has {key} of type {kind}, which jobs cannot hand on or continue; "
                              "use an optimizer whose state has tensors and numbers.")


def maker(config: OptimizerConfig) -> Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]:
    """Return the function that makes the optimizer of `_target_`; ConfigError if none does."""
    factory = find(config._target_, config.search_path, "optimizer", "a torch.optim.Optimizer")
    args = dict(config.args or {})

    def make(parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        where = f"optimizer._target_ {config._target_}"
        try:
            made = factory(parameters, lr=lr, **args)
        except Exception as error:
            raise ConfigError(f"{where} failed when it was called with parameters, lr and optimizer.args {args} "
                              f"({first_line(error)}); fix it, or the arguments.") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"{where} returned a {type(made).__name__}; it must return a torch.optim.Optimizer.")
        return made
    return make


def require_optimizer(config: OptimizerConfig) -> None:
    """Raise ConfigError unless the optimizer of `_target_` steps a small matrix."""
    if not config._target_:
        return
    made = maker(config)
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones_like(p)
    optimizer = made([p], 0.1)
    try:
        optimizer.step()
        dict(_tensors(optimizer.state_dict()["state"].get(0, {})))
    except Exception as error:
        raise ConfigError(f"optimizer._target_ {config._target_} cannot step from the gradient alone ({first_line(error)}); choose "
                          "an optimizer that needs no closure and takes dense gradients.") from error
