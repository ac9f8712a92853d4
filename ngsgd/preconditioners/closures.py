"""Backward pass of the loss that a closure returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ngsgd.errors import ConfigError


def differentiate(loss: Any, backward: Callable[[Tensor], None]) -> Tensor:
    """Run the backward pass of a loss, and return the loss without its graph.

    Raises:
        ConfigError: the closure returned no loss, or has called backward itself, as closures of
            torch optimizers do.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(f"the closure of evaluate() returned {_described(loss)}; return the loss that the "
                          "model computed, one number, without calling backward() or detach().")
    try:
        backward(loss)
    except RuntimeError as error:
        # Torch has no separate class for this error.
        if "backward through the graph a second time" not in str(error):
            raise
        raise ConfigError("the graph of the loss was differentiated before: evaluate() calls "
                          "backward itself, so the closure returns the loss without "
                          "loss.backward(). Call detach() on a state that is kept from an "
                          "earlier minibatch.") from error
    return loss.detach()


def _described(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    return "a tensor without gradient" if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"
