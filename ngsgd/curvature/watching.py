"""Sees what `collect` cannot get from layers: calls of loss functions, and how the model was called."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ngsgd.curvature import losses
from ngsgd.curvature.products import Pass
from ngsgd.errors import ConfigError


class ModelCalls:
    """Notes how the model was called last, for passes that run again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: tuple[Any, ...] | None = None
        self._output: Callable[[], Any] = lambda: None
        self._handles = [model.register_forward_pre_hook(self._before, with_kwargs=True), model.register_forward_hook(self._after)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = args, kwargs, torch.get_rng_state()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._output = weakref.ref(output) if isinstance(output, Tensor) else lambda: None

    def taken(self, output: Tensor, loss: Callable[[Tensor], Tensor], evaluation: Callable[[Tensor], losses.Evaluation],
              upstream: Tensor) -> Pass:
        """The pass that led to this output."""
        if self._call is None or self._output() is not output:
            raise ConfigError("products with curvature blocks need a loss of the model's own output, from its last call "
                              "before the backward "
                              "pass; put what lies between them into the model.")
        args, kwargs, state = self._call
        versions = tuple(p._version for p in self._model.parameters())
        return Pass(self._model, args, kwargs, state, versions, loss, evaluation, upstream.detach())


class LossCalls(TorchFunctionMode):
    """Sees the calls of torch's loss functions while it is active."""

    def __init__(self, watch: Callable[..., None]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        kind = losses.FUNCTIONS.get(func)
        if kind is not None:
            output, target, settings = losses.arguments(func, args, kwargs)
            self._watch(settings, kind, output, target, value, lambda f: func(f, target, **settings))
        return value
