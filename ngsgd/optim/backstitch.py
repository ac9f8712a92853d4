"""Kaldi's backstitch, which acts around a step (nnet3-train)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ngsgd.errors import ConfigError
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.optimizer import Optimizer


def backstitch_step(optimizer: Optimizer, closure: Callable[[], Tensor], scale: float, *, num_samples: int | None = None) -> Tensor:
    """Train on one minibatch with backstitch: a step of -scale, then one of 1 + scale.

    The Fisher estimates are frozen in the first step, update-norm limits scale with the step, and
    weight decay is applied once.

    Source: Wang et al. 2017.

    Args:
        optimizer: SGD or NGSGD with momentum 0.
        closure: clears the gradients, runs forward and backward, and returns the loss. It is called
            twice on the same minibatch.
        scale: greater than 0; Kaldi uses 0.3 to 1.
        num_samples: number of samples in the minibatch; see `SGD.step`.

    Returns:
        The loss before the first step.

    Raises:
        ConfigError: momentum is not 0, or scale is not positive.
    """
    if optimizer.momentum:
        raise ConfigError(f"backstitch needs momentum 0, not {optimizer.momentum}; set one of the "
                          "two to 0.")
    if not scale > 0.0:
        raise ConfigError(f"the backstitch scale is {scale}; it must be greater than 0 (Kaldi uses 0.3 to 1).")
    freeze = optimizer.freeze if isinstance(optimizer, NGSGD) else lambda frozen: None
    freeze(True)
    try:
        loss = closure()
        optimizer.step(scale=-scale)
    finally:
        freeze(False)
    closure()
    optimizer.step(scale=1.0 + scale, num_samples=num_samples)
    return loss
