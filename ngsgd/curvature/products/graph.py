"""Classification of autograd operations between a network output and its layers.

Linear, piecewise linear or curved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.autograd.graph import GradientEdge, Node

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
    "ReciprocalBackward0", "ErfBackward0", "Expm1Backward0", "SquareBackward0",
}
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
    "CudnnBatchNormBackward0",
}


def nodes_between(output: GradientEdge, layers: Iterable[GradientEdge]) -> tuple[list[Node], set[Node]]:
    """Collect the nodes between an output and the outputs of layers.

    Returns:
        (nodes, starting at the output; those among them that are outputs of layers).
    """
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
