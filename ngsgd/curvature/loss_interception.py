"""Interception of loss functions, and checks of the objectives of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from ngsgd.curvature import losses
from ngsgd.curvature.graph import describe, is_linear
from ngsgd.errors import ConfigError


def require_linear(roots: Iterable[Node], values: Iterable[Node], layers: set[Node]) -> set[Node]:
    """Return the losses of an objective; ConfigError unless it is linear in them alone."""
    ends = set(values)
    leading: set[Node] = set()
    seen: set[Node] = set()
    # Depth first, children before parents.
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if node in ends:
            leading.add(node)
        elif node in layers:
            raise ConfigError("the objective depends on the layers not only through the losses whose "
                              "curvature is known: it has another part, or another loss. Run a pass "
                              "with cross-entropy, mean squared error or binary cross-entropy alone, "
                              "or " + _WAY_OUT)
        elif not is_done and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
        elif is_done and any(child in leading for child, _ in node.next_functions):
            if not is_linear(node, leading):
                raise ConfigError(f"the objective is not linear in the loss ({describe(node)}), so its "
                                  "curvature is not that of the loss. Call backward() for the loss, "
                                  "a sum or a mean of losses, detach() the factor, or " + _WAY_OUT)
            leading.add(node)
    return leading & ends


# quantities that are defined for every objective
_WAY_OUT = ("request first-order quantities (of a preconditioner: fisher=\"empirical\", with num_rows= "
            "for other losses, or products=\"hessian\" of HessianFree).")
# by which a backward pass starts
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class LossCalls(TorchFunctionMode):
    """Function mode that observes calls of torch's loss functions.

    `watch` gets the call of a loss with a supported second derivative, its first argument and its
    value; `other` the name of any other loss, its first tensor with a graph and its value.
    """

    def __init__(self, watch: Callable[[losses.LossCall, Tensor, Tensor], None],
                 other: Callable[[str, Tensor, Tensor], None] | None = None) -> None:
        super().__init__()
        self._watch, self._other = watch, other
        # nodes that the current backward pass starts at
        self._roots: list[Node] = []
        # values of losses that were not differentiated yet
        self._losses: dict[int, Node] = {}
        self._num_losses = 0
        # the last backward pass whose objective was checked, and its losses
        self._checked = -1
        self._terms: dict[int, Node] = {}

    @property
    def is_differentiating(self) -> bool:
        """Whether a backward pass that started inside the context is running."""
        return bool(self._roots)

    def add(self, value: Tensor) -> int:
        """Count a loss among the known ones and return its number."""
        assert value.grad_fn is not None
        number = self._num_losses
        self._num_losses += 1
        self._losses[number] = value.grad_fn
        return number

    def require_term(self, loss: int, layers: Iterable[GradientEdge]) -> None:
        """Raise ConfigError unless this pass is linear in its losses, one of which is this."""
        if (number := torch._C._current_graph_task_id()) != self._checked:
            if not self._roots:
                raise ConfigError("the objective of the backward pass is unknown: start it inside of the context, by "
                                  "loss.backward() or torch.autograd.grad().")
            # A graph may be differentiated again.
            known = {**self._terms, **self._losses}
            terms = require_linear(self._roots, known.values(), {edge.node for edge in layers})
            self._terms = {place: node for place, node in known.items() if node in terms}
            for place in self._terms:
                self._losses.pop(place, None)
            self._checked = number
        if loss not in self._terms:
            raise ConfigError("the input of a loss depends on another loss, so the curvature of the "
                              "objective is not that of its losses; " + _WAY_OUT)

    def require_known(self) -> None:
        """Raise ConfigError if `require_term` did not check the current backward pass."""
        if torch._C._current_graph_task_id() != self._checked:
            raise ConfigError("the backward pass is not of a loss whose curvature is known: inside of "
                              "the context, call cross-entropy, mean squared error or binary "
                              "cross-entropy with logits of torch; or " + _WAY_OUT)

    def forget(self) -> None:
        """Free the graphs of losses that were not differentiated."""
        self._losses.clear()
        self._terms.clear()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD and args:
            starts = [args[0]] if isinstance(args[0], (Tensor, GradientEdge)) else list(args[0])
            nodes = [start.node if isinstance(start, GradientEdge) else start.grad_fn for start in starts]
            before, self._roots = self._roots, [node for node in nodes if node is not None]
            try:
                return func(*args, **kwargs)
            finally:
                self._roots = before
        value = func(*args, **kwargs)
        if func in losses.FUNCTIONS:
            output, call = losses.arguments(func, args, kwargs)
            self._watch(call, output, value)
        elif self._other is not None and func in losses.OTHERS and value.requires_grad:
            seen = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
            self._other(func.__name__, seen[0], value)
        return value
