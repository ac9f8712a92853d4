"""KFRA: Kronecker factors from a recursion of averages (Botev et al. 2017).

The mean over samples of the loss Hessian is propagated back operation by operation, and averaged
after each:

    linear, the same for all samples     Gbar_in = J^T Gbar J
    elementwise, y = s(x)                Gbar_in = Gbar * 1/N sum_n s'(x_n) s'(x_n)^T
    anything else                        Gbar_in = 1/N sum_n J_n^T Gbar J_n

Letters: N samples, D elements of an operation's output per sample, T positions, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ngsgd.curvature.capture import LayerCall
from ngsgd.curvature.layers import Affine
from ngsgd.curvature.losses import LossEvaluation
from ngsgd.curvature.products.graph import CONSTANT, ELEMENTWISE, describe, nodes_between, paths
from ngsgd.errors import ConfigError


def output_moment(view: LossEvaluation, num_samples: int) -> Tensor:
    """Return the sum over samples of the loss Hessian with respect to the output of a sample, D x
    D.
    """
    f, K = view.rows(), view.rows_of(num_samples)
    if view.classes and K == 1:
        p_NC, w_N = f.softmax(dim=1), view.weight_R
        return torch.diag(w_N @ p_NC) - p_NC.T @ (w_N[:, None] * p_NC)
    total: Tensor | float = 0.0
    for block_V in view.columns(num_samples, 64):
        root_XD = block_V.reshape(len(block_V) * num_samples, -1)
        total = total + root_XD.T @ root_XD
    assert isinstance(total, Tensor)
    return total


def recursion(G_DD: Tensor, output: GradientEdge, calls: dict[LayerCall, GradientEdge],
              num_samples: int, max_floats: int,
              parameters: Mapping[str, Tensor]) -> dict[LayerCall, Tensor]:
    """Propagate the matrix from the network output to the output of each call.

    Args:
        G_DD: matrix at the network output.
        output: edge of the network output.
        calls: calls of layers with the edges of their outputs.
        num_samples: N.
        max_floats: limit for a D x D matrix.
        parameters: by name.

    Returns:
        D x D at the output of each call.

    Raises:
        ConfigError: the network is not a chain (a residual sum), or an operation is too large for a
            D x D matrix.
    """
    order, _ = nodes_between(output, calls.values())
    between = set(order)
    call_at = {edge: call for call, edge in calls.items()}
    found: dict[LayerCall, Tensor] = {}
    edge = output
    while True:
        if edge in call_at:
            found[call_at[edge]] = G_DD
        inputs = paths(edge.node, between)
        if not inputs:
            break
        if len(inputs) > 1:
            raise ConfigError(f"kfra requires a chain of operations, but {describe(edge.node)} "
                              "joins two branches of the network; request kfac or kflr, which "
                              "support any network.")
        D = _size(inputs[0], num_samples)
        if max_floats < D * D:
            raise ConfigError(f"kfra needs a matrix of {D} x {D} numbers at the input of "
                              f"{describe(edge.node)}; request kfac or kflr, or raise max_floats "
                              f"above {D * D}.")
        weight_OI = _weight_of(call_at.get(edge), edge, parameters)
        G_DD = _through(G_DD, edge, inputs[0], num_samples) if weight_OI is None else weight_OI.T @ G_DD @ weight_OI
        edge = inputs[0]
    missed = [call.layer for call in calls if call not in found]
    if missed:
        raise ConfigError("kfra requires a chain of operations, which does not include layer "
                          f"{missed[0]}; request kfac or kflr.")
    return found


def _weight_of(call: LayerCall | None, edge: GradientEdge,
               parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return the Jacobian of a plain product of rows.

    None for others, which autograd differentiates.
    """
    if call is None or call.weight is None or not isinstance(call.kind, Affine) or call.input.ndim > 2:
        return None
    return parameters[call.weight].detach() if edge.node.name() in ("AddmmBackward0", "MmBackward0") else None


def _shape(edge: GradientEdge) -> torch.Size:
    # of its output: the argument of the backward of the node
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    return torch.Size(metadata.shape)


def _size(edge: GradientEdge, num_samples: int) -> int:
    shape = _shape(edge)
    if not shape or shape[0] % num_samples:
        raise ConfigError("kfra needs samples along the first dimension of every operation, and "
                          f"{describe(edge.node)} returns {tuple(shape)}; request kfac or kflr.")
    return shape.numel() // num_samples


def _through(G_DD: Tensor, edge: GradientEdge, source: GradientEdge, num_samples: int) -> Tensor:
    """Return Gbar at the input of the operation."""
    N = num_samples
    if edge.node.name() in ELEMENTWISE:
        slope_ND = _pulled(torch.ones(N, len(G_DD), dtype=G_DD.dtype, device=G_DD.device), edge, source, N)
        return (slope_ND.T @ (slope_ND / N)).mul_(G_DD)
    if edge.node.name() in CONSTANT:
        half_DE = _all_rows(G_DD, edge, source, N)
        return _all_rows(half_DE.T, edge, source, N).T
    values_D, vectors_DD = torch.linalg.eigh(G_DD)
    # A sum of outer products has negative eigenvalues only by rounding.
    roots_RD = (vectors_DD * values_D.clamp(min=0.0).sqrt()).T
    E = _size(source, N)
    total_EE = G_DD.new_zeros(E, E)
    for root_D in roots_RD[values_D > values_D[-1] * 1e-15]:
        pulled_NE = _pulled(root_D.expand(N, -1), edge, source, N)
        total_EE.addmm_(pulled_NE.T, pulled_NE, alpha=1.0 / N)
    return total_EE


def _all_rows(rows_XD: Tensor, edge: GradientEdge, source: GradientEdge, num_samples: int) -> Tensor:
    """Multiply each row by the Jacobian that all samples share, with a different row for each
    sample.
    """
    X = len(rows_XD)
    padded = torch.nn.functional.pad(rows_XD, (0, 0, 0, -X % num_samples))
    return torch.cat([_pulled(rows_ND, edge, source, num_samples) for rows_ND in padded.split(num_samples)])[:X]


def _pulled(v_ND: Tensor, edge: GradientEdge, source: GradientEdge, num_samples: int) -> Tensor:
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    (pulled,) = torch.autograd.grad([edge], [source], [v_ND.reshape(metadata.shape).to(metadata.dtype)], retain_graph=True)
    return pulled.reshape(num_samples, -1).to(v_ND.dtype)


def factor_of(call: LayerCall, G_DD: Tensor, sharing: str) -> Tensor:
    """Return B (O x O) from the matrix at the output of an affine layer."""
    shape = (1, *call.output_shape[1:]) if len(G_DD) == call.output_shape[1:].numel() else None
    if shape is None:
        raise ConfigError(f"kfra needs one row per sample and position in layer {call.layer}; "
                          "request kfac or kflr.")
    if isinstance(call.kind, Affine) and len(shape) == 2:
        return G_DD  # a single position
    # D x T x O
    once = call.kind.derivative_rows(G_DD.view(-1, *shape), 1)[:, 0]
    T, O_ = once.shape[1:]
    # (T O) x 1 x T x O
    twice = call.kind.derivative_rows(once.reshape(-1, T * O_).T.reshape(-1, *shape), 1)
    G_TOTO = twice.reshape(T, O_, T, O_)
    return torch.einsum("topt->op", G_TOTO.transpose(2, 3)) if sharing == "expand" else G_TOTO.sum(dim=(0, 2))
