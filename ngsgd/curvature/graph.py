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

# Linear or piecewise linear in each input, if only one input depends on the parameters.
_LINEAR = {
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "TBackward0", "LinearBackward0", "ConvolutionBackward0",
    "MkldnnConvolutionBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0",
    "CloneBackward0", "ContiguousBackward0", "TransposeBackward0", "PermuteBackward0", "MovedimBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "ExpandBackward0", "RepeatBackward0", "SliceBackward0",
    "SelectBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0", "NarrowBackward0", "SplitBackward0",
    "ChunkBackward0", "UnbindBackward0", "CatBackward0", "StackBackward0", "FlipBackward0", "AsStridedBackward0",
    "UnfoldBackward0", "DiagonalBackward0", "SqueezeBackward3", "UnflattenBackward0", "AddBackward0", "AddBackward1",
    "SubBackward0", "SubBackward1", "RsubBackward1", "NegBackward0", "MulBackward0", "MulBackward1", "DivBackward0",
    "DivBackward1", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1", "ConstantPadNdBackward0", "ReluBackward0",
    "LeakyReluBackward0", "ThresholdBackward0", "HardtanhBackward0", "ClampBackward0", "ClampBackward1", "AbsBackward0",
    "ClampMinBackward0", "ClampMaxBackward0", "HardtanhBackward1", "ReflectionPad1DBackward0", "ReflectionPad2DBackward0",
    "ReplicationPad1DBackward0", "ReplicationPad2DBackward0", "UpsampleNearest2DBackward0", "UpsampleNearest1DBackward0",
    "MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0", "MaxPool1DBackward0", "AvgPool2DBackward0",
    "AvgPool3DBackward0", "AvgPool1DBackward0", "AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0",
    "MkldnnAdaptiveAvgPool2DBackward0", "AdaptiveMaxPool2DBackward0", "AdaptiveMaxPool3DBackward0", "MaxBackward0",
    "AmaxBackward0", "NativeDropoutBackward0", "NativeBatchNormBackward0", "CudnnBatchNormBackward0", "BatchNormBackward0",
    "ToCopyBackward0", "CopySlices", "AccumulateGrad", "MaxPool2DBackward0", "DotBackward0", "MvBackward0", "MaxBackward1",
    "MinBackward0", "MinBackward1", "AminBackward0", "MaximumBackward0", "MinimumBackward0", "WhereBackward0",
    "MaskedFillBackward0", "MaskedSelectBackward0", "TopkBackward0", "SortBackward0", "CumsumBackward0",
}
# elementwise with a second derivative
CURVED = {
    "SigmoidBackward0", "TanhBackward0", "EluBackward0", "CeluBackward0", "SeluBackward0", "SoftplusBackward0", "GeluBackward0",
    "SiluBackward0", "MishBackward0", "LogSigmoidBackward0", "HardswishBackward0", "HardsigmoidBackward0", "ExpBackward0",
    "LogBackward0", "Log1PBackward0", "PowBackward0", "SqrtBackward0", "RsqrtBackward0", "SinBackward0", "CosBackward0",
    "ReciprocalBackward0", "ErfBackward0", "Expm1Backward0", "SquareBackward0"}
_PRODUCTS = {
    "MulBackward0", "DivBackward0", "MmBackward0", "BmmBackward0", "AddmmBackward0", "LinearBackward0", "ConvolutionBackward0",
    "NativeBatchNormBackward0", "CudnnBatchNormBackward0", "BatchNormBackward0", "DotBackward0", "MvBackward0",
}


_PREFIXES = (
    "Addmm", "Mm", "Linear", "Convolution", "MkldnnConvolution", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone",
    "Squeeze", "Unsqueeze", "Slice", "Select", "Unflatten", "Sum", "Mean", "ConstantPad", "AvgPool", "AdaptiveAvgPool",
    "MkldnnAdaptiveAvgPool", "ReflectionPad", "ReplicationPad", "Upsample", "ToCopy", "Unfold", "AsStrided",
)
# The Jacobian is equal for every sample.
CONSTANT = {"TBackward0"} | {name for name in _LINEAR if name.startswith(_PREFIXES)}
# Outputs depend only on the same element of the input, without broadcasting.
ELEMENTWISE = CURVED | {
    "ReluBackward0", "LeakyReluBackward0", "ThresholdBackward0", "HardtanhBackward0", "ClampBackward0", "ClampBackward1",
    "AbsBackward0", "ClampMinBackward0", "ClampMaxBackward0", "MulBackward0", "DivBackward0", "NegBackward0",
    "NativeDropoutBackward0", "AddBackward0", "SubBackward0", "RsubBackward1", "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0"}


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
