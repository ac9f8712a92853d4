"""Interception of loss functions and model calls for `collect`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from ngsgd.curvature import losses
from ngsgd.curvature.products.block import Pass
from ngsgd.curvature.products.graph import describe, is_linear
from ngsgd.errors import ConfigError

_VIEWS = ("View", "ReshapeAlias", "Alias", "Slice", "Select", "Narrow", "Split", "Chunk", "Unbind", "Transpose", "TBackward",
          "Permute", "Squeeze", "Unsqueeze", "Expand", "AsStrided", "Diagonal")


class ModelCalls:
    """Record the last call of the model, for passes that run again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: tuple[Any, ...] | None = None
        self._output: Output | None = None
        self._handles = [model.register_forward_pre_hook(self._before, with_kwargs=True), model.register_forward_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._output = None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Activation checkpointing calls it again in a backward pass.
        if torch._C._current_graph_task_id() == -1:
            self._call, self._output = (args, kwargs, torch.get_rng_state(), {}), None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._output = Output(output) if isinstance(output, Tensor) else None

    def taken(self, seen: Tensor, loss: Callable[[Tensor], Tensor],
              evaluation: Callable[[Tensor], losses.LossEvaluation],
              upstream: Tensor) -> Pass:
        """Return the pass that led to the input of a loss."""
        view = None if self._output is None else self._output.view_to(seen)
        if self._call is None or view is None:
            raise ConfigError("products with curvature blocks need a loss of the model output, "
                              "from its last call before the backward pass, or of a view of that "
                              "output (a slice, flatten, transpose). Move operations between them, "
                              "such as a copy or a softmax, into forward() of the model.")
        args, kwargs, state, runs = self._call
        versions = tuple(p._version for p in self._model.parameters())
        return Pass(self._model, args, kwargs, state, versions, lambda f: loss(view(f)), evaluation, upstream.detach(), view, runs)


class Output:
    """Memory layout and graph node of a model output, which itself can be freed after use."""

    def __init__(self, output: Tensor) -> None:
        self._node, self._memory = output.grad_fn, output.untyped_storage().data_ptr()
        self._stride, self._offset = output.stride(), int(output.storage_offset())

    def view_to(self, part: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a function that applies the view `part` to another output of the same layout.

        None if `part` is not a view of the output.
        """
        node = part.grad_fn
        # Only through views: an in-place operation has their memory, too.
        while node is not None and node is not self._node:
            node = node.next_functions[0][0] if node.name().startswith(_VIEWS) else None
        if node is None or part.untyped_storage().data_ptr() != self._memory:
            return None
        size, stride, offset = part.size(), part.stride(), int(part.storage_offset()) - self._offset
        return functools.partial(_view, layout=self._stride, size=size, stride=stride, offset=offset)


def _view(output: Tensor, *, layout: tuple[int, ...], size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    if output.stride() != layout:
        empty = torch.empty_strided(output.size(), layout, dtype=output.dtype, device=output.device)
        output = empty.copy_(output)
    return output.as_strided(size, stride, output.storage_offset() + offset)


def require_linear(roots: Iterable[Node], values: Iterable[Node], layers: set[Node]) -> set[Node]:
    """Raise ConfigError unless an objective is linear in its losses, and depends on layers through
    them alone.

    Only the graph above the losses is traversed.

    Args:
        roots: of the backward pass.
        values: of the losses.
        layers: nodes of layer outputs.

    Returns:
        The values that the objective contains.
    """
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

    With `add` and `require_term`, it also checks the objectives of backward passes.

    Args:
        watch: called after a loss with a supported second derivative.
        other: called after any other loss of torch.nn.functional, with its name, its first tensor
            with a graph and its value.
    """

    def __init__(self, watch: Callable[..., None], other: Callable[[str, Tensor, Tensor], None] | None = None) -> None:
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
        """Check the objective of the current backward pass, once, and that a loss is a term of it.

        Args:
            loss: its number.
            layers: outputs of the layers.

        Raises:
            ConfigError: the objective is not linear in its losses, or has other parts.
        """
        number = torch._C._current_graph_task_id()
        if number != self._checked:
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
            return self._differentiated(func, args, kwargs)
        value = func(*args, **kwargs)
        kind = losses.FUNCTIONS.get(func)
        if kind is not None:
            output, target, settings = losses.arguments(func, args, kwargs)
            self._watch(settings, kind, output, target, value, lambda f: func(f, target, **settings))
        elif self._other is not None and func in losses.OTHERS and value.requires_grad:
            seen = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
            self._other(func.__name__, seen[0], value)
        return value

    def _differentiated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0]
        starts = [first] if isinstance(first, (Tensor, GradientEdge)) else list(first)
        nodes = [start.node if isinstance(start, GradientEdge) else start.grad_fn for start in starts]
        before, self._roots = self._roots, [node for node in nodes if node is not None]
        try:
            return func(*args, **kwargs)
        finally:
            self._roots = before
