"""`collect`: curvature quantities of every parameter while a loss is differentiated.

What is asked for is computed when the derivative of a layer's output arrives, and the derivative is dropped then; second-order
quantities send vectors of the loss's second derivative through the same graph, just before the ordinary backward pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ngsgd.curvature import losses
from ngsgd.curvature.capture import Call, Capture, Record
from ngsgd.curvature.hessian import columns, residuals
from ngsgd.curvature.kfra import factor_of, output_moment, recursion
from ngsgd.curvature.kronecker import SHARINGS, Kronecker, input_moment, output_factor
from ngsgd.curvature.layers import Affine, Convolution, without_autocast
from ngsgd.curvature.products import Pass, Products
from ngsgd.curvature.rows import Lookup, Mixed, Outer, Sum, Written, joined
from ngsgd.errors import ConfigError, DataError

_Block = tuple[Tensor | GradientEdge, Tensor, Tensor | None]   # where vectors are sent from, V x .., their signs V x N

Whole = Outer | Sum | Lookup | Mixed | Written

# what is backpropagated for a quantity, and what is made of it
SIGNALS = {
    "batch_grad": ("gradient", "individual"), "batch_l2": ("gradient", "norms"), "sum_grad_squared": ("gradient", "squares"),
    "second_moment": ("gradient", "squares"), "variance": ("gradient", "moments"), "kfac_emp": ("gradient", "factors"),
    "diag_ggn": ("exact", "squares"), "batch_diag_ggn": ("exact", "by_sample"), "sqrt_ggn": ("exact", "individual"),
    "kflr": ("exact", "factors"),
    "diag_ggn_mc": ("sampled", "squares"), "batch_diag_ggn_mc": ("sampled", "by_sample"), "sqrt_ggn_mc": ("sampled", "individual"),
    "kfac": ("sampled", "factors"),
    "kfra": ("averages", "factors"),
    "diag_h": ("hessian", "squares"), "batch_diag_h": ("hessian", "by_sample"),
}
PRODUCTS = ("hmp", "ggnmp", "pchmp")
QUANTITIES = (*SIGNALS, *PRODUCTS)
_SIGNAL_ORDER = ("sampled", "exact", "averages", "gradient")  # the first that wants input factors makes them for all
NORMALIZATIONS = ("paper", "backpack")


@dataclass(frozen=True)
class _Options:
    sharing: str
    normalization: str
    reduction: str | None
    mc_samples: int
    generator: torch.Generator | None
    max_floats: int


@dataclass
class _Sums:
    """What has been summed up for one parameter, by (signal, form)."""

    shape: torch.Size
    found: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    num_samples: int = 0


class _Fresh:
    """What one backward pass has found, by (parameter, form); it arrives in blocks of vectors."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, form: str, value: Tensor) -> None:
        key = name, form
        self.found[key] = self.found[key].add_(value) if key in self.found else value

    def append(self, name: str, form: str, value: Tensor) -> None:
        key = name, form
        self.found[key] = torch.cat([self.found[key], value]) if key in self.found else value


class Quantities:
    """The quantities of one parameter, as attributes: `q["fc.weight"].variance`."""

    def __init__(self, name: str, asked: Sequence[str], sums: _Sums, bias_of: _Sums | None, options: _Options,
                 passes: list[Pass]) -> None:
        self._name, self._asked, self._sums, self._weight, self._options = name, asked, sums, bias_of, options
        self._passes = passes

    def __getattr__(self, quantity: str) -> Any:
        if quantity.startswith("_"):
            raise AttributeError(quantity)
        if quantity not in self._asked:
            raise AttributeError(f"{quantity} of {self._name} was not asked for; collect(model, {quantity!r}, ..) gives it.")
        if quantity in PRODUCTS:
            return getattr(Products(self._name, self._passes), quantity)
        try:
            return _value(quantity, self._sums, self._weight, self._options)
        except KeyError:
            raise AttributeError(f"{quantity} of {self._name} is not there: no backward pass from the loss reached the layer inside of "
                                 "collect().") from None

    def __dir__(self) -> list[str]:
        return list(self._asked)


def _refuse_natural_gradient(model: nn.Module) -> None:
    natural = [name for name, module in model.named_modules() if "preconditioner" in vars(module)]
    if natural:
        raise ConfigError(f"layer {natural[0]} belongs to an NGSGD optimiser, whose Fisher estimates would take the vectors of second-order "
                          "quantities for minibatches; call the optimiser's detach() first, or collect on a copy of the model.")


