"""Comparison of captured gradients with those of autograd.

The sum over samples of the captured gradients of a parameter is its gradient. It differs if the
parameter is also used outside its layer, or if a hook or an overridden method changes the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ngsgd.curvature.forms.grad_forms import DenseGrad, EmbeddingGrad, OuterProduct
from ngsgd.curvature.layers import UseShare
from ngsgd.curvature.records import LayerCall, Record

# Floats of input rows formed at a time: 8 MB.
_CHUNK = 1 << 21


@dataclass
class Total:
    """Sum over samples of the captured gradients of one parameter."""

    value: Tensor
    # Upper bound of the norm of the sum of absolute values, the scale of its rounding errors.
    bound: float
    # relative rounding error of the summands
    precision: float


class Totals:
    """Totals of parameters by name, of one backward pass."""

    def __init__(self) -> None:
        self._of: dict[str, Total] = {}

    def add(self, record: Record, dtype: torch.dtype) -> None:
        """Add a record whose derivatives arrived in a dtype."""
        for name, share in record.shares().items():
            value, bound = _summed(share)
            known = self._of.setdefault(name, Total(torch.zeros_like(value), 0.0, 0.0))
            known.value += value
            known.bound += bound
            known.precision = max(known.precision, _precision(dtype, value.device))

    def differ(self, name: str, gradient: Tensor, transposed: Iterable[str] = ()) -> bool:
        """Return whether a gradient differs from the total by more than rounding.

        The summands are equal, so only the order of additions differs: 16 roundings of the sum of
        absolute values. In addition, half of the digits must differ, because a missing use changes
        the first digit. Values that are not finite are inconclusive.
        """
        g = (gradient.T if name in transposed else gradient).detach().flatten().double()
        total = self._of.get(name) or Total(torch.zeros_like(g), 0.0, _precision(gradient.dtype, g.device))
        found = total.value.double()
        error = float((found - g).norm())
        scale = max(float(found.norm()), float(g.norm()))
        return math.isfinite(error) and error > max(16.0 * total.precision * total.bound, 4.0 * total.precision**0.5 * scale)


def unaccounted(source: GradientEdge, like: Tensor, calls: Mapping[LayerCall, GradientEdge],
                parameters: Mapping[str, Tensor], record: Callable[[LayerCall, Tensor], Record],
                transposed: Iterable[str]) -> tuple[str | None, set[LayerCall]]:
    """Compare both gradients of a random linear function of a source.

    Args:
        source: output of the model or input of the loss.
        like: of its shape and dtype.
        calls: captured calls, and the graph edges of their outputs.
        parameters: of the captured layers, by name.
        record: returns the record of all samples of a call and its derivatives.
        transposed: names of weights that are stored as inputs x outputs.

    Returns:
        (a parameter whose gradients differ, or None; calls with a derivative that is not zero)
    """
    ends: list[Any] = [*calls.values(), *parameters.values()]
    found = torch.autograd.grad([source], ends, [probe(like)], retain_graph=True, allow_unused=True)
    totals, reached = Totals(), set()
    for call, e_M in zip(calls, found, strict=False):
        if e_M is not None:
            totals.add(record(call, e_M[None]), e_M.dtype)
            if bool(e_M.any()):
                reached.add(call)
    for name, gradient in zip(parameters, found[len(calls):], strict=True):
        if gradient is not None and totals.differ(name, gradient, transposed):
            return name, reached
    return None, reached


def probe(like: Tensor) -> Tensor:
    """Return random values in the layout of a tensor; torch's global generator is not used."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)


def _precision(dtype: torch.dtype, device: torch.device) -> float:
    if dtype == torch.float32:
        # A GEMM may round its operands to bfloat16, or to the 10 bits of TF32 on a GPU.
        if torch.get_float32_matmul_precision() != "highest":
            return 2.0**-8
        return 2.0**-11 if device.type == "cuda" else 2.0**-23
    return torch.finfo(dtype).eps


def _summed(share: UseShare) -> tuple[Tensor, float]:
    """Return (sum over samples, bound of its norm) without per-sample gradients."""
    e_VNTO = share.e_VNTO
    size = float(e_VNTO.norm())
    if isinstance(share, EmbeddingGrad):
        one = EmbeddingGrad(share.index_NT.reshape(1, -1), e_VNTO.flatten(1, 2)[:, None], share.num_rows)
        return one.individual(0, 1)[0, 0], size * share.index_NT.numel() ** 0.5
    if not isinstance(share, OuterProduct):
        return e_VNTO.sum(dim=(0, 1, 2)), size * e_VNTO[0, :, :, 0].numel() ** 0.5
    N, square = share.num_samples, 0.0
    value: Tensor | None = None
    step = max(1, _CHUNK // max(1, share.inputs.num_positions * share.inputs.width))
    for first in range(0, N, step):
        last = min(first + step, N)
        a_NTI, e_NTO = share.inputs.rows(first, last), e_VNTO[0, first:last]
        square += float(a_NTI.square().sum())
        if share.groups == 1:
            part = (e_NTO.flatten(0, 1).T @ a_NTI.flatten(0, 1)).flatten()
        else:
            part = DenseGrad(share.individual(first, last)).moments()[0]
        value = part if value is None else value + part
    assert value is not None
    return value, size * square**0.5
