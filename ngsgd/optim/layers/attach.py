"""Selection of layers for natural-gradient steps, and replacement of their class in place.

`torch.nn.utils.parametrize` changes classes in the same way; parameters, their names and the
forward pass stay the same.

Four mechanisms read the rows of a layer:

* The class of the layer is changed (here): the backward pass forms the preconditioned gradient
  directly. A hook runs after the plain gradient has been formed, and would need a second GEMM of
  the size of the layer.
* An operator (`compiled`): the same under `torch.compile`, which cannot trace state that changes in
  backward.
* Hooks (`ngsgd.curvature.capture`): rows are read and the gradient is unchanged, for any loss and
  several passes.
* A function mode (`ngsgd.preconditioners.factored_grad`): the weight gradient is never formed,
  during one call of `evaluate_and_step`. Layers keep their class, so hooks and the mode can work on
  the same pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

# registers the operators that layers call in a compiled graph
from ngsgd.optim.layers import attention, compiled, convolution, scale_offset  # noqa: F401
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner, ObservedLinear
from ngsgd.optim.layers.linear import NaturalGradientLinear, NaturalGradientTransposedLinear

# Exact classes, because a subclass may compute something else.
NATURAL_GRADIENT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: NaturalGradientLinear,
    nn.Conv1d: convolution.NaturalGradientConv1d,
    nn.Conv2d: convolution.NaturalGradientConv2d,
    nn.Conv3d: convolution.NaturalGradientConv3d,
    nn.LayerNorm: scale_offset.NaturalGradientLayerNorm,
    nn.RMSNorm: scale_offset.NaturalGradientRMSNorm,
    nn.GroupNorm: scale_offset.NaturalGradientGroupNorm,
    nn.BatchNorm1d: scale_offset.NaturalGradientBatchNorm1d,
    nn.BatchNorm2d: scale_offset.NaturalGradientBatchNorm2d,
    nn.BatchNorm3d: scale_offset.NaturalGradientBatchNorm3d,
    nn.MultiheadAttention: attention.NaturalGradientMultiheadAttention,
    nn.modules.linear.NonDynamicallyQuantizableLinear: attention.NaturalGradientOutProjection,
}
# Conv1D of transformers joins these two at its first use; the public constant never changes.
_NATURAL_CLASSES = dict(NATURAL_GRADIENT_CLASSES)
_PLAIN_CLASSES = {natural: plain for plain, natural in NATURAL_GRADIENT_CLASSES.items()}


def natural_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class that replaces exactly this class; None without a natural gradient for it."""
    # Conv1D of GPT-2, identified by name to avoid an import of transformers.
    if kind not in _NATURAL_CLASSES and (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        _NATURAL_CLASSES[kind] = type("NaturalGradientConv1D", (NaturalGradientTransposedLinear, kind), {})
        _PLAIN_CLASSES[_NATURAL_CLASSES[kind]] = kind
    return _NATURAL_CLASSES.get(kind)


def attach(layer: nn.Module, settings: FisherSettings, context: LayerContext) -> LayerPreconditioner | None:
    """Change the class of `layer` in place; None, unchanged, if it has no natural gradient."""
    kind = type(layer)
    # A layer of another optimizer is attached again without its state.
    plain_class = _PLAIN_CLASSES.get(kind, kind)
    weight = weight_of(layer)
    new_class = natural_class(plain_class)
    if new_class is None or weight is None or not weight.requires_grad:
        return None
    # There is nothing to estimate, and estimates are of real numbers.
    if not weight.numel() or weight.is_complex():
        return None
    # Keys and values have another width, or the layer adds parameters to them.
    if isinstance(layer, nn.MultiheadAttention) and (layer.bias_k is not None or layer.add_zero_attn):
        return None
    if context.observes and not (plain_class is nn.Linear or (isinstance(layer, nn.Conv1d) and layer.groups == 1)):
        return None
    former = layer.__dict__.get("preconditioner")
    if former is not None and former.context is not context:
        former.context.retired = "another NGSGD has taken over its layers"
    preconditioner = _preconditioner(layer, plain_class, settings, context)
    preconditioner.weight = weight
    preconditioner.bias = bias_of(layer)
    preconditioner.is_transposed = issubclass(new_class, NaturalGradientTransposedLinear)
    layer.__class__ = new_class
    layer.__dict__["preconditioner"] = preconditioner
    return preconditioner


def weight_of(layer: nn.Module) -> Any:
    """Return the parameter whose gradient the estimates follow; None if there is none."""
    return layer._parameters.get("in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight")


def bias_of(layer: Any) -> Any:
    """Return the parameter that is added to the output; None without one."""
    return getattr(layer, "in_proj_bias" if isinstance(layer, nn.MultiheadAttention) else "bias", None)


def detach_all(layers: Mapping[str, nn.Module], context: LayerContext) -> None:
    """Restore the plain layers of an optimizer, except those that another one owns now."""
    for layer in layers.values():
        preconditioner = layer.__dict__.get("preconditioner")
        if preconditioner is None or preconditioner.context is not context:
            continue
        # Another tool, such as parametrizations, has changed the class since.
        if (plain_class := _PLAIN_CLASSES.get(type(layer))) is None:
            preconditioner.weight = None
        else:
            del layer.__dict__["preconditioner"]
            layer.__class__ = plain_class


def _preconditioner(layer: Any, plain_class: type[nn.Module], settings: FisherSettings,
                    context: LayerContext) -> LayerPreconditioner:
    weight = weight_of(layer)
    has_bias = bias_of(layer) is not None
    if context.observes:
        kind = ObservedLinear if plain_class is nn.Linear else convolution.ObservedTdnn
        return kind(context, weight[0].numel(), len(weight), has_bias, settings)
    if issubclass(plain_class, (nn.Linear, nn.MultiheadAttention)):
        return KroneckerPreconditioner(context, weight.shape[1], len(weight), has_bias, settings)
    if plain_class is nn.Conv1d and layer.groups == 1:
        return convolution.SplicedPreconditioner(context, weight[0].numel(), len(weight), has_bias, settings)
    if issubclass(plain_class, nn.modules.conv._ConvNd):
        return convolution.FilterPreconditioner(context, weight[0].numel(), len(weight), has_bias, settings)
    if issubclass(_NATURAL_CLASSES[plain_class], NaturalGradientTransposedLinear):
        return KroneckerPreconditioner(context, len(weight), weight.shape[1], has_bias, settings)
    return scale_offset.ScaleOffsetPreconditioner(context, weight.numel(), has_bias, settings)