def _is_plain_product(call: Call, node: Any) -> bool:
    """The layer's output is x W^T (+ b) of single rows, in a precision whose gradient is as good as ours."""
    return (node.name() in ("AddmmBackward0", "MmBackward0") and isinstance(call.kind, Affine) and call.input.ndim == 2
            and call.input.dtype in (torch.float32, torch.float64))


def _value(quantity: str, sums: _Sums, weight: _Sums | None, options: _Options) -> Any:
    signal, form = SIGNALS[quantity]
    shape = sums.shape
    if form == "factors":
        return _factors(signal, sums, weight, options)
    if quantity in ("second_moment", "variance"):
        return _moment(quantity, sums, options)
    x = sums.found[signal, form]
    if form == "squares":
        return x.view(shape)
    if form == "norms":
        return x[0]
    if form == "by_sample":
        return x.view(-1, *shape)
    return x[0].view(-1, *shape) if signal == "gradient" else x.view(*x.shape[:2], *shape)


def _moment(quantity: str, sums: _Sums, options: _Options) -> Tensor:
    """The paper: 1/N sum_n g_n^2, minus the square of 1/N sum_n g_n; BackPACK: the same of what is differentiated, g_n / N."""
    N = sums.num_samples
    # a mean over samples leaves g_n / N in the backward pass
    scale = N if options.reduction == "mean" and options.normalization == "paper" else 1
    second = sums.found["gradient", "squares"] * (scale**2 / N)
    if quantity == "second_moment":
        return second.view(sums.shape)
    mean = sums.found["gradient", "sum"] * (scale / N)
    return (second - mean.square_()).clamp_(min=0.0).view(sums.shape)  # rounding would leave negative variances


def _factors(signal: str, sums: _Sums, weight: _Sums | None, options: _Options) -> Kronecker:
    B = (sums if weight is None else weight).found[signal, "factors"]
    if signal == "gradient" and options.reduction == "mean":
        B = B * sums.num_samples  # e e^T of the empirical Fisher matrix, with one 1/N and not its square
    if weight is not None:
        return Kronecker(B, None)
    moment = sums.found.get(("", "inputs"))
    return Kronecker(B, None if moment is None else moment / sums.found["", "rows"])


