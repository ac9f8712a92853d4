"""The class that layers under `NGSGD` have in common, and which gradients it may precondition.

A layer is natural for its own optimizer alone: a copy, a pickle and a traced graph hold torch's plain layer.  Only a backward pass
that adds to `weight.grad` is preconditioned and moves the estimates; `torch.autograd.grad` returns plain gradients.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ngsgd.errors import ConfigError
from ngsgd.optim.layers.common import LayerPreconditioner

# attribute of a layer whose products a plain SGD made faster
OWNER = "_fast_linear_owner"


class NaturalGradientLayer(nn.Module):
    """A layer whose class `NGSGD` changed in place; the last base of each class is torch's own."""

    plain_class: ClassVar[type[nn.Module]]
    preconditioner: Any

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.plain_class = cls.__bases__[-1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles as the plain layer: the estimates belong to the optimizer of this one."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("preconditioner", OWNER)}
        # not __newobj__, for which pickle wants the class of this very object
        return copyreg._reconstructor, (self.plain_class, object, None), state  # type: ignore[attr-defined]

    def __prepare_scriptable__(self) -> Any:
        raise ConfigError(f"torch.jit.script cannot compile a {self.plain_class.__name__} under NGSGD; script a copy, which is "
                          "plain: torch.jit.script(copy.deepcopy(model)).")

    def plain_forward(self, *inputs: Any) -> Any:
        """The forward pass of torch's class."""
        # a leaf of the graph, as torch's own layers are
        if isinstance(inputs[0], torch.fx.Proxy):
            tracer: Any = inputs[0].tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})
        return self.plain_class.forward(self, *inputs)

    def estimates_of(self, weight: Tensor) -> Any:
        """The preconditioner if `weight` is the one it was made for; None for another, as under `torch.func.functional_call`."""
        preconditioner = self.preconditioner
        return preconditioner if preconditioner.weight is weight else None


def is_plain_context(input: Any) -> bool:  # noqa: A002
    """Whether the forward pass is traced or transformed, by torch.export, fx, torch.jit.trace or torch.func."""
    if torch.compiler.is_compiling():
        return bool(torch.compiler.is_exporting())
    return (torch._C._are_functorch_transforms_active() or torch._C._is_tracing() or forward_ad._current_level >= 0
            or (type(input) is not Tensor and isinstance(input, torch.fx.Proxy)))


def asked_for(ctx: Any, index: int) -> tuple[bool, bool]:
    """(whether this backward pass needs the gradient of input `index`, whether it adds it to the `grad` of a leaf)."""
    if not ctx.needs_input_grad[index]:
        return False, False
    try:
        is_needed = torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:
        # torch refuses to say for a leaf that torch.autograd.grad returns the gradient of
        return True, False
    return is_needed, is_needed


def adds_to_grad(layer: LayerPreconditioner) -> bool:
    """The same for the weight of a layer in a compiled graph, whose operators know no nodes; taken for true in the first pass."""
    if layer.node is None:
        layer.needs_node = True
        return True
    try:
        return bool(torch._C._will_engine_execute_node(layer.node))
    except RuntimeError:
        return False
