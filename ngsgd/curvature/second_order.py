"""Propagation of the loss Hessian through the network, just before the ordinary backward pass.

Most quantities need vectors. KFRA (Botev et al. 2017) propagates the mean over samples operation by
operation, and averages after each:

    linear, the same for all samples     Gbar_in = J^T Gbar J
    elementwise, y = s(x)                Gbar_in = Gbar * 1/N sum_n s'(x_n) s'(x_n)^T
    anything else                        Gbar_in = 1/N sum_n J_n^T Gbar J_n

Letters: V vectors, N samples, D elements of an operation's output per sample, T positions, O
outputs.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.capture import CACHED, Capture
from ngsgd.curvature.forms.grad_forms import joined
from ngsgd.curvature.graph import CONSTANT, ELEMENTWISE, columns, describe, nodes_between, paths, residuals
from ngsgd.curvature.layers import Affine, Convolution, LayerCall, disagreement
from ngsgd.curvature.products import ModelCalls, Pass
from ngsgd.curvature.quantities import PRODUCTS, SIGNALS, Accumulation, CollectOptions, PassResults
from ngsgd.errors import ConfigError, DataError

# start of the vectors, V x .., their signs V x N
_Block = tuple[Tensor | GradientEdge, Tensor, Tensor | None]


class SecondOrderBackward:
    """Propagate the vectors that the quantities need, and sum the results at the layers."""

    def __init__(self, capture: Capture, accumulation: Accumulation, asked: Sequence[str], options: CollectOptions) -> None:
        self._capture, self._accumulation, self._asked, self._options = capture, accumulation, asked, options
        self._forms = accumulation.forms
        self._calls: ModelCalls | None = None
        self.passes: list[Pass] = []   # for products

    def open(self) -> None:
        """Start recording the calls of the model, if products need them."""
        if any(name in PRODUCTS for name in self._asked):
            self._calls = ModelCalls(self._capture.model)

    def close(self) -> None:
        """Remove the hooks."""
        if self._calls is not None:
            self._calls.close()

    def send(self, loss: losses.LossCall, output: Tensor, upstream: Tensor) -> None:
        """Propagate all signals of one evaluation of the loss of an output; the graph is kept."""
        view = loss.evaluation(output, upstream)
        if self._calls is not None:
            self.passes.append(self._calls.taken(output, loss, upstream))
        if self._forms["sampled"]:
            draws = view.sampled(self._options.mc_samples, self._options.generator)
            self._send("sampled", [(view.output, draws, None)])
        N = self._capture.num_samples_seen(output)
        size = sum(call.output_shape.numel() for call in self._capture.open_calls)
        chunk = max(1, self._options.max_floats // size)
        if self._forms["exact"]:
            self._send("exact", ((view.output, block, None) for block in view.columns(N, self._held("exact", size, chunk))))
        if self._forms["hessian"]:
            roots = ((view.output, block, None) for block in view.columns(N, self._held("hessian", size, chunk)))
            with torch.enable_grad(), self._capture.paused():
                f = output.detach().requires_grad_()
                (df,) = torch.autograd.grad(loss.of(f), f, upstream)
            self._send("hessian", itertools.chain(roots, self._residual_blocks(output, df, N, chunk)))
        if self._forms["averages"]:
            calls = dict(self._capture.open_calls)
            with torch.no_grad(), self._capture.paused():
                found = recursion(output_moment(view, N), get_gradient_edge(view.output), calls, N,
                                  self._options.max_floats, self._capture.parameters)
                for call, of_output_DD in found.items():
                    if not isinstance(call.kind, Affine | Convolution) or getattr(call.kind, "groups", 1) > 1:
                        raise ConfigError(f"layer {call.layer} has no Kronecker factors for kfra; exclude it with layers=.")
                    name = call.weight or call.bias
                    assert name is not None
                    self._accumulation.sums[name].B_OO["averages"].add_sum(factor_of(call, of_output_DD, self._options.sharing))

    def _held(self, signal: str, size: int, chunk: int) -> int:
        """Return the number of vectors per block, so that summed results fit into the cache."""
        # Squares of a convolution are excepted: each block would form its patches.
        summed = {"factors"} if any(not isinstance(call.kind, Affine) or call.input.ndim > 2
                                    for call in self._capture.open_calls) else {"factors", "squares"}
        return max(1, min(chunk, CACHED // size)) if self._forms[signal] <= summed else chunk

    def _send(self, signal: str, blocks: Iterable[_Block]) -> None:
        """Propagate vectors through the network, and add the results to every parameter."""
        fresh = PassResults()
        with torch.no_grad():
            for source, vectors_V, signs_VN in blocks:
                uses: dict[str, list[Any]] = defaultdict(list)
                num_samples = 0
                for call, e_VM in self._capture.sweep(source, vectors_V):
                    record = self._capture.record(call, e_VM)
                    num_samples = num_samples or record.num_samples
                    if record.num_samples != num_samples:
                        raise DataError(disagreement(call.layer, record.num_samples, num_samples))
                    for name, share in record.shares().items():
                        uses[name].append(share)
                # Free each one after use.
                for name in list(uses):
                    self._accumulation.accumulate(name, signal, joined(uses.pop(name)), fresh, signs_VN=signs_VN)
            self._accumulation.keep(signal, fresh)

    def _residual_blocks(self, output: Tensor, df: Tensor, num_samples: int, chunk: int) -> Iterator[_Block]:
        quantity = next(name for name in self._asked if SIGNALS.get(name, ("",))[0] == "hessian")
        calls = self._capture.open_calls
        uses = Counter(name for call in calls for name in (call.weight, call.bias))
        if often := [name for name, count in uses.items() if name and count > 1]:
            raise ConfigError(f"{quantity} of {often[0]} is not supported: the parameter is used "
                              "several times, and one use may depend on another; request "
                              "diag_ggn, or exclude its layers with layers=.")
        with self._capture.paused():
            found = residuals(get_gradient_edge(output), df, list(calls.values()), quantity)
        for source, r in found:
            for block, signs_VN in columns(r, num_samples, chunk):
                yield source, block, signs_VN


def output_moment(view: losses.LossEvaluation, num_samples: int) -> Tensor:
    """Return the sum over samples of the loss Hessian of the output of a sample, D x D."""
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
    """Propagate a matrix from the network output to each call, D x D; ConfigError if it cannot."""
    order, _ = nodes_between(output, calls.values())
    between = set(order)
    call_at = {edge: call for call, edge in calls.items()}
    found: dict[LayerCall, Tensor] = {}
    edge = output
    while True:
        if edge in call_at:
            found[call_at[edge]] = G_DD
        if not (inputs := paths(edge.node, between)):
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
        call = call_at.get(edge)
        # The Jacobian of a plain product of rows is its weight; autograd differentiates the others.
        if call is not None and call.weight is not None and isinstance(call.kind, Affine) \
                and call.input.ndim <= 2 and edge.node.name() in ("AddmmBackward0", "MmBackward0"):
            weight_OI = parameters[call.weight].detach().to(G_DD)
            G_DD = weight_OI.T @ G_DD @ weight_OI
        else:
            G_DD = _through(G_DD, edge, inputs[0], num_samples)
        edge = inputs[0]
    if missed := [call.layer for call in calls if call not in found]:
        raise ConfigError("kfra requires a chain of operations, which does not include layer "
                          f"{missed[0]}; request kfac or kflr.")
    return found


def _size(edge: GradientEdge, num_samples: int) -> int:
    # of its output: the argument of the backward of the node
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    shape = torch.Size(metadata.shape)
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
    """Multiply rows by the Jacobian that all samples share, another row for each sample."""
    X = len(rows_XD)
    padded = torch.nn.functional.pad(rows_XD, (0, 0, 0, -X % num_samples))
    return torch.cat([_pulled(rows_ND, edge, source, num_samples) for rows_ND in padded.split(num_samples)])[:X]


def _pulled(v_ND: Tensor, edge: GradientEdge, source: GradientEdge, num_samples: int) -> Tensor:
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    (pulled,) = torch.autograd.grad([edge], [source], [v_ND.reshape(metadata.shape).to(metadata.dtype)], retain_graph=True)
    return pulled.reshape(num_samples, -1).to(v_ND.dtype)


def factor_of(call: LayerCall, G_DD: Tensor, sharing: str) -> Tensor:
    """Return B (O x O) from the matrix at the output of an affine layer."""
    shape = (1, *call.output_shape[1:])
    if len(G_DD) != call.output_shape[1:].numel():
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
