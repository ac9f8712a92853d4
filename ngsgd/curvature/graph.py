"""Autograd operations between a network output and its layers: linear, piecewise linear or curved.

For a parameter theta whose layer output reaches the loss through operations y = s(x), the diagonal
of the Hessian is that of the GGN plus a residual for every curved operation:

    d2L/dtheta2 = J_f^T H_f J_f + sum over curved operations of J_x^T diag(r) J_x,  r = dL/dy s''(x)

The residuals are additional vectors to propagate, with the sign of r, from the inputs of those
operations, one for each element of the operation per sample. Piecewise linear networks have none.
Source: BackPACK, arXiv 1912.10985, appendix A.3.

Letters: V vectors, N samples, F elements of an operation per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ngsgd.errors import ConfigError


def _operations(names: str, number: int = 0) -> set[str]:
    """Return the names of the backward nodes of operations that autograd numbers so."""
    return {f"{name}Backward{number}" for name in names.split()}


# Linear or piecewise linear in each input, if only one input depends on the parameters.
_LINEAR = {"AccumulateGrad", "CopySlices", "SqueezeBackward2", "SqueezeBackward3"} | _operations(
    "Squeeze Add Sub Rsub Mul Div Sum Mean Clamp Hardtanh Max Min", 1) | _operations(
    "Addmm Mm Bmm T Linear Convolution MkldnnConvolution View UnsafeView ReshapeAlias Alias Clone Contiguous Transpose Permute "
    "Movedim Squeeze Unsqueeze Expand Repeat Slice Select Index IndexSelect Gather Narrow Split Chunk Unbind Cat Stack Flip "
    "AsStrided Unfold Diagonal Unflatten Add Sub Neg Mul Div Sum Mean ConstantPadNd Relu LeakyRelu Threshold Hardtanh Clamp Abs "
    "ClampMin ClampMax ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D UpsampleNearest2D UpsampleNearest1D "
    "MaxPool2DWithIndices MaxPool3DWithIndices MaxPool1D AvgPool2D AvgPool3D AvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D "
    "MkldnnAdaptiveAvgPool2D AdaptiveMaxPool2D AdaptiveMaxPool3D Max Amax NativeDropout NativeBatchNorm CudnnBatchNorm BatchNorm "
    "ToCopy MaxPool2D Dot Mv Min Amin Maximum Minimum Where MaskedFill MaskedSelect Topk Sort Cumsum")
# elementwise with a second derivative
CURVED = _operations(
    "Sigmoid Tanh Elu Celu Selu Softplus Gelu Silu Mish LogSigmoid Hardswish Hardsigmoid Exp Log Log1P Pow Sqrt Rsqrt Sin Cos "
    "Reciprocal Erf Expm1 Square")
_PRODUCTS = _operations("Mul Div Mm Bmm Addmm Linear Convolution NativeBatchNorm CudnnBatchNorm BatchNorm Dot Mv")
_PREFIXES = (
    "Addmm", "Mm", "Linear", "Convolution", "MkldnnConvolution", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone",
    "Squeeze", "Unsqueeze", "Slice", "Select", "Unflatten", "Sum", "Mean", "ConstantPad", "AvgPool", "AdaptiveAvgPool",
    "MkldnnAdaptiveAvgPool", "ReflectionPad", "ReplicationPad", "Upsample", "ToCopy", "Unfold", "AsStrided")
# The Jacobian is equal for every sample.
CONSTANT = {"TBackward0"} | {name for name in _LINEAR if name.startswith(_PREFIXES)}
# Outputs depend only on the same element of the input, without broadcasting.
ELEMENTWISE = CURVED | _operations("Clamp Rsub", 1) | _operations(
    "Relu LeakyRelu Threshold Hardtanh Clamp Abs ClampMin ClampMax Mul Div Neg NativeDropout Add Sub NativeBatchNorm "
    "CudnnBatchNorm")


def nodes_between(output: GradientEdge, layers: Iterable[GradientEdge]) -> tuple[list[Node], set[Node]]:
    """Return (nodes between an output and layers, output first; those of outputs of layers)."""
    ends = {edge.node for edge in layers}
    leads: dict[Node, bool] = {}
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(output.node, False)]
    # Depth first, children before parents.
    while stack:
        node, is_done = stack.pop()
        if is_done:
            leads[node] = node in ends or any(leads.get(child, False) for child, _ in node.next_functions if child is not None)
            if leads[node]:
                order.append(node)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in leads)
    return order[::-1], ends


def paths(node: Node, between: set[Node]) -> list[GradientEdge]:
    """Return the graph edges of those inputs of a node that depend on a layer."""
    return [GradientEdge(child, number) for child, number in node.next_functions if child in between]


def is_linear(node: Node, between: set[Node]) -> bool:
    """Return whether the output has no second derivative in the inputs that are in `between`."""
    places = [place for place, (child, _) in enumerate(node.next_functions) if child in between]
    is_divisor = node.name().startswith("Div") and 1 in places
    return node.name() in _LINEAR and not is_divisor and (len(places) <= 1 or node.name() not in _PRODUCTS)


def describe(node: Any) -> str:
    """Return the common name of an operation."""
    return str(node.name()).removesuffix("0").removesuffix("1").removesuffix("Backward")


class Residual(NamedTuple):
    """A curved operation: the graph edge of its input, and r."""

    source: GradientEdge
    r: Tensor


def residuals(output: GradientEdge, df: Tensor, layers: list[GradientEdge], quantity: str) -> list[Residual]:
    """Return the residuals of all curved operations between an output of gradient df and layers."""
    order, ends = nodes_between(output, layers)
    between = set(order)
    found = []
    for node in order:
        inputs = paths(node, between)
        if node.name() in CURVED and len(inputs) == 1:
            if (r := _second_derivative(output, df, node, inputs[0])) is not None:
                found.append(Residual(inputs[0], r))
        elif not (is_linear(node, between) or (node in ends and not inputs)):
            raise ConfigError(f"{quantity} does not support the operation {describe(node)} in the "
                              "network; request diag_ggn, which needs no second derivative, or "
                              "exclude the layers before it with layers=.")
    return found


def _second_derivative(output: GradientEdge, df: Tensor, node: Node, source: GradientEdge) -> Tensor | None:
    """Return dL/dy s''(x) by differentiating twice; None if the loss does not depend on it."""
    edge = GradientEdge(node, 0)
    found: Any = torch.autograd.grad([output], [edge], [df], retain_graph=True, allow_unused=True)
    if (dy := found[0]) is None:
        return None
    with torch.enable_grad():
        (dx,) = torch.autograd.grad([edge], [source], [dy.detach()], retain_graph=True, create_graph=True)
        if not dx.requires_grad:
            return None
        (r,) = torch.autograd.grad(dx.sum(), [source], retain_graph=True, allow_unused=True)
    return None if r is None or not bool(r.any()) else r.detach()


def columns(r: Tensor, num_samples: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of (V x shape of x, signs V x N): sqrt |r| of one element of each sample."""
    root_NF, sign_NF = r.abs().sqrt().view(num_samples, -1), r.sign().view(num_samples, -1)
    F = root_NF.shape[1]
    for first in range(0, F, chunk):
        size = min(chunk, F - first)
        block = r.new_zeros(size, num_samples, F)
        for v in range(size):
            block[v, :, first + v] = root_NF[:, first + v]
        yield block.view(size, *r.shape), sign_NF[:, first:first + size].T