class Collection(Mapping[str, Quantities]):
    """What `collect` gives: the quantities of each parameter, by the parameter's name."""

    def __init__(self, model: nn.Module, asked: tuple[str, ...], loss_fn: Any, options: _Options, capture: dict[str, Any]) -> None:
        self._asked, self._loss_fn, self._options = asked, loss_fn, options
        self._forms: dict[str, set[str]] = defaultdict(set)
        for quantity in (name for name in asked if name in SIGNALS):
            signal, form = SIGNALS[quantity]
            self._forms[signal].add(form)
        if "moments" in self._forms["gradient"]:
            self._forms["gradient"].add("squares")
        self._is_second_order = any(SIGNALS.get(name, ("", ""))[0] != "gradient" for name in asked)
        if self._is_second_order:
            _refuse_natural_gradient(model)
        self._capture = Capture(model, arrived=self._arrived, called=self._noted, **capture)
        self._sums = {name: _Sums(p.shape) for name, p in self._capture.parameters.items()}
        self._weight_of: dict[str, str] = {}   # of the bias
        self._weights: set[str] = set()
        self._awaited: Counter[str] = Counter()
        self._uses: dict[str, list[Any]] = defaultdict(list)
        self._pass = -1
        self._pass_samples = 0
        self._seen: set[str] = set()
        self._by_node: set[Call] = set()       # calls whose weight gradient autograd will hand over
        self._expected: set[Call] = set()      # those of them whose derivative has arrived
        self._begin: _Begin | None = None
        self._passes: list[Pass] = []
        self._handle: Any = None
        self._mode: _LossCalls | None = None

    def __enter__(self) -> Collection:
        self._capture.__enter__()
        if any(name in PRODUCTS for name in self._asked):
            self._begin = _Begin(self._capture.model)
        if self._is_second_order:
            if isinstance(self._loss_fn, nn.Module):
                self._handle = self._loss_fn.register_forward_hook(self._loss_hook, with_kwargs=True)
            else:
                self._mode = _LossCalls(self._watch)
                self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._capture.close()
        if self._begin is not None:
            self._begin.close()
        if self._handle is not None:
            self._handle.remove()
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
        if error is None:
            with torch.no_grad():
                self._finish_pass()
        self._uses.clear()

    def __getitem__(self, name: str) -> Quantities:
        if name not in self._seen:
            if name in self._sums:
                raise KeyError(f"no curvature of {name}: its layer was not called, or no backward pass reached it, inside of collect()")
            raise KeyError(f"the model has no trainable parameter {name}; there are {', '.join(self._sums)}")
        weight = self._weight_of.get(name)
        return Quantities(name, self._asked, self._sums[name], None if weight is None else self._sums[weight], self._options,
                          self._passes)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._sums if name in self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    # the ordinary backward pass

    def _noted(self, call: Call, output: Tensor) -> None:
        for name in (call.weight, call.bias):
            if name is not None:
                self._awaited[name] += 1
        if call.weight is not None:
            self._weights.add(call.weight)
        if call.weight is not None and call.bias is not None:
            self._weight_of[call.bias] = call.weight
        node = output.grad_fn
        if "moments" in self._forms["gradient"] and node is not None and _is_plain_product(call, node):
            self._by_node.add(call)
            node.register_hook(lambda grads, _: self._delivered(call, grads[-1]))

    def _arrived(self, call: Call, e_M: Tensor) -> None:
        """Takes a derivative in; a parameter is done when all its uses in this pass are there."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._finish_pass()
            self._pass, self._pass_samples = number, 0
        record = self._capture.record(call, e_M[None])
        self._agree(record)
        for name, share in (record.shares() if self._forms["gradient"] else {}).items():
            self._uses[name].append(share)
        for name in (call.weight, call.bias):
            if name is not None:
                self._awaited[name] -= 1
                if not self._awaited[name]:
                    if name == call.weight and call in self._by_node and len(self._uses[name]) == 1:
                        self._expected.add(call)
                    self._finish(name, without_sum=call in self._expected and name == call.weight)
        self._by_node.discard(call)

    def _delivered(self, call: Call, gradient_IO: Tensor | None) -> None:
        """Autograd has just multiplied the gradient of a weight out: no need to do it again."""
        if call in self._expected and call.weight is not None and gradient_IO is not None:
            self._expected.remove(call)
            fresh = _Fresh()
            # a copy: autograd adds later gradients to this memory
            fresh.add(call.weight, "sum", gradient_IO.detach().T.reshape(-1).clone())
            self._keep("gradient", fresh)

    def _agree(self, record: Record) -> None:
        if self._pass_samples not in (0, record.num_samples):
            raise DataError(f"layer {record.layer} saw {record.num_samples} samples where the layers after it saw {self._pass_samples}; say "
                            "num_samples=, with the rows of each sample adjacent.")
        self._pass_samples = record.num_samples

    def _finish_pass(self) -> None:
        for name in list(self._uses):
            self._finish(name)

    def _finish(self, name: str, *, without_sum: bool = False) -> None:
        uses = self._uses.pop(name, None)
        sums = self._sums[name]
        self._seen.add(name)
        sums.num_samples += self._pass_samples
        if uses:
            fresh = _Fresh()
            self._take(name, "gradient", joined(uses), fresh, without_sum=without_sum)
            self._keep("gradient", fresh)

    # any signal

    def _take(self, name: str, signal: str, share: Whole, fresh: _Fresh, *, without_sum: bool = False,
              signs_VN: Tensor | None = None) -> None:
        """Adds what one block of vectors says of a parameter."""
        forms = self._forms[signal]
        if "factors" in forms:
            self._take_factors(name, signal, share, fresh)
        if "individual" in forms:
            g_VNP = share.individual(0, share.num_samples)
            fresh.append(name, "individual", g_VNP)
            share = share if isinstance(share, Outer) and share.is_rank_one else Written(g_VNP)
        if "norms" in forms:
            fresh.append(name, "norms", share.squared_norms())
        if "by_sample" in forms:
            fresh.add(name, "by_sample", share.squares_by_sample(signs_VN))
        if "moments" in forms and not without_sum:
            total, squares = share.moments()
            fresh.add(name, "sum", total)
            fresh.add(name, "squares", squares)
        elif "squares" in forms:
            fresh.add(name, "squares", share.sum_of_squares(signs_VN))

    def _take_factors(self, name: str, signal: str, share: Whole, fresh: _Fresh) -> None:
        if isinstance(share, Sum) and name in self._weight_of:
            return  # the weight's
        if (isinstance(share, Sum) and name not in self._weights) or (isinstance(share, Outer) and share.groups == 1):
            fresh.add(name, "factors", output_factor(share.e_VNTO, self._options.sharing))
        else:
            raise ConfigError(f"parameter {name} has no Kronecker factors: they are defined for Linear, Conv1d, Conv2d and Conv3d without "
                              "groups and for the products of recurrent and attention layers; leave its layer out by layers=.")
        if isinstance(share, Outer) and signal == self._first_with_factors() and (name, "rows") not in fresh.found:
            moment, num_rows = input_moment(share.inputs, self._options.sharing)
            fresh.add(name, "inputs", moment)
            fresh.add(name, "rows", moment.new_tensor(float(num_rows)))

    def _keep(self, signal: str, fresh: _Fresh) -> None:
        """What a whole backward pass found joins what others did: samples end to end, sums added."""
        for (name, form), value in fresh.found.items():
            found, key = self._sums[name].found, (signal if form not in ("inputs", "rows") else "", form)
            if key not in found:
                found[key] = value
            elif form in ("individual", "norms"):
                found[key] = torch.cat([found[key], value], dim=1)
            elif form == "by_sample":
                found[key] = torch.cat([found[key], value])
            else:
                found[key] = found[key] + value

    # second-order signals

    def _loss_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> None:
        output, target = (*args, *(kwargs[key] for key in ("input", "target") if key in kwargs))
        self._watch({**vars(module), **module._buffers}, type(module), output, target, value, lambda f: module.forward(f, target))

    def _watch(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, value: Tensor,
               again: Callable[[Tensor], Tensor]) -> None:
        if not value.requires_grad or self._capture.is_paused:
            return
        value.register_hook(lambda upstream: self._second_order(settings, kind, output, target, upstream, again))

    def _second_order(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, upstream: Tensor,
                      again: Callable[[Tensor], Tensor]) -> None:
        if self._capture.is_paused or not self._capture.open_calls:
            return
        with without_autocast(output.device.type):
            self._send_all(settings, kind, output, target, upstream, again)

    def _send_all(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, upstream: Tensor,
                  again: Callable[[Tensor], Tensor]) -> None:
        kind = next(known for known in losses.CLASSES if issubclass(kind, known))
        view = losses.evaluation(settings, kind, output, target, upstream)
        options = self._options
        if self._begin is not None:
            self._passes.append(self._begin.taken(output, again, lambda f: losses.evaluation(settings, kind, f, target, upstream), upstream))
        if self._forms["sampled"]:
            draws = view.sampled(options.mc_samples, options.generator)
            self._send("sampled", [(view.output, draws, None)])
        calls = self._capture.open_calls
        N = self._capture.num_samples_of(next(iter(calls)))
        chunk = max(1, options.max_floats // sum(call.output_shape.numel() for call in calls))
        exact = [(view.output, block, None) for block in view.columns(N, chunk)] if self._forms["exact"] or self._forms["hessian"] else []
        if self._forms["exact"]:
            self._send("exact", exact)
        if self._forms["hessian"]:
            self._send("hessian", itertools.chain(exact, self._residual_blocks(view.output, self._derivative(output, upstream, again), N, chunk)))

        if self._forms["averages"]:
            self._send_averages(view, N)

    def _send_averages(self, view: losses.Evaluation, num_samples: int) -> None:
        fresh, sharing, calls = _Fresh(), self._options.sharing, dict(self._capture.open_calls)
        with torch.no_grad(), self._capture.paused():
            G_DD = output_moment(view.columns(num_samples, 64), num_samples)
            found = recursion(G_DD, get_gradient_edge(view.output), calls, num_samples, self._options.max_floats)
            for call, of_output_DD in found.items():
                kind = call.kind
                if not isinstance(kind, (Affine, Convolution)) or getattr(kind, "groups", 1) > 1:
                    raise ConfigError(f"layer {call.layer} has no Kronecker factors for kfra; leave it out by layers=.")
                name = call.weight or call.bias
                assert name is not None
                fresh.add(name, "factors", factor_of(call, of_output_DD, sharing))
                if call.weight is not None and self._first_with_factors() == "averages":
                    moment, num_rows = input_moment(self._capture.record(call, of_output_DD.new_zeros(1, len(call.input))).inputs(), sharing)
                    fresh.add(name, "inputs", moment)
                    fresh.add(name, "rows", moment.new_tensor(float(num_rows)))
            self._keep("averages", fresh)

    def _first_with_factors(self) -> str:
        return next(signal for signal in _SIGNAL_ORDER if "factors" in self._forms[signal])

    def _derivative(self, output: Tensor, upstream: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the loss with respect to the network's output."""
        with torch.enable_grad(), self._capture.paused():
            f = output.detach().requires_grad_()
            (df,) = torch.autograd.grad(again(f), f, upstream)
        return df

    def _residual_blocks(self, output: Tensor, df: Tensor, num_samples: int, chunk: int) -> Iterator[_Block]:
        quantity = next(name for name in self._asked if SIGNALS[name][0] == "hessian")
        calls = self._capture.open_calls
        often = [name for name, count in Counter(name for call in calls for name in (call.weight, call.bias)).items() if name and count > 1]
        if often:
            raise ConfigError(f"{quantity} of {often[0]} is not known: the parameter is used several times, and one use may depend on "
                              "another; ask for diag_ggn, or leave its layers out by layers=.")
        with self._capture.paused():
            found = residuals(get_gradient_edge(output), df, list(calls.values()), quantity)
        for source, r in found:
            for block, signs_VN in columns(r, num_samples, chunk):
                yield source, block, signs_VN

    def _send(self, signal: str, blocks: Iterable[_Block]) -> None:
        """Vectors through the network's Jacobian; every parameter takes what arrives."""
        fresh = _Fresh()
        with torch.no_grad():
            for source, vectors_V, signs_VN in blocks:
                uses: dict[str, list[Any]] = defaultdict(list)
                for call, e_VM in self._capture.sweep(source, vectors_V):
                    for name, share in self._capture.record(call, e_VM).shares().items():
                        uses[name].append(share)
                for name, shares in uses.items():
                    self._take(name, signal, joined(shares), fresh, signs_VN=signs_VN)
            self._keep(signal, fresh)


