"""Base class of layers under `NGSGD`, and the test whether a gradient may be preconditioned.

A layer is natural for its optimizer only: copies, pickles and traced graphs contain torch's plain
layer. Only a backward pass that adds to `weight.grad` is preconditioned and updates the estimates;
`torch.autograd.grad` returns plain gradients.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ngsgd.errors import ConfigError
from ngsgd.optim.layers.common import LayerPreconditioner


class NaturalGradientLayer(nn.Module):
    """A layer whose class `NGSGD` changed in place; the last base of each class is torch's own."""

    plain_class: ClassVar[type[nn.Module]]
    preconditioner: Any

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.plain_class = cls.__bases__[-1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the plain layer: the estimates belong to one optimizer."""
        state = {key: value for key, value in self.__dict__.items() if key != "preconditioner"}
        # Not __newobj__, for which pickle requires the class of this object.
        return copyreg._reconstructor, (self.plain_class, object, None), state  # type: ignore[attr-defined]

    def __prepare_scriptable__(self) -> Any:
        raise ConfigError(f"torch.jit.script cannot compile a {self.plain_class.__name__} under NGSGD; script a copy, which is "
                          "plain: torch.jit.script(copy.deepcopy(model)).")

    def plain_forward(self, *inputs: Any) -> Any:
        """Return the forward pass of the plain class."""
        # A leaf of the graph, as torch's own layers are.
        if isinstance(inputs[0], torch.fx.Proxy):
            tracer: Any = inputs[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})
        return self.plain_class.forward(self, *inputs)

    def estimates_of(self, weight: Tensor) -> Any:
        """Return the preconditioner of `weight`; None if torch.func.functional_call replaced it."""
        preconditioner = self.preconditioner
        preconditioner.context.queue.fork()
        preconditioner.context.note_ranks()
        return preconditioner if preconditioner.weight is weight else None


def is_plain_context(input: Any) -> bool:  # noqa: A002
    """Return whether torch.export, fx, torch.jit.trace or torch.func sees the forward pass."""
    if torch.compiler.is_compiling():
        return bool(torch.compiler.is_exporting())
    return (torch._C._are_functorch_transforms_active() or torch._C._is_tracing() or forward_ad._current_level >= 0
            or (type(input) is not Tensor and isinstance(input, torch.fx.Proxy)))


def asked_for(ctx: Any, index: int) -> tuple[bool, bool]:
    """Inspect how the current backward pass uses the gradient of input `index`.

    Returns:
        (whether the gradient is needed, whether it is added to the `grad` of a leaf).
    """
    if not ctx.needs_input_grad[index]:
        return False, False
    try:
        is_needed = torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:
        # Torch raises for a leaf whose gradient torch.autograd.grad returns.
        return True, False
    return is_needed, is_needed


def is_differentiated(ctx: Any) -> bool:
    """Return whether the backward pass is itself differentiated (create_graph=True).

    Its gradients are plain: those of a preconditioned gradient would not be second derivatives.

    Raises:
        ConfigError: the pass lacks the graph of the input, which autocast has cast.
    """
    # Torch enables gradients in a backward pass for this alone.
    if not torch.is_grad_enabled():
        return False
    if ctx.is_cast:
        raise ConfigError("a gradient penalty or second derivative (create_graph=True) needs layers in the dtype of their "
                          "input under NGSGD; run this forward pass in torch.autocast(..., enabled=False).")
    return True


def differentiable_gradients(y: Tensor, inputs: Sequence[Any], needed: Sequence[bool], dY: Tensor) -> list[Tensor | None]:
    """Return the needed gradients of y, with a graph for second derivatives."""
    wanted = [one for one, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(y, wanted, dY, create_graph=True) if wanted else ())
    return [next(found) if is_needed else None for is_needed in needed]


def adds_to_grad(layer: LayerPreconditioner) -> bool:
    """Return whether `weight.grad` of a layer in a compiled graph is accumulated; True at first."""
    if layer.node is None:
        layer.needs_node = True
        return True
    try:
        return bool(torch._C._will_engine_execute_node(layer.node))
    except RuntimeError:
        return False