def vector_products(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor,
                    at_once: int) -> list[Tensor | None]:
    """Return V x shape at each edge, `at_once` together; None where the output is independent."""
    if at_once > 1 and len(vectors_V) > 1:
        try:
            blocks = [_batched(output, edges, block) for block in vectors_V.split(at_once)]
        except RuntimeError:
            # A custom function without a rule; other errors occur again below.
            pass
        else:
            if len(blocks) == 1:
                return blocks[0]
            return [torch.cat(es) if (es := _taken(blocks, number)) else None for number in range(len(edges))]
    found: list[list[Any]] = [list(torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True))
                              for vector in vectors_V]
    all_es = [_taken(found, number) for number in range(len(edges))]
    return [None if not es else es[0][None] if len(es) == 1 else torch.stack(es) for es in all_es]


def _batched(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    is_reached: list[bool] = []

    def products(vector: Tensor) -> list[Tensor]:
        found: Any = torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True)
        is_reached[:] = [e_M is not None for e_M in found]
        return [e_M for e_M in found if e_M is not None]
    # grad(.., is_grads_batched=True) supports fewer operations, and runs the vectors of a
    # convolution one by one.
    found = iter(torch.func.vmap(products)(vectors_V))
    return [next(found) if is_there else None for is_there in is_reached]


def _taken(found: list[list[Any]], number: int) -> list[Tensor]:
    """Take the results of all blocks at one edge out of `found`; none without dependence."""
    es = [block[number] for block in found]
    for block in found:
        block[number] = None
    return [] if es[0] is None else es


def pushing(u: Tensor, pulled: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return v -> J v from J^T u by parameter; the gradient of J^T u with respect to u is J."""
    def push(v: Sequence[Tensor]) -> Tensor:
        along = [(J_u, each) for J_u, each in zip(pulled, v, strict=True) if J_u is not None and J_u.requires_grad]
        if not along:
            return torch.zeros_like(u)
        (pushed,) = torch.autograd.grad([J_u for J_u, _ in along], [u], [each for _, each in along], retain_graph=True,
                                        allow_unused=True)
        return torch.zeros_like(u) if pushed is None else pushed.detach()
    return push
