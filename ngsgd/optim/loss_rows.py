"""Number of samples of a mean loss, read from the graph of its backward pass.

The loss is at the root of the graph. From there, a walk through scalar operations (sums, factors,
casts) reaches the nodes of loss functions, whose input has the shape of the target. Rows of a
cross-entropy are all its positions, also ignored ones. Other elementwise losses have a row for each
output of the layer next to them. CTC has one for each sequence.

Python sees all backward passes in `torch.autograd._engine_run_backward`, which
`torch.compiler` replaces in the same way. It is replaced at the first optimizer with a mean loss.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.errors import ConfigError

# Its type stubs lack the function.
_autograd: Any = torch.autograd
_LEAF = "torch::autograd::AccumulateGrad"
# Losses of classes, which are in dimension 1 of their input.
_CLASSES = {"NllLossBackward0", "NllLoss2DBackward0", "MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
_ELEMENTWISE = {"MseLossBackward0", "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0",
                "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0"}
_SOFTMAX = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
# Operations with features in the last dimension, and in dimension 1.
_LAST = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Mv", "Addmv", "Embedding", "NativeLayerNorm", "MkldnnRnn", "CudnnRnn",
         "ScaledDotProduct", "_Affine", "_PlainAffine")
_FIRST = ("Convolution", "Mkldnn", "Cudnn", "NativeBatchNorm", "NativeGroupNorm", "_Convolution", "Upsample", "AvgPool",
          "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
_SLICES = ("SliceBackward0", "SelectBackward0", "SplitBackward0", "UnbindBackward0", "SplitWithSizesBackward0")
# Nodes between the loss and the next layer; with more, the number of samples is not known.
_MOST_NODES = 100_000
_MOST_OPERATIONS = 50


class LossShape(NamedTuple):
    """Samples of the loss of one backward pass."""

    num_rows: int | None
    # why it is not known
    reason: str = ""


_Edge = tuple[Any, int]


def loss_shape(outputs: Sequence[Tensor]) -> LossShape:
    """Return the number of samples of the loss with these roots."""
    if len(outputs) == 1 and (root := outputs[0].grad_fn) is not None and root.name() in _CLASSES:
        # The most frequent case, without a walk.
        first = root.next_functions[0]
        if first[0] is not None:
            return LossShape(_class_rows(first))
    known, terms = _terms([(output.grad_fn, output.output_nr) for output in outputs if output.grad_fn is not None])
    numbers: set[int | None] = set()
    if known:
        numbers = {number for number in _joined(known) if number != 0}
    elif known is not None:
        numbers = {number for edge in terms if (number := None if edge is None else _positions(edge)) != 0}
    if known is None:
        return LossShape(None, "the graph of the loss is too large")
    if len(numbers) == 1 and None not in numbers:
        return LossShape(numbers.pop())
    if not numbers:
        return LossShape(None, "the graph of the loss has no loss function that is known")
    if None in numbers:
        return LossShape(None, "the loss is a mean whose dimension of samples is not known")
    return LossShape(None, f"it has terms of {', '.join(map(str, sorted(n for n in numbers if n is not None)))} samples")


def _terms(stack: list[_Edge]) -> tuple[list[tuple[int | None, _Edge]] | None, list[_Edge | None]]:
    """Return ((rows, input) of each known loss function, inputs of other reductions to numbers).

    None for an input with positions of a custom Function, whose samples it may choose; and instead
    of the known ones if the graph is too large.
    """
    known: list[tuple[int | None, _Edge]] = []
    terms: list[_Edge | None] = [edge for edge in stack if _numel(edge) > 1]
    seen = set[Any]()
    while stack and len(seen) < _MOST_NODES:
        edge = stack.pop()
        node = edge[0]
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name in _CLASSES and (first := node.next_functions[0])[0] is not None:
            known.append((_class_rows(first), first))
        elif name in _ELEMENTWISE and (first := node.next_functions[0])[0] is not None and _shape(first):
            known.append((_positions(first), first))
        elif name == "CtcLossBackward0":
            shape = _shape(node.next_functions[0])
            known.append((shape[1] if len(shape) == 3 else 1, node.next_functions[0]))
        elif name == "LogSoftmaxBackward0":
            known.append((_rows_along(edge, node._saved_dim), edge))
        elif name == _LEAF:
            continue
        elif name.startswith((*_LAST, *_FIRST)):
            if _numel(edge) == 1 and _shape(edge):
                terms.append(edge)
        else:
            children = [child for child in node.next_functions if child[0] is not None]
            if _numel(edge) == 1:
                is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
                terms += [None if is_custom and len(_shape(child)) > 2 else child for child in children if _numel(child) > 1]
            stack += children
    return None if stack else known, terms


def _joined(known: Sequence[tuple[int | None, _Edge]]) -> list[int | None]:
    """Return numbers of rows; those of slices of one minibatch are added."""
    if len(known) == 1:
        return [known[0][0]]
    found: dict[Any, int | None] = {}
    for place, (number, edge) in enumerate(known):
        whole = _sliced(edge)
        before = found.get(whole, 0) if whole is not None else 0
        found[place if whole is None else whole] = None if number is None or before is None else before + number
    return list(found.values())


def _sliced(edge: _Edge) -> Any:
    """Return the node whose output is sliced along dimension 0 for a loss; None if none is."""
    node, index = edge
    for _ in range(_MOST_OPERATIONS):
        name = node.name()
        if name in _SLICES:
            parent = node.next_functions[0]
            if _wrapped(node._saved_dim, len(_shape(parent))):
                return None
            if name != "SliceBackward0" or _shape((node, index))[0] < _shape(parent)[0]:
                return parent[0]
        inputs = [child for child in node.next_functions if child[0] is not None]
        if len(inputs) != 1 or name.startswith((*_LAST, *_FIRST)):
            return None
        node, index = inputs[0]
    return None


def _positions(edge: _Edge) -> int | None:
    """Return the rows of a tensor of losses or outputs; 0 for a function of weights, None unknown.

    The operation that made its features determines how many numbers belong to one row.
    """
    shape, size = _shape(edge), _numel(edge)
    for _ in range(_MOST_OPERATIONS):
        node, _ = edge
        name = node.name()
        if name == _LEAF or (name.startswith(("Mm", "Addmm", "Bmm")) and _is_of_weights(node)):
            return 0
        if name in _CLASSES or name == "CtcLossBackward0":
            return size
        if (width := _width(edge)) is not None:
            return size // width
        inputs = [child for child in node.next_functions if child[0] is not None]
        equal = [child for child in inputs if _numel(child) == size]
        data = [child for child in equal if child[0].name() != _LEAF]
        if not equal:
            if inputs and all(child[0].name() == _LEAF for child in inputs) and len(shape) < 1:
                return 0
            break
        edge = data[0] if data else equal[0]
    return size if len(shape) < 2 else shape[0] if math.prod(shape[2:]) == 1 else None


def _width(edge: _Edge) -> int | None:
    """Return the number of features of a row if the node of the edge makes features."""
    node, _ = edge
    name, shape = node.name(), _shape(edge)
    if name in _SOFTMAX:
        return shape[_wrapped(node._saved_dim, len(shape))] if shape else 1
    if name.startswith("_ScaleOffset"):
        return shape[1] if node.first == 1 and len(shape) > 1 else shape[-1]
    if name.startswith(_LAST):
        return shape[-1] if len(shape) > 1 and shape[-1] else 1
    if name.startswith(_FIRST):
        return shape[1] if len(shape) > 1 and shape[1] else 1
    return None


def _is_of_weights(node: Any) -> bool:
    """Return whether all inputs of a product are parameters, up to views."""
    for child, _ in node.next_functions:
        below = child
        while below is not None and below.name() != _LEAF and len(below.next_functions) == 1:
            below = below.next_functions[0][0]
        if below is None or below.name() != _LEAF:
            return False
    return True


def _class_rows(edge: _Edge) -> int:
    return _rows_along(edge, 1 if len(_shape(edge)) > 1 else 0)


def _rows_along(edge: _Edge, dim: int) -> int:
    shape = _shape(edge)
    return _numel(edge) // max(1, shape[_wrapped(dim, len(shape))]) if shape else 1


def _wrapped(dim: int, ndim: int) -> int:
    # Torch returns negative dimensions as unsigned numbers.
    return dim if dim < ndim else dim - 2**64 + ndim


def _shape(edge: _Edge) -> tuple[int, ...]:
    node, index = edge
    return tuple(node._input_metadata[index].shape)


def _numel(edge: _Edge) -> int:
    return math.prod(_shape(edge))


class _Pending(NamedTuple):
    """Rows in the gradient of a parameter, and the state of the gradient after the last pass."""

    parameter: Tensor
    shape: LossShape
    address: int
    version: int


class LossRows:
    """Counts the samples of the mean losses whose gradients are in the `grad` of parameters.

    Passes whose gradients were cleared do not count. Passes from one layer are added, as
    accumulation needs; losses of several heads are of the same samples.

    Args:
        context: LayerContext of the optimizer.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._pending: dict[int, _Pending] = {}
        self.parameters: dict[int, Tensor] = {}
        # Whether parameters take plain steps, whose layers do not report their passes.
        self.has_plain = False
        _observe(self)

    def clear(self) -> None:
        """Forget all passes, as after a step."""
        self._pending = {}

    def number(self) -> int:
        """Return the number of samples since the last step.

        Raises:
            ConfigError: it is not known.
        """
        shapes = [pending.shape for pending in self._pending.values()]
        numbers = {shape.num_rows for shape in shapes if shape.num_rows is not None}
        reason = next((shape.reason for shape in shapes if shape.num_rows is None), "")
        if not shapes:
            reason = "no backward pass of a loss was seen since the last step"
        elif len(numbers) > 1 and not reason:
            reason = f"losses have {', '.join(map(str, sorted(numbers)))} samples"
        if reason:
            raise ConfigError(f"NGSGD cannot find the number of samples of the mean loss: {reason}. Give it as "
                              "optimizer.step(num_samples=...), or sum the loss and give loss_reduction=\"sum\".")
        return max(1, numbers.pop())

    def before_pass(self) -> int:
        """Drop passes whose gradients were cleared; return how many passes layers have had."""
        if self._pending:
            self._pending = {key: one for key, one in self._pending.items() if not _is_cleared(one)}
        return int(self._context.num_passes)

    def after_pass(self, num_passes: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                   shape: LossShape) -> None:
        """Count a pass that has added to gradients of the optimizer."""
        has_reached = self._context.num_passes != num_passes
        if not (has_reached or self.has_plain):
            return
        allowed = {id(p) for p in inputs} if inputs else None
        parameter = self._nearest(outputs, allowed)
        if parameter is None or parameter.grad is None:
            return
        before = self._pending.get(id(parameter))
        if before is not None and shape.num_rows is not None:
            old = before.shape.num_rows
            shape = before.shape if old is None else LossShape(old + shape.num_rows)
        address = 0 if parameter.grad.is_sparse else parameter.grad.data_ptr()
        self._pending[id(parameter)] = _Pending(parameter, shape, address, parameter.grad._version)

    def _nearest(self, outputs: Sequence[Tensor], allowed: set[int] | None) -> Tensor | None:
        """Return the parameter of the optimizer next to the loss.

        Reentrant checkpoints hide their layers; the last of them stands for these.
        """
        nodes = deque[Any](output.grad_fn for output in outputs if output.grad_fn is not None)
        seen, hides_layers = set[Any](), False
        while nodes:
            node = nodes.popleft()
            hides_layers = hides_layers or node.name().startswith("CheckpointFunction")
            for child, _ in node.next_functions:
                if child is None or child in seen:
                    continue
                seen.add(child)
                if child.name() == _LEAF:
                    p = self.parameters.get(id(child.variable))
                    if p is not None and p.numel() and (allowed is None or id(p) in allowed):
                        return p
                else:
                    nodes.append(child)
        hidden: Tensor | None = self._context.last_weight
        return hidden if hides_layers else None


