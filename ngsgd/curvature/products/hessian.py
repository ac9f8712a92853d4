"""Diagonal of the Hessian: that of the GGN plus a residual for every curved operation.

For a parameter theta whose layer output reaches the loss through operations y = s(x),

    d2L/dtheta2 = J_f^T H_f J_f + sum over curved operations of J_x^T diag(r) J_x,  r = dL/dy s''(x)

The residuals are additional vectors to propagate, with the sign of r, from the inputs of those
operations, one for each element of the operation per sample. Piecewise linear networks have none.
Source: BackPACK, arXiv 1912.10985, appendix A.3.

Letters: V vectors, N samples, F elements of an operation per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ngsgd.curvature.products.graph import CURVED, describe, is_linear, nodes_between, paths
from ngsgd.errors import ConfigError


class Residual(NamedTuple):
    """A curved operation: the graph edge of its input, and r."""

    source: GradientEdge
    r: Tensor


def residuals(output: GradientEdge, df: Tensor, layers: list[GradientEdge], quantity: str) -> list[Residual]:
    """Return the residuals of all curved operations between the output and the layers.

    Args:
        output: edge of the network output.
        df: gradient of the loss with respect to the output.
        layers: edges of the layer outputs.
        quantity: name of the quantity, for messages.

    Raises:
        ConfigError: an operation is neither linear, piecewise linear nor elementwise.
    """
    order, ends = nodes_between(output, layers)
    between = set(order)
    found = []
    for node in order:
        inputs = paths(node, between)
        if node.name() in CURVED and len(inputs) == 1:
            r = _second_derivative(output, df, node, inputs[0])
            if r is not None:
                found.append(Residual(inputs[0], r))
        elif not (is_linear(node, between) or (node in ends and not inputs)):
            raise ConfigError(f"{quantity} does not support the operation {describe(node)} in the "
                              "network; request diag_ggn, which needs no second derivative, or "
                              "exclude the layers before it with layers=.")
    return found


def _second_derivative(output: GradientEdge, df: Tensor, node: Node, source: GradientEdge) -> Tensor | None:
    """Return dL/dy s''(x) by differentiating the operation twice.

    None if the loss does not depend on it.
    """
    edge = GradientEdge(node, 0)
    found: Any = torch.autograd.grad([output], [edge], [df], retain_graph=True, allow_unused=True)
    dy = found[0]
    if dy is None:
        return None
    with torch.enable_grad():
        (dx,) = torch.autograd.grad([edge], [source], [dy.detach()], retain_graph=True, create_graph=True)
        if not dx.requires_grad:
            return None
        (r,) = torch.autograd.grad(dx.sum(), [source], retain_graph=True, allow_unused=True)
    return None if r is None or not bool(r.any()) else r.detach()


def columns(r: Tensor, num_samples: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of (V x shape of x, signs V x N).

    One element of each sample, of size sqrt |r|.
    """
    root_NF, sign_NF = r.abs().sqrt().view(num_samples, -1), r.sign().view(num_samples, -1)
    F = root_NF.shape[1]
    for first in range(0, F, chunk):
        size = min(chunk, F - first)
        block = r.new_zeros(size, num_samples, F)
        for v in range(size):
            block[v, :, first + v] = root_NF[:, first + v]
        yield block.view(size, *r.shape), sign_NF[:, first:first + size].T
