"""Kaldi's other update rules: what happens around a step (nnet3-train; see also `SGD` and `ngsgd.ops.orthonormal`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.sgd import SGD

# Kaldi refuses to shrink a model further at once
_MIN_SHRINKAGE = 0.5


def backstitch_step(optimizer: SGD, closure: Callable[[], Tensor], scale: float, *, num_samples: int | None = None) -> Tensor:
    """One minibatch with backstitch (Wang et al. 2017): a step back by `scale`, then one forward by 1 + `scale`.

    `closure` clears the gradients, runs forward and backward and returns the loss; it is called twice, on the same minibatch.
    The Fisher estimates are frozen in the step back, the limits on change go with the step, weight decay is applied once.
    Returns the loss before the step back.  Momentum must be 0.
    """
    if optimizer.momentum:
        raise ConfigError(f"backstitch needs momentum 0, not {optimizer.momentum}; set one of the two to 0.")
    if not scale > 0.0:
        raise ConfigError(f"the backstitch scale is {scale}; it must be greater than 0 (Kaldi uses 0.3 to 1).")
    freeze = optimizer.freeze if isinstance(optimizer, NGSGD) else _nothing
    freeze(True)
    try:
        loss = closure()
        optimizer.step(scale=-scale)
    finally:
        freeze(False)
    closure()
    optimizer.step(scale=1.0 + scale, num_samples=num_samples)
    return loss


def _nothing(frozen: bool) -> None:
    """Plain SGD has no Fisher estimates."""


@torch.no_grad()
def shrink(model: nn.Module, proportional_shrink: float, lr: float) -> float:
    """Multiplies every parameter by 1 - proportional_shrink * lr, at the start of a job (Kaldi's l2 for chain models).

    Returns the factor.  Raises ConfigError where it would not be above 0.5.
    """
    factor = 1.0 - proportional_shrink * lr
    if not _MIN_SHRINKAGE < factor <= 1.0:
        raise ConfigError(f"proportional_shrink {proportional_shrink} at learning rate {lr} would multiply the model by {factor}; "
                          f"the factor must be above {_MIN_SHRINKAGE} and at most 1, so lower proportional_shrink.")
    if factor < 1.0:
        torch._foreach_mul_([p for p in model.parameters() if p.requires_grad], factor)
    return factor
