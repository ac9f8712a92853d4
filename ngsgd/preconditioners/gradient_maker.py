"""ASDL's interface: declare a training step once, for any model output and loss.

    maker = GradientMaker(model, KFAC(model))
    y = maker.setup_model_call(model, x)                    # placeholder of the model output
    maker.setup_loss_call(cross_entropy, y.logits, target)  # recorded, and run after the model
    output, loss = maker.forward_and_backward()             # .grad is the preconditioned gradient

Source: arXiv 2305.04684, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.ops.tensors import dense
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.blocks import require_parameters


class DummyObject:
    """Placeholder that records indexing, attributes and calls, for a later value."""

    def __init__(self, resolve: Callable[[Any], Any] | None = None, told: str = "output") -> None:
        self._resolve, self._told = resolve, told

    def __getattr__(self, name: str) -> DummyObject:
        # copy and similar protocols read such names, which are not recorded.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._noted(lambda value, output: getattr(value, name), f"{{}}.{name}")

    def __getitem__(self, key: Any) -> DummyObject:
        return self._noted(lambda value, output: value[resolved(key, output)], f"{{}}[{key!r}]")

    def __call__(self, *args: Any, **kwargs: Any) -> DummyObject:
        return self._noted(lambda value, output: value(*resolved(args, output), **resolved(kwargs, output)), "{}(..)")

    def __iter__(self) -> Any:
        raise TypeError(f"{self._told} is not computed yet, so its length is unknown; index it, as in y[0], y[1]")

    def __bool__(self) -> bool:
        raise TypeError(f"{self._told} is not computed yet, so no decision can depend on it; move "
                        "the decision into the loss function")

    def __repr__(self) -> str:
        return f"DummyObject({self._told})"

    def _noted(self, operation: Callable[[Any, Any], Any], told: str) -> DummyObject:
        """Return the result of an operation on (the value, the output), which is done later."""
        return DummyObject(lambda output: operation(resolved(self, output), output), told.replace("{}", self._told))


def resolved(value: Any, output: Any) -> Any:
    """Replace placeholders by values, also inside tuples, lists, mappings and slices."""
    if isinstance(value, DummyObject):
        return output if value._resolve is None else value._resolve(output)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(resolved(item, output) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(resolved(item, output) for item in value)
    if isinstance(value, dict):
        return {key: resolved(item, output) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(resolved(value.start, output), resolved(value.stop, output), resolved(value.step, output))
    return value


class GradientMaker:
    """Run the model and the loss, and leave (preconditioned) gradients in `.grad`.

    Gradients accumulate over calls as those of `loss.backward()` do; existing gradients are not
    preconditioned again.

    Args:
        model: the module to train.
        preconditioner: of the same module; None: plain gradients.

    Raises:
        ConfigError: the preconditioner belongs to another model, or the model has no parameters.
    """

    def __init__(self, model: nn.Module, preconditioner: Preconditioner | None = None) -> None:
        if preconditioner is not None and preconditioner.model is not model:
            raise ConfigError("GradientMaker was given a preconditioner of another model; create it for the same one.")
        require_parameters(model, "GradientMaker")
        self.model, self.preconditioner = model, preconditioner
        self._model_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._loss: DummyObject | None = None
        self._logits: DummyObject | None = None
        # logits of the last call, if setup_logits_repr declared them
        self.logits: Any = None

    def setup_model_call(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> DummyObject:
        """Declare the call of the model; return a placeholder of its output."""
        self._model_call = model, args, kwargs
        self._loss, self._logits = None, None
        return DummyObject()

    def setup_loss_call(self, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Declare how the loss is computed from the placeholder and targets."""
        self._loss = DummyObject(lambda output: loss_fn(*resolved(args, output), **resolved(kwargs, output)))

    def setup_loss_repr(self, loss: DummyObject) -> None:
        """Declare the loss as a part of the output, for models that compute it."""
        self._loss = loss

    def setup_logits_repr(self, logits: DummyObject) -> None:
        """Declare the logits as a part of the output; `logits` contains them after each call."""
        self._logits = logits

    def forward_and_backward(self, lr: float | None = None, *, num_rows: int | None = None) -> tuple[Any, Tensor]:
        """Run forward pass, backward pass and preconditioner; return (output of the model, loss).

        Raises:
            ConfigError: calls were not declared, or the loss is not a scalar.
        """
        before = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        forward = self._forward()
        if self.preconditioner is None:
            output, loss = forward()
            loss.backward()
            self._note_logits(output)
            return output, loss.detach()
        for p in self.model.parameters():
            p.grad = None
        outputs: list[Any] = []

        def closure() -> Tensor:
            output, loss = forward()
            outputs[:] = [output]
            return loss
        loss = self.preconditioner.evaluate_and_step(closure, lr, num_rows=num_rows)
        (output,) = outputs
        self._note_logits(output)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in before:
                    # The preconditioned gradient is dense.
                    p.grad = before[name] if p.grad is None else dense(before[name]).add_(p.grad)
        return output, loss

    def _note_logits(self, output: Any) -> None:
        self.logits = None if self._logits is None else resolved(self._logits, output)

    def _forward(self) -> Callable[[], tuple[Any, Tensor]]:
        """Return a function that runs the model and the loss as declared now."""
        if self._model_call is None:
            raise ConfigError("GradientMaker has no model call; call setup_model_call first.")
        if self._loss is None:
            raise ConfigError("GradientMaker has no loss; call setup_loss_call or setup_loss_repr first.")
        (call, args, kwargs), declared = self._model_call, self._loss

        def forward() -> tuple[Any, Tensor]:
            output = call(*args, **kwargs)
            loss = resolved(declared, output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(f"the loss is {type(loss).__name__}{list(getattr(loss, 'shape', []))}, not a scalar; reduce it.")
            return output, loss
        return forward