class _Begin:
    """Notes how the model was called last, for passes that run again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: tuple[Any, ...] | None = None
        self._output: Callable[[], Any] = lambda: None
        self._handles = [model.register_forward_pre_hook(self._before, with_kwargs=True), model.register_forward_hook(self._after)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = args, kwargs, torch.get_rng_state()

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._output = weakref.ref(output) if isinstance(output, Tensor) else lambda: None

    def taken(self, output: Tensor, loss: Callable[[Tensor], Tensor], evaluation: Callable[[Tensor], losses.Evaluation],
              upstream: Tensor) -> Pass:
        """The pass that led to this output."""
        if self._call is None or self._output() is not output:
            raise ConfigError("products with curvature blocks need a loss of the model's own output, from its last call before the backward "
                              "pass; put what lies between them into the model.")
        args, kwargs, state = self._call
        versions = tuple(p._version for p in self._model.parameters())
        return Pass(self._model, args, kwargs, state, versions, loss, evaluation, upstream.detach())


class _LossCalls(TorchFunctionMode):
    """Sees the calls of torch's loss functions while it is active."""

    def __init__(self, watch: Callable[..., None]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        kind = losses.FUNCTIONS.get(func)
        if kind is not None:
            output, target, settings = losses.arguments(func, args, kwargs)
            self._watch(settings, kind, output, target, value, lambda f: func(f, target, **settings))
        return value


def collect(model: nn.Module, *quantities: str, loss_fn: Any = None, reduction: str | None = None,
            layers: Iterable[str] | None = None, num_samples: int | None = None, samples: Sequence[int] | None = None,
            sharing: str = "expand", normalization: str = "paper", mc_samples: int = 1,
            generator: torch.Generator | None = None, max_floats: int = 1 << 25) -> Collection:
    """A context in which `loss.backward()` also computes curvature quantities: a mapping from parameter names."""
    problems = [f"there is no curvature quantity {name!r}; there are {', '.join(QUANTITIES)}." for name in quantities
                if name not in QUANTITIES]
    if not quantities:
        problems.append(f"collect() needs the names of quantities: {', '.join(QUANTITIES)}.")
    if sharing not in SHARINGS:
        problems.append(f"sharing is {sharing!r}; it must be one of {', '.join(SHARINGS)}.")
    if normalization not in NORMALIZATIONS:
        problems.append(f"normalization is {normalization!r}; it must be one of {', '.join(NORMALIZATIONS)}.")
    if problems:
        raise ConfigError(problems)
    if any(name in PRODUCTS or SIGNALS[name][0] != "gradient" for name in quantities):
        losses.check(loss_fn)
    reduction = reduction or losses.reduction_of(loss_fn)
    if reduction is None and normalization == "paper" and {"second_moment", "variance", "kfac_emp"} & set(quantities):
        raise ConfigError("the variance, the second moment and the empirical K-FAC depend on whether the loss is a mean or a sum over "
                          'samples: give collect() loss_fn= or reduction="mean" or "sum".')
    options = _Options(sharing, normalization, reduction, mc_samples, generator, max_floats)
    return Collection(model, quantities, loss_fn, options, {"layers": layers, "num_samples": num_samples, "samples": samples})
