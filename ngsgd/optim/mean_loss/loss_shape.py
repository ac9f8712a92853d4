"""Number of samples of a mean loss, from the loss functions that its graph reaches through scalars.
Rows of a cross-entropy are all its positions, those of CTC are sequences. Other elementwise losses
have a row for each output of the layer next to them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LEAF = "torch::autograd::AccumulateGrad"
# Losses of classes, which are in dimension 1 of their input.
_CLASSES = {"NllLossBackward0", "NllLoss2DBackward0", "MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
_ELEMENTWISE = {"MseLossBackward0", "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0",
                "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0"}
_SOFTMAX = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
# Operations with features in the last dimension, and in dimension 1.
_LAST = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Mv", "Addmv", "Embedding", "NativeLayerNorm", "MkldnnRnn", "CudnnRnn",
         "ScaledDotProduct", "_Affine")
_FIRST = ("Convolution", "Mkldnn", "Cudnn", "NativeBatchNorm", "NativeGroupNorm", "_Convolution", "Upsample", "AvgPool",
          "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
_SLICES = ("SliceBackward0", "SelectBackward0", "SplitBackward0", "UnbindBackward0", "SplitWithSizesBackward0")
_SELECTIONS = ("Index", "Masked", "Gather")
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
        node, index = root.next_functions[0]
        if node is not None:
            shape = node._input_metadata[index].shape
            return LossShape(shape[0] if len(shape) == 2 and shape[1] else _class_rows((node, index)))
    known, terms, is_weighted = _terms([(output.grad_fn, output.output_nr) for output in outputs if output.grad_fn is not None])
    numbers: set[int | None] = set()
    if known:
        numbers = {number for number in _joined(known) if number != 0}
    elif known is not None:
        numbers = {number for edge in terms if (number := None if edge is None else _positions(edge)) != 0}
    if known is None:
        return LossShape(None, "the graph of the loss is too large")
    if is_weighted and (known or terms) and not _are_of_one_minibatch([edge for _, edge in known] if known else terms):
        return LossShape(None, "the loss is a weighted sum, or a mean, of losses of several calls of the model")
    if len(numbers) == 1 and None not in numbers:
        return LossShape(numbers.pop())
    if not numbers:
        return LossShape(None, "the graph of the loss has no loss function that is known")
    if None in numbers:
        return LossShape(None, "the loss is a mean whose dimension of samples is not known")
    return LossShape(None, f"it has terms of {', '.join(map(str, sorted(n for n in numbers if n is not None)))} samples")


def _terms(roots: list[_Edge]) -> tuple[list[tuple[int | None, _Edge]] | None, list[_Edge | None], bool]:
    """Return ((rows, input) of each known loss, inputs of other reductions to numbers, ...).

    None for an input with positions of a custom Function, whose samples it may choose; and instead
    of the known ones if the graph is too large. The last value is whether all losses have factors.
    """
    known: list[tuple[int | None, _Edge]] = []
    terms: list[_Edge | None] = [edge for edge in roots if _numel(edge) > 1]
    stack = [(edge, False) for edge in roots]
    seen, is_weighted = set[Any](), True
    while stack and len(seen) < _MOST_NODES:
        edge, has_factor = stack.pop()
        node = edge[0]
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        before = len(known) + len(terms)
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
            # An operation that multiplies a number: a weight, or a mean of losses.
            is_factor = name.startswith(("Mul", "Div"))
            if name.startswith("Mean") and (below := node.next_functions[0][0]) is not None:
                is_factor = below.name().startswith(("Stack", "Cat"))
            has_factor = has_factor or (_numel(edge) == 1 and is_factor)
            stack += [(child, has_factor) for child in children]
        is_weighted = is_weighted and (has_factor or len(known) + len(terms) == before)
    return None if stack else known, terms, is_weighted


def _are_of_one_minibatch(edges: Sequence[_Edge | None]) -> bool:
    """Return whether losses are of one call of a layer, or of calls that share a layer below."""
    heads = {head for edge in edges if edge is not None and (head := _head(edge)) is not None}
    if len(heads) < 2:
        return True
    if len({parameter for _, parameter in heads}) < len(heads):
        return False
    graphs = [nodes_of([node]) for node, _ in heads]
    shared = set.intersection(*graphs)
    return bool(shared) and not any(_selects_samples(node) for graph in graphs for node in graph - shared)


def _selects_samples(node: Any) -> bool:
    """Return whether the operation selects from dimension 0, as a mixture of experts does."""
    if not node.name().startswith((*_SELECTIONS, *_SLICES)) or node.next_functions[0][0] is None:
        return False
    return _shape((node, 0))[:1] != _shape(node.next_functions[0])[:1]


def _head(edge: _Edge) -> tuple[Any, int] | None:
    """Return (next node with a parameter, id of the parameter); None without data and one."""
    nodes, seen = deque[Any]([edge[0]]), set[Any]()
    while nodes and len(seen) < _MOST_OPERATIONS:
        node = nodes.popleft()
        children = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(children)
        if not _is_of_weights(node):
            parameter = next((leaf for child in children if (leaf := _leaf(child)) is not None), None)
            if parameter is not None:
                return node, id(parameter.variable)
        nodes += [child for child in children if _leaf(child) is None]
    return None


def nodes_of(roots: Sequence[Any]) -> set[Any]:
    """Return the operations of a graph, without its leaves."""
    stack, found = [root for root in roots if root is not None], set[Any]()
    while stack and len(found) < _MOST_NODES:
        node = stack.pop()
        if node not in found and node.name() != _LEAF:
            found.add(node)
            stack += [child for child, _ in node.next_functions if child is not None]
    return found


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
    """Return rows of losses or outputs; 0 for a function of weights, None if unknown."""
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
            # of pairs, each row counts once
            if inputs and name.startswith("Pdist"):
                return _shape(inputs[0])[0]
            if inputs and name.startswith(_SELECTIONS) and _has_pairs(inputs[0][0]):
                return _positions(inputs[0])
            break
        edge = data[0] if data else equal[0]
    return size if len(shape) < 2 else shape[0] if math.prod(shape[2:]) == 1 else None


def _width(edge: _Edge) -> int | None:
    """Return the number of features of a row if the node of the edge makes features."""
    node, _ = edge
    name, shape = node.name(), _shape(edge)
    if name in _SOFTMAX:
        return shape[_wrapped(node._saved_dim, len(shape))] if shape else 1
    if name.startswith(("ScaleOffset", "FusedNorm")):
        return shape[1] if node.first == 1 and len(shape) > 1 else shape[-1]
    if name.startswith(_LAST):
        return shape[-1] if len(shape) > 1 and shape[-1] else 1
    if name.startswith(_FIRST):
        return shape[1] if len(shape) > 1 and shape[1] else 1
    return None


def _has_pairs(node: Any) -> bool:
    """Return whether the operation has a number for each pair of rows of data."""
    is_product = node.name().startswith("Mm") and all(_leaf(child) is None for child, _ in node.next_functions)
    return is_product or node.name().startswith("Cdist")


def _is_of_weights(node: Any) -> bool:
    """Return whether all inputs of a product are parameters, up to views."""
    return all(_leaf(child) is not None for child, _ in node.next_functions)


def _leaf(node: Any) -> Any:
    """Return the node of the parameter of which the node is a function; None without one."""
    while node is not None and node.name() != _LEAF and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node if node is not None and node.name() == _LEAF else None


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
