"""Learning-rate schedules of icefall: Eden and Eden2.

A schedule of a loop in one process; `schedule.lr_schedule=eden` is that of `ngsgd train`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ngsgd.arguments import require_state
from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.schedules import EDEN_WARM_UP, EDEN_WARM_UP_START, eden_decay, linear_warm_up


class Eden(LRScheduler):
    """Decay with the -1/2 power of both batches and epochs, after a linear warm-up.

    lr = base ((b^2 + B^2) / B^2)^(-1/4) ((e^2 + E^2) / E^2)^(-1/4) w, with b batches, e epochs, and
    w rising from `warmup_start` to 1. The base rate is the `lr` of each parameter group. Call
    `step_epoch(epoch)` at the start of each epoch, counted from 0, and `step_batch()` after each
    optimizer step. `step()` equals `step_batch()`.

    Args:
        optimizer: the optimizer whose rates are set.
        lr_batches: B, batches after which the decay by batches starts. Default 7500.
        lr_epochs: E, epochs after which the decay by epochs starts. Default 3.5.
        warmup_batches: batches of the warm-up; 0 = none. Default 500.
        warmup_start: first value of w, in [0, 1]. Default 0.5; icefall's recipes use 0.1.

    Raises:
        ConfigError: a number is out of range.

    Source: Yao et al. 2024, "Zipformer", section 3.5; icefall's zipformer/optim.py.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.045)
        >>> scheduler = Eden(optimizer)
        >>> scheduler.step_epoch(0)
        >>> optimizer.step()
        >>> scheduler.step_batch()
        >>> [round(lr, 6) for lr in scheduler.get_last_lr()]
        [0.022545]
    """

    def __init__(self, optimizer: Optimizer, lr_batches: float = 7500.0, lr_epochs: float = 3.5,
                 warmup_batches: float = EDEN_WARM_UP, warmup_start: float = EDEN_WARM_UP_START) -> None:
        for name, value in (("lr_batches", lr_batches), ("lr_epochs", lr_epochs)):
            if not value > 0.0:
                raise ConfigError(f"{name} is {value}; it must be above 0.")
        if not (warmup_batches >= 0.0 and 0.0 <= warmup_start <= 1.0):
            raise ConfigError(f"warmup_batches is {warmup_batches} and warmup_start {warmup_start}; give at least 0 batches and a "
                              "start from 0 to 1.")
        self.lr_batches, self.lr_epochs = lr_batches, lr_epochs
        self.warmup_batches, self.warmup_start = warmup_batches, warmup_start
        self.epoch = 0.0
        super().__init__(optimizer)

    @property
    def batch(self) -> int:
        """Number of batches so far; the `last_epoch` of PyTorch's schedulers."""
        return self.last_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the name of the class."""
        return {**super().state_dict(), "schedule": type(self).__name__}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; nothing is changed if it does not fit.

        Raises:
            OptimizerStateError: the state is of another schedule or number of parameter groups.
        """
        kind, own = type(self).__name__, self.state_dict()
        require_state(state_dict, tuple(own), kind, OptimizerStateError)
        if state_dict["schedule"] != kind or (extra := sorted({*state_dict} - {*own})):
            found = state_dict["schedule"] if state_dict["schedule"] != kind else f"{kind} with {extra[0]}"
            raise OptimizerStateError(f"the state is of {found}, and this is {kind}; load the result of its state_dict().")
        wrong = [key for key, value in own.items() if not _is_like(state_dict[key], value)]
        if wrong:
            raise OptimizerStateError(f"{wrong[0]} of the state of {kind} is {state_dict[wrong[0]]!r}, and this schedule has "
                                      f"{own[wrong[0]]!r}; load the state of a schedule of as many parameter groups.")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "schedule"})

    def step_batch(self, batch: int | None = None) -> None:
        """Count one batch, or set the number of batches since the start of training."""
        if batch is None:
            self.step()
            return
        self.last_epoch = batch
        self._set_rates()

    def step_epoch(self, epoch: float | None = None) -> None:
        """Count one epoch at its end, or set the number of complete epochs at a start."""
        self.epoch = self.epoch + 1.0 if epoch is None else float(epoch)
        self._set_rates()

    def get_lr(self) -> list[Any]:
        """Return the rate of each parameter group."""
        factor = self.decay() * linear_warm_up(self.batch, self.warmup_batches, self.warmup_start)
        return [base * factor for base in self.base_lrs]

    def decay(self) -> float:
        """Return the factor without warm-up."""
        return eden_decay(self.batch, self.lr_batches) * eden_decay(self.epoch, self.lr_epochs)

    def _set_rates(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                # A recorded graph reads this tensor.
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
                         for group in self.optimizer.param_groups]


def _is_like(value: Any, known: Any) -> bool:
    """Return whether a value of a state has the type and length of a known value, and is finite."""
    if isinstance(known, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(known) and all(map(_is_like, value, known))
    if isinstance(known, int | float | Tensor) and not isinstance(known, bool):
        return isinstance(value, int | float | Tensor) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type(known))


class Eden2(Eden):
    """Eden by batches only, with the same asymptotic decay: ((b^2 + B^2) / B^2)^(-1/2).

    Args:
        optimizer: the optimizer whose rates are set.
        lr_batches: B, batches after which the decay starts. Default 7500.
        warmup_batches: batches of the warm-up; 0 = none. Default 500.
        warmup_start: first value of w, in [0, 1]. Default 0.5.

    Source: icefall's zipformer/optim.py.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.045)
        >>> scheduler = Eden2(optimizer, lr_batches=100)
        >>> scheduler.step_batch(500)
        >>> [round(lr, 6) for lr in scheduler.get_last_lr()]
        [0.008825]
    """

    def __init__(self, optimizer: Optimizer, lr_batches: float = 7500.0, warmup_batches: float = EDEN_WARM_UP,
                 warmup_start: float = EDEN_WARM_UP_START) -> None:
        super().__init__(optimizer, lr_batches, warmup_batches=warmup_batches, warmup_start=warmup_start)

    def decay(self) -> float:
        return eden_decay(self.batch, self.lr_batches) ** 2
