"""ASDL's interface (arXiv 2305.04684, section 4): a training step is told once, whatever the model returns and the loss takes.

    maker = GradientMaker(model, KFAC(model))
    y = maker.setup_model_call(model, x)                    # a stand-in for what the model will return
    maker.setup_loss_call(cross_entropy, y.logits, target)  # what is done to it is noted, and done when the model has run
    output, loss = maker.forward_and_backward()             # .grad is now the preconditioned gradient
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners.base import Preconditioner


class DummyObject:
    """Stands for a value that is not there yet: indexing, attributes, calls and arithmetic on it are noted and done later."""

    def __init__(self, resolve: Callable[[Any], Any] | None = None, told: str = "output") -> None:
        self._resolve, self._told = resolve, told

    def __getattr__(self, name: str) -> DummyObject:
        # asked by copy and the like; a model's output has no such names to note
        if name.startswith("__"):
            raise AttributeError(name)
        return self._noted(lambda value: getattr(value, name), f"{self._told}.{name}")

    def __getitem__(self, key: Any) -> DummyObject:
        return self._noted(lambda value, output: value[resolved(key, output)], f"{self._told}[{key!r}]", also_output=True)

    def __call__(self, *args: Any, **kwargs: Any) -> DummyObject:
        return self._noted(lambda value, output: value(*resolved(args, output), **resolved(kwargs, output)), f"{self._told}(..)",
                           also_output=True)

    def __iter__(self) -> Any:
        raise TypeError(f"{self._told} is not there yet, so its length is not known; index it, as in y[0], y[1]")

    def __bool__(self) -> bool:
        raise TypeError(f"{self._told} is not there yet, so nothing can be decided by it; put the decision into the loss function")

    def __add__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: value + resolved(other, output), f"({self._told} + ..)", also_output=True)

    def __radd__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: resolved(other, output) + value, f"(.. + {self._told})", also_output=True)

    def __sub__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: value - resolved(other, output), f"({self._told} - ..)", also_output=True)

    def __rsub__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: resolved(other, output) - value, f"(.. - {self._told})", also_output=True)

    def __mul__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: value * resolved(other, output), f"({self._told} * ..)", also_output=True)

    def __rmul__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: resolved(other, output) * value, f"(.. * {self._told})", also_output=True)

    def __truediv__(self, other: Any) -> DummyObject:
        return self._noted(lambda value, output: value / resolved(other, output), f"({self._told} / ..)", also_output=True)

    def __neg__(self) -> DummyObject:
        return self._noted(lambda value: -value, f"-{self._told}")

    def __repr__(self) -> str:
        return f"DummyObject({self._told})"

    def _noted(self, operation: Callable[..., Any], told: str, *, also_output: bool = False) -> DummyObject:
        if also_output:
            return DummyObject(lambda output: operation(self._value(output), output), told)
        return DummyObject(lambda output: operation(self._value(output)), told)

    def _value(self, output: Any) -> Any:
        return output if self._resolve is None else self._resolve(output)


def resolved(value: Any, output: Any) -> Any:
    """The value with the model's output in place of what stands for it, also inside of tuples, lists, mappings and slices."""
    if isinstance(value, DummyObject):
        return value._value(output)
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
    """Runs the model and the loss, and leaves gradients in `.grad`: plain ones without a preconditioner, P g with one.

    Gradients add up over calls as those of `loss.backward()` do; what was there is not preconditioned again.
    """

    def __init__(self, model: nn.Module, preconditioner: Preconditioner | None = None) -> None:
        if preconditioner is not None and preconditioner.model is not model:
            raise ConfigError("GradientMaker was given a preconditioner of another model; make it of the same one.")
        self.model, self.preconditioner = model, preconditioner
        self._model_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._loss_call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._loss_repr: Any = None
        self._logits_repr: Any = None
        # of the last call, if setup_logits_repr said which they are
        self.logits: Any = None

    def setup_model_call(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> DummyObject:
        """Says how the model is called; returns what stands for its output."""
        self._model_call = model, args, kwargs
        self._loss_call, self._loss_repr, self._logits_repr = None, None, None
        return DummyObject()

    def setup_loss_call(self, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Says how the loss is computed from the output's stand-in and targets."""
        self._loss_call, self._loss_repr = (loss_fn, args, kwargs), None

    def setup_loss_repr(self, loss: DummyObject) -> None:
        """Says where in the output the loss is, for models that compute it themselves."""
        self._loss_call, self._loss_repr = None, loss

    def setup_logits_repr(self, logits: DummyObject) -> None:
        """Says where in the output the logits are; `logits` holds them after each call."""
        self._logits_repr = logits

    def forward_and_backward(self, lr: float | None = None, *,
                             num_rows: int | None = None) -> tuple[Any, Tensor]:
        """(the model's output, the loss) of one pass; ConfigError where the calls were not set up or give no number.

        `lr` is the optimizer's, for preconditioners with kl_clip; `num_rows` is that of
        `Preconditioner.watch`.
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

        # averages gradients before they are preconditioned
        if isinstance(self._called, nn.parallel.DistributedDataParallel):
            loss = self.preconditioner.evaluate(closure, num_rows=num_rows)
            self.preconditioner.step(lr)
        else:
            loss = self.preconditioner.evaluate_and_step(closure, lr, num_rows=num_rows)
        (output,) = outputs
        self._note_logits(output)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if name in before:
                    p.grad = before[name] if p.grad is None else before[name].add_(p.grad)
        return output, loss

    @property
    def _called(self) -> Callable[..., Any] | None:
        return None if self._model_call is None else self._model_call[0]

    def _note_logits(self, output: Any) -> None:
        self.logits = None if self._logits_repr is None else resolved(self._logits_repr, output)

    def _forward(self) -> Callable[[], tuple[Any, Tensor]]:
        """What runs the model and the loss as they are set up now, at any later time."""
        if self._model_call is None:
            raise ConfigError("GradientMaker does not know how the model is called; call setup_model_call first.")
        if self._loss_call is None and self._loss_repr is None:
            raise ConfigError("GradientMaker does not know the loss; call setup_loss_call or setup_loss_repr first.")
        (call, args, kwargs), loss_call, loss_repr = self._model_call, self._loss_call, self._loss_repr

        def forward() -> tuple[Any, Tensor]:
            output = call(*args, **kwargs)
            if loss_call is not None:
                loss_fn, loss_args, loss_kwargs = loss_call
                loss = loss_fn(*resolved(loss_args, output), **resolved(loss_kwargs, output))
            else:
                loss = resolved(loss_repr, output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(f"the loss is {type(loss).__name__}{list(getattr(loss, 'shape', []))} and no single number; "
                                  "reduce it to one.")
            return output, loss

        return forward
