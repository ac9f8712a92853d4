"""`collect`: curvature quantities of every parameter while a loss is differentiated.

What is asked for is computed when the derivative of a layer's output arrives, and the derivative is dropped then; second-order
quantities send vectors of the loss's second derivative through the same graph, just before the ordinary backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ngsgd.curvature import losses
from ngsgd.curvature.capture import Call, Capture, Record
from ngsgd.curvature.hessian import columns, residuals
from ngsgd.curvature.kfra import factor_of, output_moment, recursion
from ngsgd.curvature.kronecker import SHARINGS, input_moment, output_rows
from ngsgd.curvature.layers import Affine, Convolution, without_autocast
from ngsgd.curvature.products import Pass
from ngsgd.curvature.quantities import NORMALIZATIONS, PRODUCTS, QUANTITIES, SIGNAL_ORDER, SIGNALS, Fresh, Options, Quantities, Sums
from ngsgd.curvature.rows import Lookup, Mixed, Outer, Sum, Written, joined
from ngsgd.curvature.watching import LossCalls, ModelCalls
from ngsgd.errors import ConfigError, DataError

_Block = tuple[Tensor | GradientEdge, Tensor, Tensor | None]   # where vectors are sent from, V x .., their signs V x N
_CACHE = 1 << 20   # floats: four megabytes
Whole = Outer | Sum | Lookup | Mixed | Written


def _refuse_natural_gradient(model: nn.Module) -> None:
    natural = [name for name, module in model.named_modules() if "preconditioner" in vars(module)]
    if natural:
        raise ConfigError(f"layer {natural[0]} belongs to an NGSGD optimiser, whose Fisher estimates would take the vectors "
                          "of second-order "
                          "quantities for minibatches; call the optimiser's detach() first, or collect on a copy of the model.")


def _is_plain_product(call: Call, node: Any) -> bool:
    """The layer's output is x W^T (+ b) of single rows, in a precision whose gradient is as good as ours."""
    return (node.name() in ("AddmmBackward0", "MmBackward0") and isinstance(call.kind, Affine) and call.input.ndim == 2
            and call.input.dtype in (torch.float32, torch.float64))


