"""Mapping of curvature quantities by parameter name that is filled by a backward pass.

Requested quantities are computed when the derivative of a layer's output arrives; input and
derivative are then freed. Inputs that are far smaller than their product wait for the end.
Second-order quantities propagate vectors of the loss Hessian through the same graph, just before
the ordinary backward pass.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.accumulation import Accumulation
from ngsgd.curvature.capture import Capture, LayerCall
from ngsgd.curvature.forms.grad_forms import joined
from ngsgd.curvature.forms.layer_inputs import Inputs, joined_inputs
from ngsgd.curvature.layer_decomposition import expansion_of
from ngsgd.curvature.layers import (
    Affine,
    Convolution,
    has_transposed_weight,
    kind_of,
    normalizes_over_minibatch,
    without_autocast,
)
from ngsgd.curvature.loss_interception import LossCalls
from ngsgd.curvature.quantities import SIGNALS, CollectOptions, PassResults, Quantities, finalize
from ngsgd.curvature.records import disagreement
from ngsgd.curvature.samples import MAX_TRIES, tries_of
from ngsgd.curvature.second_order.backward import SecondOrderBackward
from ngsgd.errors import ConfigError, DataError

# Defined by rows at layer outputs, even if per-sample gradients do not exist.
_OF_ROWS = {"kfac", "kflr", "kfac_emp"}


def _require_factors(model: nn.Module, layers: Mapping[str, nn.Module], quantity: str) -> None:
    """Reject layers without Kronecker factors, and list those that have them."""
    without = {name: module for name, module in model.named_modules() if name in layers and not _has_factors(module)}
    if not without:
        return
    tied = {id(p) for module in without.values() for p in module.parameters()}
    known = [name for name, module in model.named_modules() if name in layers and name not in without
             and not any(id(p) in tied for p in module.parameters())]
    listed = ", ".join(f"{name or 'the model'} ({type(module).__name__})" for name, module in without.items())
    remedy = f"pass layers={known!r}." if known else "the model has no such layer with an unshared weight."
    raise ConfigError(f"{quantity} is not defined for {listed}: Kronecker factors are those of "
                      "Linear, Conv1d, Conv2d and Conv3d without groups, and of the GEMMs of "
                      f"LSTM, GRU, RNN and MultiheadAttention; {remedy}")


def _has_factors(module: nn.Module) -> bool:
    kind = kind_of(module)
    return expansion_of(module) is not None or (isinstance(kind, (Affine, Convolution)) and getattr(kind, "groups", 1) == 1)


def _is_early(model: nn.Module, reduction: str | None) -> bool:
    """Count a context of a model; return whether it is one of the first, which are checked.

    The check needs a function mode, which slows down the forward pass.
    """
    tried = tries_of(model).setdefault("reduction", {})
    tried[reduction] = tried.get(reduction, 0) + 1
    return tried[reduction] <= MAX_TRIES


class Collection(Mapping[str, Quantities]):
    """Result of `collect`: the quantities of each parameter, by parameter name.

    Example:
        >>> import torch
        >>> from ngsgd.curvature import collect
        >>> model = torch.nn.Linear(4, 3)
        >>> with collect(model, "batch_l2", loss_fn=torch.nn.MSELoss()) as q:
        ...     torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 3)).backward()
        >>> sorted(q), q["bias"].batch_l2.shape
        (['bias', 'weight'], torch.Size([8]))
    """

    def __init__(self, model: nn.Module, asked: tuple[str, ...], loss_fn: Any,
                 options: CollectOptions, capture: dict[str, Any]) -> None:
        self._asked, self._loss_fn, self._options = asked, loss_fn, options
        self._checks_reduction = options.is_reduction_inferred and _is_early(model, options.reduction)
        self._of_signals = {SIGNALS.get(name, ("", ""))[0] for name in asked}
        self._is_second_order = self._of_signals != {"gradient"}
        if self._is_second_order \
                and (natural := [name for name, module in model.named_modules() if "preconditioner" in vars(module)]):
            raise ConfigError(f"layer {natural[0]} belongs to an NGSGD optimizer, whose Fisher "
                              "estimates would treat the vectors of second-order quantities as "
                              "minibatches; call detach() of the optimizer first, or collect on a "
                              "copy of the model.")
        # Factors use rows, which a BatchNorm in training mode provides like any other operation.
        separate = not (set(asked) <= _OF_ROWS
                        and any(normalizes_over_minibatch(module) for module in model.modules()))
        self._capture = Capture(model, arrived=self._arrived, called=self._noted, separate=separate,
                                gradients="gradient" in self._of_signals, **capture)
        for name, module in self._capture.layers.items():
            if has_transposed_weight(module):
                raise ConfigError(f"layer {name} (Conv1D of Hugging Face) has a weight of inputs x "
                                  "outputs, whose quantities would be in another order. Replace "
                                  "it by an nn.Linear with the transposed weight, or exclude it "
                                  "by listing the others in layers=.")
        # Products rerun the pass, without captured rows.
        self._needs_rows = self._is_second_order and not self._of_signals <= {"", "gradient"}
        factored = [name for name in asked if SIGNALS.get(name, ("", ""))[1] == "factors"]
        if factored:
            _require_factors(model, self._capture.layers, factored[0])
        self._accumulation = Accumulation(asked, self._capture.parameters, options)
        self._second_order = SecondOrderBackward(self._capture, self._accumulation, asked, options)
        self._of_gradient = self._accumulation.forms["gradient"]
        self._awaited: Counter[str] = Counter()
        self._uses: dict[str, list[Any]] = defaultdict(list)
        self._inputs: dict[str, list[Inputs]] = defaultdict(list)
        # parameters of which some uses have arrived in this pass
        self._pending: set[str] = set()
        self._pass = -1
        self._pass_samples = 0
        self._pass_forward = -1
        self._seen: set[str] = set()
        # calls whose weight gradient autograd will provide
        self._by_node: weakref.WeakSet[LayerCall] = weakref.WeakSet()
        # those among them whose derivative has arrived
        self._expected: set[LayerCall] = set()
        self._mode = LossCalls(self._watch) if self._is_second_order or self._checks_reduction else None

    def __enter__(self) -> Collection:
        self._capture.__enter__()
        self._second_order.open()
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._capture.close()
        self._capture.forget_listeners()
        self._second_order.close()
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self._mode.forget()
            self._mode = None
        if error is None:
            with torch.no_grad():
                self._finish_pass()
                for sums in self._accumulation.sums.values():
                    finalize(sums, self._asked, self._options)
        self._uses.clear()
        self._inputs.clear()

    def __getitem__(self, name: str) -> Quantities:
        sums = self._accumulation.sums
        if name not in self._seen:
            if name in sums:
                raise KeyError(f"no curvature of {name}: inside collect() its layer was not "
                               "called, or no backward pass reached it")
            raise KeyError(f"the model has no trainable parameter {name}; there are {', '.join(sums)}")
        weight = self._accumulation.weight_of.get(name)
        return Quantities(name, self._asked, sums[name], None if weight is None else sums[weight], self._options,
                          self._second_order.passes)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._accumulation.sums if name in self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    # the ordinary backward pass

    def _noted(self, call: LayerCall, output: Tensor) -> None:
        for name in (call.weight, call.bias):
            if name is not None:
                self._awaited[name] += 1
        self._accumulation.note(call)
        node = output.grad_fn
        # x W^T (+ b) of single rows, in sufficient precision
        if "moments" in self._of_gradient and node is not None and node.name() in ("AddmmBackward0", "MmBackward0") \
                and isinstance(call.kind, Affine) and call.input.ndim == 2 and call.input.dtype in (torch.float32, torch.float64):
            self._by_node.add(call)
            # A weak reference, because the graph outlives the call, whose input should be freed
            # after use.
            seen = weakref.ref(call)
            node.register_hook(lambda grads, _: self._delivered(seen(), grads[-1]))

    def _arrived(self, call: LayerCall, e_M: Tensor) -> None:
        """Process a derivative.

        A parameter is complete when all its uses in this pass have arrived.
        """
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._finish_pass()
            self._pass, self._pass_samples, self._pass_forward = number, 0, call.forward
        if call.forward != self._pass_forward:
            raise ConfigError("one backward pass went through two calls of the model, whose "
                              "samples may not correspond: call backward() for the loss of each "
                              "call, or join both minibatches. If the loss compares the outputs of "
                              "both, collect on a module whose forward() makes both calls.")
        if self._is_second_order and self._mode is not None:
            self._mode.require_known()
        record = self._capture.record(call, e_M[None])
        if self._pass_samples not in (0, record.num_samples):
            raise DataError(disagreement(record.layer, record.num_samples, self._pass_samples))
        self._pass_samples = record.num_samples
        for parameter, share in (record.shares() if self._of_gradient else {}).items():
            self._uses[parameter].append(share)
        if self._accumulation.has_factors and call.weight is not None and record.has_input_rows:
            self._inputs[call.weight].append(record.inputs())
        for name in (call.weight, call.bias):
            if name is not None:
                self._awaited[name] -= 1
                self._pending.add(name)
                if not self._awaited[name]:
                    if name == call.weight and call in self._by_node and len(self._uses[name]) == 1:
                        self._expected.add(call)
                    self._finish(name, without_sum=call in self._expected and name == call.weight)
        self._by_node.discard(call)

    def _delivered(self, call: LayerCall | None, gradient_IO: Tensor | None) -> None:
        """Reuse the weight gradient that autograd has just computed."""
        if call is not None and call in self._expected and call.weight is not None and gradient_IO is not None \
                and not self._capture.is_paused:
            self._expected.remove(call)
            fresh = PassResults()
            # A copy, because autograd adds later gradients to this memory.
            fresh.add(call.weight, "sum", gradient_IO.detach().T.reshape(-1).clone())
            self._accumulation.keep("gradient", fresh)

    def _finish_pass(self) -> None:
        for name in sorted(self._pending):
            self._finish(name)

    def _finish(self, name: str, *, without_sum: bool = False) -> None:
        uses, inputs = self._uses.pop(name, None), self._inputs.pop(name, None)
        self._seen.add(name)
        self._pending.discard(name)
        self._accumulation.sums[name].num_samples += self._pass_samples
        if inputs:
            self._accumulation.take_inputs(name, joined_inputs(inputs))
        if uses:
            fresh = PassResults()
            self._accumulation.accumulate(name, "gradient", joined(uses), fresh,
                                          without_sum=without_sum)
            self._accumulation.keep("gradient", fresh)

    # the loss

    def _watch(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, value: Tensor,
               again: Callable[[Tensor], Tensor]) -> None:
        if not value.requires_grad or self._capture.is_paused:
            return
        if self._checks_reduction and settings["reduction"] != self._options.reduction:
            raise ConfigError(f"the loss has reduction={settings['reduction']!r}, and loss_fn has "
                              f"{self._options.reduction!r}: give collect() reduction=\"mean\" or "
                              "\"sum\" over samples.")
        if not self._is_second_order:
            return
        losses.require_fixed(target, settings)
        mode = self._mode
        assert mode is not None
        number = mode.add(value)
        # Freed after use, because the hook lives as long as the graph.
        outputs = [output]

        def before_the_backward_pass(upstream: Tensor) -> None:
            if not self._capture.is_paused and self._capture.open_calls and outputs:
                mode.require_term(number, self._capture.open_calls.values())
                if outputs[0].requires_grad and self._needs_rows:
                    self._capture.check_output(get_gradient_edge(outputs[0]), outputs[0])
                with without_autocast(upstream.device.type):
                    self._second_order.send(settings, kind, outputs.pop(), target, upstream, again)

        value.register_hook(before_the_backward_pass)