def _is_cleared(pending: _Pending) -> bool:
    grad = pending.parameter.grad
    if grad is None:
        return True
    if grad.is_sparse:
        return not grad._nnz()
    if grad.data_ptr() == pending.address and grad._version == pending.version:
        return False
    # Clipping and unscaling change gradients, too. Rare, because it may wait for the device.
    return not bool(grad.any())


_observers: list[weakref.ref[LossRows]] = []


def _observe(rows: LossRows) -> None:
    """Report all further backward passes to `rows`, while it exists."""
    if not getattr(_autograd._engine_run_backward, "_is_of_ngsgd", False):
        _autograd._engine_run_backward = _reported(_autograd._engine_run_backward)
    _observers.append(weakref.ref(rows, _observers.remove))


def _reported(original: Any) -> Any:
    @functools.wraps(original)
    def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        # Passes inside of a pass belong to reentrant checkpoints.
        if not _observers or not kwargs.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            return original(outputs, *args, **kwargs)
        live = [rows for one in _observers if (rows := one()) is not None]
        before = [rows.before_pass() for rows in live]
        shape = loss_shape(outputs)
        result = original(outputs, *args, **kwargs)
        inputs = args[3] if len(args) > 3 else ()
        for rows, num_passes in zip(live, before, strict=True):
            rows.after_pass(num_passes, outputs, inputs, shape)
        return result

    run._is_of_ngsgd = True  # type: ignore[attr-defined]
    return run