class Collection(Mapping[str, Quantities]):
    """What `collect` gives: the quantities of each parameter, by the parameter's name."""

    def __init__(self, model: nn.Module, asked: tuple[str, ...], loss_fn: Any, options: Options, capture: dict[str, Any]) -> None:
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
        self._sums = {name: Sums(p.shape) for name, p in self._capture.parameters.items()}
        self._weight_of: dict[str, str] = {}   # of the bias
        self._weights: set[str] = set()
        self._awaited: Counter[str] = Counter()
        self._uses: dict[str, list[Any]] = defaultdict(list)
        self._pass = -1
        self._pass_samples = 0
        self._seen: set[str] = set()
        self._by_node: set[Call] = set()       # calls whose weight gradient autograd will hand over
        self._expected: set[Call] = set()      # those of them whose derivative has arrived
        self._begin: ModelCalls | None = None
        self._passes: list[Pass] = []
        self._handle: Any = None
        self._mode: LossCalls | None = None

    def __enter__(self) -> Collection:
        self._capture.__enter__()
        if any(name in PRODUCTS for name in self._asked):
            self._begin = ModelCalls(self._capture.model)
        if self._is_second_order:
            if isinstance(self._loss_fn, nn.Module):
                self._handle = self._loss_fn.register_forward_hook(self._loss_hook, with_kwargs=True)
            else:
                self._mode = LossCalls(self._watch)
                self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._capture.close()
        if self._begin is not None:
            self._begin.close()
        if self._handle is not None:
            self._handle.remove()
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None:
            with torch.no_grad():
                self._finish_pass()
        self._uses.clear()

    def __getitem__(self, name: str) -> Quantities:
        if name not in self._seen:
            if name in self._sums:
                raise KeyError(f"no curvature of {name}: its layer was not called, or no backward pass reached it, inside of "
                               "collect()")
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
        for parameter, share in (record.shares() if self._forms["gradient"] else {}).items():
            self._uses[parameter].append(share)
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
            fresh = Fresh()
            # a copy: autograd adds later gradients to this memory
            fresh.add(call.weight, "sum", gradient_IO.detach().T.reshape(-1).clone())
            self._keep("gradient", fresh)

    def _agree(self, record: Record) -> None:
        if self._pass_samples not in (0, record.num_samples):
            raise DataError(f"layer {record.layer} saw {record.num_samples} samples where the layers after it saw "
                            f"{self._pass_samples}; say "
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
            fresh = Fresh()
            self._take(name, "gradient", joined(uses), fresh, without_sum=without_sum)
            self._keep("gradient", fresh)

    # any signal

    def _take(self, name: str, signal: str, share: Whole, fresh: Fresh, *, without_sum: bool = False,
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

    def _take_factors(self, name: str, signal: str, share: Whole, fresh: Fresh) -> None:
        if isinstance(share, Sum) and name in self._weight_of:
            return  # the weight's
        if (isinstance(share, Sum) and name not in self._weights) or (isinstance(share, Outer) and share.groups == 1):
            fresh.grams[name, "factors"].add(output_rows(share.e_VNTO, self._options.sharing))
        else:
            raise ConfigError(f"parameter {name} has no Kronecker factors: they are defined for Linear, Conv1d, Conv2d and "
                              "Conv3d without "
                              "groups and for the products of recurrent and attention layers; leave its layer out by layers=.")
        if isinstance(share, Outer) and signal == self._first_with_factors() and (name, "rows") not in fresh.found:
            moment, num_rows = input_moment(share.inputs, self._options.sharing)
            fresh.add(name, "inputs", moment)
            fresh.add(name, "rows", moment.new_tensor(float(num_rows)))

    def _keep(self, signal: str, fresh: Fresh) -> None:
        """What a whole backward pass found joins what others did: samples end to end, sums added."""
        for (name, form), value in fresh.all().items():
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
            evaluation = functools.partial(losses.evaluation, settings, kind, target=target, upstream=upstream)
            self._passes.append(self._begin.taken(output, again, evaluation, upstream))
        if self._forms["sampled"]:
            draws = view.sampled(options.mc_samples, options.generator)
            self._send("sampled", [(view.output, draws, None)])
        calls = self._capture.open_calls
        N = self._capture.num_samples_of(next(iter(calls)))
        size = sum(call.output_shape.numel() for call in calls)
        chunk = max(1, options.max_floats // size)
        if self._forms["exact"]:
            # factors are sums over vectors, so nothing is gained by holding more of them than stay in the cache
            held = max(1, min(chunk, _CACHE // size)) if self._forms["exact"] == {"factors"} else chunk
            self._send("exact", ((view.output, block, None) for block in view.columns(N, held)))
        if self._forms["hessian"]:
            roots = ((view.output, block, None) for block in view.columns(N, chunk))
            df = self._derivative(output, upstream, again)
            self._send("hessian", itertools.chain(roots, self._residual_blocks(output, df, N, chunk)))

        if self._forms["averages"]:
            self._send_averages(view, N)

    def _send_averages(self, view: losses.Evaluation, num_samples: int) -> None:
        fresh, sharing, calls = Fresh(), self._options.sharing, dict(self._capture.open_calls)
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
                    record = self._capture.record(call, of_output_DD.new_zeros(1, len(call.input)))
                    moment, num_rows = input_moment(record.inputs(), sharing)
                    fresh.add(name, "inputs", moment)
                    fresh.add(name, "rows", moment.new_tensor(float(num_rows)))
            self._keep("averages", fresh)

    def _first_with_factors(self) -> str:
        return next(signal for signal in SIGNAL_ORDER if "factors" in self._forms[signal])

    def _derivative(self, output: Tensor, upstream: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the loss with respect to the network's output."""
        with torch.enable_grad(), self._capture.paused():
            f = output.detach().requires_grad_()
            (df,) = torch.autograd.grad(again(f), f, upstream)
        return df

    def _residual_blocks(self, output: Tensor, df: Tensor, num_samples: int, chunk: int) -> Iterator[_Block]:
        quantity = next(name for name in self._asked if SIGNALS.get(name, ("",))[0] == "hessian")
        calls = self._capture.open_calls
        uses = Counter(name for call in calls for name in (call.weight, call.bias))
        often = [name for name, count in uses.items() if name and count > 1]
        if often:
            raise ConfigError(f"{quantity} of {often[0]} is not known: the parameter is used several times, and one use may "
                              "depend on "
                              "another; ask for diag_ggn, or leave its layers out by layers=.")
        with self._capture.paused():
            found = residuals(get_gradient_edge(output), df, list(calls.values()), quantity)
        for source, r in found:
            for block, signs_VN in columns(r, num_samples, chunk):
                yield source, block, signs_VN

    def _send(self, signal: str, blocks: Iterable[_Block]) -> None:
        """Vectors through the network's Jacobian; every parameter takes what arrives."""
        fresh = Fresh()
        with torch.no_grad():
            for source, vectors_V, signs_VN in blocks:
                uses: dict[str, list[Any]] = defaultdict(list)
                for call, e_VM in self._capture.sweep(source, vectors_V):
                    for name, share in self._capture.record(call, e_VM).shares().items():
                        uses[name].append(share)
                for name, shares in uses.items():
                    self._take(name, signal, joined(shares), fresh, signs_VN=signs_VN)
            self._keep(signal, fresh)


def collect(model: nn.Module, *quantities: str, loss_fn: Any = None, reduction: str | None = None,
            layers: Iterable[str] | None = None, num_samples: int | None = None, samples: Sequence[int] | None = None,
            sharing: str = "expand", normalization: str = "paper", mc_samples: int = 1,
            generator: torch.Generator | None = None, max_floats: int = 1 << 25) -> Collection:
    """A context in which `loss.backward()` also computes curvature quantities: a mapping from parameter names.

    Of a loss L = c sum_n l_n over N samples; g_n is the gradient of l_n, and samples are the leading dimension of every layer's
    input.  Several backward passes in one context (gradient accumulation) count as one over all their samples.

        batch_grad         N x p           c g_n
        batch_l2           N               |c g_n|^2
        sum_grad_squared   p               sum_n (c g_n)^2
        second_moment      p               1/N sum_n g_n^2
        variance           p               1/N sum_n g_n^2 - (1/N sum_n g_n)^2
        diag_ggn, diag_ggn_mc              p        diagonal of the generalised Gauss-Newton matrix (GGN), exact and by sampling
        batch_diag_ggn, batch_diag_ggn_mc  N x p    the same sample by sample
        sqrt_ggn, sqrt_ggn_mc              V x N x p  a root: the GGN is the sum over V and N of outer products
        diag_h, batch_diag_h               p, N x p  diagonal of the Hessian
        kfac, kflr, kfac_emp, kfra         Kronecker(B, A): sampled, exact, of the empirical Fisher matrix, by averages
        hmp, ggnmp, pchmp                  functions: products with the parameter's block (see `Products`)

    `q["layer.weight"].variance` is of the parameter's shape and dtype, at least float32.  Tensors are on the parameter's device.

    Args:
        model: the module whose layers are called; under DistributedDataParallel the wrapper or what it holds.
        quantities: names from above.
        loss_fn: the loss that is called inside the context: nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss or their
            functional forms; for first-order quantities any loss that is a sum or mean over samples.
        reduction: "mean" or "sum", where loss_fn does not say: whether the loss is a mean over samples.
        layers: names of layers, or of modules that contain them; None: all with trainable parameters.
        num_samples: N, where the rows of a sample lie side by side in the leading dimension of some layer.
        samples: indices of the samples that count, for a share of the cost; sums are over these alone.
        sharing: how Kronecker factors treat positions: "expand" (a target for every frame), "reduce" (one target for all frames of
            a sample) or "backpack"; see `ngsgd.curvature.kronecker`.
        normalization: of variance and second_moment: "paper" as above, "backpack" with c g_n in the place of g_n.
        mc_samples: draws of the sampled quantities.
        generator: of the draws; None: torch's own.
        max_floats: of backpropagated vectors that are held at a time, and of the largest matrix of kfra.

    Raises:
        ConfigError: an unknown quantity, or a quantity that is not defined or not known for a layer, an operation or the loss; at
            once where that can be seen, else from the forward or backward pass.
        DataError: shapes that do not tell samples apart, or inputs that changed in place.

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
    if problems:
        raise ConfigError(problems)
    if mc_samples < 1:
        raise ConfigError(f"mc_samples is {mc_samples}; it must be at least 1.")
    if any(name in PRODUCTS or SIGNALS[name][0] != "gradient" for name in quantities):
        losses.check(loss_fn)
    reduction = reduction or losses.reduction_of(loss_fn)
    if reduction is None and normalization == "paper" and {"second_moment", "variance", "kfac_emp"} & set(quantities):
        raise ConfigError("the variance, the second moment and the empirical K-FAC depend on whether the loss is a mean or a "
                          "sum over "
                          'samples: give collect() loss_fn= or reduction="mean" or "sum".')
    options = Options(sharing, normalization, reduction, mc_samples, generator, max_floats)
    return Collection(model, quantities, loss_fn, options, {"layers": layers, "num_samples": num_samples, "samples": samples})
