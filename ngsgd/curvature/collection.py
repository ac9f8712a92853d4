"""Curvature quantities by parameter name, filled by a backward pass."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ngsgd.curvature import layers as of_layers
from ngsgd.curvature import losses
from ngsgd.curvature.capture import Capture
from ngsgd.curvature.forms.grad_forms import Inputs, joined, joined_inputs
from ngsgd.curvature.forms.kronecker import SHARINGS
from ngsgd.curvature.layer_decomposition import expansion_of
from ngsgd.curvature.quantities import (
    NORMALIZATIONS,
    PRODUCTS,
    QUANTITIES,
    SIGNALS,
    Accumulation,
    CollectOptions,
    PassResults,
    Quantities,
    finalize,
)
from ngsgd.curvature.samples import MAX_TRIES, tries_of
from ngsgd.curvature.second_order import SecondOrderBackward
from ngsgd.errors import ConfigError, DataError
from ngsgd.ops.tensors import without_autocast

# Defined by rows at layer outputs, even if per-sample gradients do not exist.
_OF_ROWS = {"kfac", "kflr", "kfac_emp"}


def _require_factors(model: nn.Module, layers: Mapping[str, nn.Module], quantity: str) -> None:
    """Reject layers without Kronecker factors, and list those that have them."""
    without = {}
    for name, module in layers.items():
        kind = of_layers.kind_of(module)
        has_factors = isinstance(kind, (of_layers.Affine, of_layers.Convolution)) and getattr(kind, "groups", 1) == 1
        if expansion_of(module) is None and not has_factors:
            without[name] = module
    if not without:
        return
    tied = {id(p) for module in without.values() for p in module.parameters()}
    known = [name for name, module in layers.items() if name not in without
             and not any(id(p) in tied for p in module.parameters())]
    listed = ", ".join(f"{name or 'the model'} ({type(module).__name__})" for name, module in without.items())
    remedy = f"pass layers={known!r}." if known else "the model has no such layer with an unshared weight."
    raise ConfigError(f"{quantity} is not defined for {listed}: Kronecker factors are those of "
                      "Linear, Conv1d, Conv2d and Conv3d without groups, and of the GEMMs of "
                      f"LSTM, GRU, RNN and MultiheadAttention; {remedy}")


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
        self._asked, self._options = asked, options
        self._checks_reduction = options.is_reduction_inferred
        if self._checks_reduction:
            # The first contexts of a model only: the function mode slows down the forward pass.
            tried = tries_of(model).setdefault("reduction", {})
            tried[options.reduction] = tried.get(options.reduction, 0) + 1
            self._checks_reduction = tried[options.reduction] <= MAX_TRIES
        self._of_signals = {SIGNALS.get(name, ("", ""))[0] for name in asked}
        self._is_second_order = self._of_signals != {"gradient"}
        if self._is_second_order \
                and (natural := [name for name, module in model.named_modules() if "preconditioner" in vars(module)]):
            raise ConfigError(f"layer {natural[0]} belongs to an NGSGD optimizer, whose Fisher "
                              "estimates would treat the vectors of second-order quantities as "
                              "minibatches; call detach() of the optimizer first, or collect on a "
                              "copy of the model.")
        # Factors use rows, which a BatchNorm in training mode provides like any other operation.
        separate = not (set(asked) <= _OF_ROWS and any(of_layers.normalizes_over_minibatch(module) for module in model.modules()))
        self._capture = Capture(model, arrived=self._arrived, called=self._noted, separate=separate,
                                gradients="gradient" in self._of_signals, **capture)
        for name, module in self._capture.layers.items():
            if of_layers.has_transposed_weight(module):
                raise ConfigError(f"layer {name} (Conv1D of Hugging Face) has a weight of inputs x "
                                  "outputs, whose quantities would be in another order. Replace "
                                  "it by an nn.Linear with the transposed weight, or exclude it "
                                  "by listing the others in layers=.")
        # Products rerun the pass, without captured rows.
        self._needs_rows = self._is_second_order and not self._of_signals <= {"", "gradient"}
        if factored := [name for name in asked if SIGNALS.get(name, ("", ""))[1] == "factors"]:
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
        self._by_node: weakref.WeakSet[of_layers.LayerCall] = weakref.WeakSet()
        # those among them whose derivative has arrived
        self._expected: set[of_layers.LayerCall] = set()
        self._mode = losses.LossCalls(self._watch) if self._is_second_order or self._checks_reduction else None

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

    def _noted(self, call: of_layers.LayerCall, output: Tensor) -> None:
        for name in (call.weight, call.bias):
            if name is not None:
                self._awaited[name] += 1
        self._accumulation.note(call)
        node = output.grad_fn
        # x W^T (+ b) of single rows, in sufficient precision
        if "moments" in self._of_gradient and node is not None and node.name() in ("AddmmBackward0", "MmBackward0") \
                and isinstance(call.kind, of_layers.Affine) and call.input.ndim == 2 \
                and call.input.dtype in (torch.float32, torch.float64):
            self._by_node.add(call)
            # Weak, because the graph outlives the call, whose input should be freed after use.
            seen = weakref.ref(call)
            node.register_hook(lambda grads, _: self._delivered(seen(), grads[-1]))

    def _arrived(self, call: of_layers.LayerCall, e_M: Tensor) -> None:
        """Process a derivative; a parameter is complete when all its uses have arrived."""
        if (number := torch._C._current_graph_task_id()) != self._pass:
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
            raise DataError(of_layers.disagreement(record.layer, record.num_samples, self._pass_samples))
        self._pass_samples = record.num_samples
        for parameter, share in (record.shares() if self._of_gradient else {}).items():
            self._uses[parameter].append(share)
        # Affine layers have one weight for complete input rows.
        if self._accumulation.has_factors and call.weight is not None \
                and hasattr(call.kind, "inputs") and getattr(call.kind, "groups", 1) == 1:
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

    def _delivered(self, call: of_layers.LayerCall | None, gradient_IO: Tensor | None) -> None:
        """Reuse the weight gradient that autograd has just computed."""
        if call is not None and call in self._expected and call.weight is not None and gradient_IO is not None \
                and not self._capture.is_paused:
            self._expected.remove(call)
            # A copy, because autograd adds later gradients to this memory.
            fresh = PassResults()
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
            self._accumulation.sums[name].take_inputs(joined_inputs(inputs), self._options.sharing)
        if uses:
            fresh = PassResults()
            self._accumulation.accumulate(name, "gradient", joined(uses), fresh, without_sum=without_sum)
            self._accumulation.keep("gradient", fresh)

    def _watch(self, loss: losses.LossCall, output: Tensor, value: Tensor) -> None:
        if not value.requires_grad or self._capture.is_paused:
            return
        if self._checks_reduction and loss.settings["reduction"] != self._options.reduction:
            raise ConfigError(f"the loss has reduction={loss.settings['reduction']!r}, and loss_fn has "
                              f"{self._options.reduction!r}: give collect() reduction=\"mean\" or "
                              "\"sum\" over samples.")
        if not self._is_second_order:
            return
        loss.require_fixed()
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
                    self._second_order.send(loss, outputs.pop(), upstream)
        value.register_hook(before_the_backward_pass)


def collect(model: nn.Module, *quantities: str, loss_fn: Any = None, reduction: str | None = None,
            layers: Iterable[str] | None = None, num_samples: int | None = None, samples: Sequence[int] | None = None,
            sharing: str = "expand", normalization: str = "paper", mc_samples: int = 1,
            generator: torch.Generator | None = None, max_floats: int = 1 << 25) -> Collection:
    """Context in which `loss.backward()` also computes curvature quantities, by parameter name.

    For a loss L = c sum_n l_n over N samples, g_n is the gradient of l_n. Samples are the leading
    dimension of the input of every layer. Several backward passes in one context (gradient
    accumulation) count as one over all their samples.

        batch_grad         N x p           c g_n
        batch_l2           N               |c g_n|^2
        sum_grad_squared   p               sum_n (c g_n)^2
        second_moment      p               1/N sum_n g_n^2
        variance           p               1/N sum_n g_n^2 - (1/N sum_n g_n)^2
        diag_ggn, diag_ggn_mc              p        diagonal of the GGN, exact and sampled
        batch_diag_ggn, batch_diag_ggn_mc  N x p    the same per sample
        sqrt_ggn, sqrt_ggn_mc              V x N x p  root: the GGN is the sum of outer products
        diag_h, batch_diag_h               p, N x p  diagonal of the Hessian
        kfac, kflr, kfac_emp, kfra         Kronecker(B, A): sampled, exact, empirical, by averages
        hmp, ggnmp, pchmp                  functions: products with the block (see `Products`)

    GGN: generalized Gauss-Newton matrix.

    `q["layer.weight"].variance` has the shape and dtype of the parameter, at least float32, and is
    on its device.

    Args:
        model: the module whose layers are called; under DistributedDataParallel the wrapper or the
            wrapped module.
        quantities: names from the list above.
        loss_fn: the loss that is called inside the context: nn.CrossEntropyLoss, nn.MSELoss,
            nn.BCEWithLogitsLoss or their functional forms. First-order quantities support any loss
            that is a sum or mean over samples.
        reduction: "mean" or "sum" over samples, if loss_fn does not determine it.
        layers: names of layers, or of modules that contain them; default: all with trainable
            parameters.
        num_samples: N, if the rows of a sample are adjacent in the leading dimension of some layer.
        samples: indices of samples; sums are over these only, at a fraction of the cost.
        sharing: treatment of positions in Kronecker factors: "expand" (a target for every frame),
            "reduce" (one target for all frames of a sample) or "backpack"; see
            `ngsgd.curvature.forms.kronecker`.
        normalization: of variance and second_moment: "paper" as above, "backpack" with c g_n
            instead of g_n.
        mc_samples: number of Monte Carlo samples of the sampled quantities. Default 1.
        generator: random generator of the samples; default: torch's.
        max_floats: maximum number of backpropagated floats at a time, and of the largest matrix of
            kfra.

    Raises:
        ConfigError: an unknown quantity, or one that is undefined or unsupported for a layer, an
            operation or the loss. It is raised immediately if possible, else from the forward or
            backward pass.
        DataError: shapes that do not separate samples, or inputs changed in place.

    Source: BackPACK, arXiv 1912.10985.

    Example:
        >>> import torch
        >>> from ngsgd.curvature import collect
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> with collect(model, "variance", "kfac", loss_fn=loss_fn) as q:
        ...     loss_fn(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
        >>> q["0.weight"].variance.shape, q["0.weight"].kfac.B_OO.shape
        (torch.Size([8, 4]), torch.Size([8, 8]))
    """
    problems = [f"there is no curvature quantity {name!r}; there are {', '.join(QUANTITIES)}." for name in quantities
                if name not in QUANTITIES]
    if not quantities:
        problems.append(f"collect() needs the names of quantities: {', '.join(QUANTITIES)}.")
    if sharing not in SHARINGS:
        problems.append(f"sharing is {sharing!r}; it must be one of {', '.join(SHARINGS)}.")
    if normalization not in NORMALIZATIONS:
        problems.append(f"normalization is {normalization!r}; it must be one of {', '.join(NORMALIZATIONS)}.")
    if reduction not in (None, "mean", "sum"):
        problems.append(f"reduction is {reduction!r}; it must be 'mean' or 'sum' over samples.")
    if num_samples is not None and num_samples < 1:
        problems.append(f"num_samples is {num_samples}; it must be at least 1.")
    if samples is not None and not len(samples):
        problems.append("samples is empty; name at least one.")
    if problems:
        raise ConfigError(problems)
    if mc_samples < 1:
        raise ConfigError(f"mc_samples is {mc_samples}; it must be at least 1.")
    if any(name in PRODUCTS or SIGNALS[name][0] != "gradient" for name in quantities):
        losses.check(loss_fn)
    moments = {"second_moment", "variance"} & set(quantities)
    needs_reduction = "kfac_emp" in quantities or (normalization == "paper" and bool(moments))
    is_inferred = needs_reduction and reduction is None
    reduction = reduction or losses.reduction_of(loss_fn)
    if reduction is None and needs_reduction:
        raise ConfigError("the variance, the second moment and the empirical K-FAC depend on whether the loss is a mean or a "
                          'sum over samples: give collect() loss_fn= or reduction="mean" or "sum".')
    options = CollectOptions(sharing, normalization, reduction, is_inferred, mc_samples, generator, max_floats)
    return Collection(model, quantities, loss_fn, options, {"layers": layers, "num_samples": num_samples, "samples": samples})
