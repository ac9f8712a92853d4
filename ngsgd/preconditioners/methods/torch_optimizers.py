"""Adam, AdamW, Muon and any other optimizer of torch's interface as preconditioners.

The direction is the update of a copy, divided by the learning rate. It is 1 for the first three,
whose copies are zeros before the step. A GradScaler must unscale first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig
from ngsgd.config.traits import Traits
from ngsgd.errors import ConfigError
from ngsgd.imports import find, first_line
from ngsgd.preconditioners.base import DirectMethod
from ngsgd.preconditioners.estimates import CurvatureAverage
from ngsgd.preconditioners.states import Layout

# begins the names of numbers of a param group among the tensors of its first parameter
_OF_GROUP = "group "
_NUMBERS = {"int": int, "float": float, "bool": bool}


class TorchMethod(DirectMethod):
    """Base of methods whose directions are steps of torch optimizers for copies of the parameters.

    Their state, with numbers of param groups that change, is saved and loaded as a state of a
    preconditioner; it may hold tensors and numbers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr = 1.0
        self._copies: dict[str, nn.Parameter] = {}
        # with the param groups of each, as it was made
        self._optimizers: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []

    def optimizers(self, copies: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        """Return optimizers for all copies together."""
        raise NotImplementedError

    def viewed(self, x: Tensor) -> Tensor:
        """Return the shape in which torch optimizers get a parameter."""
        return x.detach()

    def start(self, name: str) -> Tensor:
        """Return the value of a copy before a step."""
        return self.viewed(self.value_of(name))

    def forget(self, name: str) -> None:
        super().forget(name)
        self._optimizers = []

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found, finite = dict(grads), self.finite(grads)
        if not finite:
            return found
        if not self._optimizers or any(name not in self._copies or self._copies[name].dtype != g.dtype
                                       or self._copies[name].device != g.device for name, g in grads.items()):
            self._begin()
        before = {name: self.start(name).to(self._copies[name]) for name in finite}
        for name, value in before.items():
            self._copies[name].copy_(value)
            self._copies[name].grad = self.viewed(grads[name]).to(value)
        for optimizer, initial in self._optimizers:
            for group, was in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = self.lr * was["share"]
            with torch.enable_grad():
                optimizer.step()
        for name, value in before.items():
            self._copies[name].grad = None
            # a step of zero length has no direction
            found[name] = ((value - self._copies[name].detach()) / (self.lr or 1.0)).view_as(grads[name])
        return found

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

    def _begin(self) -> None:
        """Make the optimizers, with the state in the statistics."""
        names = [name for name, p in self.parameters.items() if p.requires_grad and name not in self.skipped]
        self._copies = {name: nn.Parameter(self.viewed(self.value_of(name)).clone()) for name in names}
        self._optimizers = []
        for optimizer in self.optimizers(list(self._copies.values()), self.lr or 1.0):
            self._restore(optimizer)
            self._optimizers.append((optimizer, [{**group, "share": float(group["lr"]) / (self.lr or 1.0)}
                                                 for group in optimizer.param_groups]))

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super().load_state_dict(state)
        self._optimizers = []

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of its parameters, in its order."""
        names = {id(copy): name for name, copy in self._copies.items()}
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def settle(self) -> None:
        self.statistics = CurvatureAverage() if self._optimizers else self.statistics
        for optimizer, initial in self._optimizers:
            names, saved = self._names(optimizer), optimizer.state_dict()
            for index, entry in saved["state"].items():
                self.statistics.put(names[index], dict(_tensors(entry)))
            for group, was in zip(saved["param_groups"], initial, strict=True):
                changed = {key: value for key, value in group.items() if key not in ("lr", "params")
                           and isinstance(value, (int, float, Tensor)) and (isinstance(value, Tensor) or value != was[key])}
                if changed:
                    first = names[group["params"][0]]
                    of_group = {f"{_OF_GROUP}{key}": value for key, value in _tensors(changed)}
                    self.statistics.put(first, {**self.statistics.get(first, {}), **of_group})

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the state in the statistics, as torch loads it."""
        saved = optimizer.state_dict()
        for index, name in enumerate(self._names(optimizer) if self.statistics else ()):
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
        if self.statistics:
            optimizer.load_state_dict(saved)


class Adam(TorchMethod, kind="adam"):
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
    unused = (("layer_options", "all layers have one optimizer"),)
    # of the parameters that Muon does not take
    vector_optimizer: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def optimizers(self, copies: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [self.vector_optimizer(copies, lr=lr, betas=(self.momentum, self.ema_decay), eps=self.damping,
                                      weight_decay=self.weight_decay)] if copies else []

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return {"statistics.step*": (), "statistics.exp_avg": shape, "statistics.exp_avg_sq": shape}

    def start(self, name: str) -> Tensor:
        # Only decay is relative to the parameter.
        return super().start(name) if self.weight_decay else torch.zeros_like(self._copies[name])


class AdamW(Adam, kind="adamw"):
    """torch.optim.AdamW (Loshchilov and Hutter 2019) as a preconditioner.

    Args:
        weight_decay: multiple of the parameter in the direction. Default 0.01.
        options: see `Adam`.
    """

    weight_decay: float = 0.01
    vector_optimizer: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


class Muon(AdamW, kind="muon"):
    """torch.optim.Muon (Jordan et al. 2024) for matrices O x rest; AdamW for vectors.

    Args:
        momentum: momentum of Muon, and beta 1 of AdamW for vectors. Default 0.95.
        orthogonal_steps: Newton-Schulz iterations. Default 5.
        options: see `AdamW`.
    """

    momentum: float = 0.95
    weight_decay: float = 0.0
    orthogonal_steps: int = 5

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        shape = self.blocks.shape(name)
        return super().layout(name, entry) if len(shape) < 2 else {"statistics.momentum_buffer": self.blocks.sides(name)[::2]}

    def viewed(self, x: Tensor) -> Tensor:
        return x.detach().flatten(1) if x.ndim > 1 else x.detach()

    def optimizers(self, copies: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        matrices = [copy for copy in copies if copy.ndim > 1]
        return [*super().optimizers([copy for copy in copies if copy.ndim < 2], lr), *(
            [torch.optim.Muon(matrices, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay,
                              ns_steps=self.orthogonal_steps)] if matrices else [])]


class CustomOptimizer(TorchMethod):
    """Steps of a custom optimizer, with the learning rate of the job.

    Args:
        make: returns the optimizer of parameters and a learning rate.
        options: see `Preconditioner`; only skip, averaging and seed have an effect.
    """

    make: Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer] = torch.optim.SGD
    traits = Traits(every_step=True, fixed_length=True, joins_bias=False, agrees_over_ranks=True, has_mean=False)

    def _step(self, lr: float | None) -> None:
        self.lr = 1.0 if lr is None else float(lr)
        super()._step(lr)

    def optimizers(self, copies: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [self.make(copies, lr)]


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
