"""Propagation of vectors of the loss Hessian through the network, just before the ordinary backward
pass.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.accumulation import Accumulation
from ngsgd.curvature.capture import CACHED, Capture
from ngsgd.curvature.forms.grad_forms import joined
from ngsgd.curvature.layers import Affine, Convolution
from ngsgd.curvature.loss_interception import ModelCalls
from ngsgd.curvature.products.block import Pass
from ngsgd.curvature.products.hessian import columns, residuals
from ngsgd.curvature.quantities import PRODUCTS, SIGNALS, CollectOptions, PassResults
from ngsgd.curvature.records import disagreement
from ngsgd.curvature.second_order.kfra import factor_of, output_moment, recursion
from ngsgd.errors import ConfigError, DataError

# start of the vectors, V x .., their signs V x N
_Block = tuple[Tensor | GradientEdge, Tensor, Tensor | None]


class SecondOrderBackward:
    """Propagate the vectors that the requested quantities need, and sum the results at the layers.

    Args:
        capture: provides the calls of layers, and the graph edges of their outputs.
        accumulation: receives the shares.
        asked: names of quantities.
        options: of `collect`.
    """

    def __init__(self, capture: Capture, accumulation: Accumulation, asked: Sequence[str],
                 options: CollectOptions) -> None:
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

    def send(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, upstream: Tensor,
             again: Callable[[Tensor], Tensor]) -> None:
        """Propagate all signals of one evaluation of the loss; the graph is kept.

        Args:
            settings: attributes of the loss.
            kind: class of the loss.
            output: network output, the input of the loss.
            target: target of the loss.
            upstream: gradient with respect to the value of the loss.
            again: returns the loss of another output.
        """
        kind = next(known for known in losses.CLASSES if issubclass(kind, known))
        view = losses.evaluation(settings, kind, output, target, upstream)
        if self._calls is not None:
            evaluation = functools.partial(losses.evaluation, settings, kind, target=target, upstream=upstream)
            self.passes.append(self._calls.taken(output, again, evaluation, upstream))
        if self._forms["sampled"]:
            draws = view.sampled(self._options.mc_samples, self._options.generator)
            self._send("sampled", [(view.output, draws, None)])
        calls = self._capture.open_calls
        N = self._capture.num_samples_seen(output)
        size = sum(call.output_shape.numel() for call in calls)
        chunk = max(1, self._options.max_floats // size)
        if self._forms["exact"]:
            self._send("exact", ((view.output, block, None) for block in view.columns(N, self._held("exact", size, chunk))))
        if self._forms["hessian"]:
            roots = ((view.output, block, None) for block in view.columns(N, self._held("hessian", size, chunk)))
            with torch.enable_grad(), self._capture.paused():
                f = output.detach().requires_grad_()
                (df,) = torch.autograd.grad(again(f), f, upstream)
            self._send("hessian", itertools.chain(roots, self._residual_blocks(output, df, N, chunk)))
        if self._forms["averages"]:
            self._send_averages(view, N)

    def _held(self, signal: str, size: int, chunk: int) -> int:
        """Return the number of vectors per block, so that summed results fit into the cache.

        Squares of a convolution are an exception: they need its patches, which are formed for every
        block.
        """
        summed = {"factors"} if any(not isinstance(call.kind, Affine) or call.input.ndim > 2
                                    for call in self._capture.open_calls) else {"factors", "squares"}
        return max(1, min(chunk, CACHED // size)) if self._forms[signal] <= summed else chunk

    def _send(self, signal: str, blocks: Iterable[_Block]) -> None:
        """Propagate vectors through the Jacobian of the network, and add the results to every
        parameter.
        """
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
                    self._accumulation.accumulate(name, signal, joined(uses.pop(name)), fresh,
                                                  signs_VN=signs_VN)
            self._accumulation.keep(signal, fresh)

    def _send_averages(self, view: losses.LossEvaluation, num_samples: int) -> None:
        calls = dict(self._capture.open_calls)
        with torch.no_grad(), self._capture.paused():
            G_DD = output_moment(view, num_samples)
            found = recursion(G_DD, get_gradient_edge(view.output), calls, num_samples, self._options.max_floats,
                              self._capture.parameters)
            for call, of_output_DD in found.items():
                kind = call.kind
                if not isinstance(kind, (Affine, Convolution)) or getattr(kind, "groups", 1) > 1:
                    raise ConfigError(f"layer {call.layer} has no Kronecker factors for kfra; "
                                      "exclude it with layers=.")
                name = call.weight or call.bias
                assert name is not None
                self._accumulation.sums[name].B_OO["averages"].add_sum(factor_of(call, of_output_DD, self._options.sharing))

    def _residual_blocks(self, output: Tensor, df: Tensor, num_samples: int, chunk: int) -> Iterator[_Block]:
        quantity = next(name for name in self._asked if SIGNALS.get(name, ("",))[0] == "hessian")
        calls = self._capture.open_calls
        uses = Counter(name for call in calls for name in (call.weight, call.bias))
        often = [name for name, count in uses.items() if name and count > 1]
        if often:
            raise ConfigError(f"{quantity} of {often[0]} is not supported: the parameter is used "
                              "several times, and one use may depend on another; request "
                              "diag_ggn, or exclude its layers with layers=.")
        with self._capture.paused():
            found = residuals(get_gradient_edge(output), df, list(calls.values()), quantity)
        for source, r in found:
            for block, signs_VN in columns(r, num_samples, chunk):
                yield source, block, signs_VN
