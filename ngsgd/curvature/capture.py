"""Capture of layer inputs and output derivatives during a forward and a backward pass.

Letters: V backpropagated vectors, N samples, T positions of a sample (frames, pixels, calls), I
inputs, O outputs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ngsgd.curvature import layers as of_layers
from ngsgd.curvature.graph import vector_products
from ngsgd.curvature.layer_decomposition import expansion_of, has_other_result, plain_product
from ngsgd.curvature.samples import Totals, Tries, mixed_output, mixed_rows, next_calls, run_once, unaccounted
from ngsgd.errors import ConfigError, DataError
from ngsgd.ops.tensors import without_autocast

# floats of derivatives at the layers: 8 MB
CACHED = 1 << 21
Arrival = Callable[[of_layers.LayerCall, Tensor], None]
# How users exclude a layer, by the available argument.
LEFT_OUT = {
    "layers": "exclude it by listing the others in layers=",
    "skip": "add it to skip= (its parameters, and those of layers inside it, then keep their "
            "gradient)"}

_REENTRANT = ("curvature cannot be recorded under reentrant activation checkpointing, where layers "
              "are computed for the first time during the backward pass; use "
              "checkpoint(.., use_reentrant=False).")


class _Paused(threading.local):
    is_set = False


# Of all captures, because hooks of one also run in the additional backward passes of another.
_PAUSED = _Paused()


class Capture:
    """Record layer calls in a context, and the derivative at each output when a backward pass
    reaches it.

    A forward hook records the input of each layer and registers a hook on its output, before any
    in-place operation on it. `records` is filled in the order of the backward pass; a layer that is
    called k times has k records. All hooks are removed when the capture ends, also by an exception.

    Args:
        layers: names of the layers (or of modules that contain them) to record; default: all that
            have trainable parameters.
        num_samples: N, if some layers have the positions of samples as separate adjacent rows;
            default: the leading dimension of every input.
        samples: indices of the samples to use; default: all.
        arrived: called with every derivative instead of storing a record.
        called: called after every call with the output of the layer.
        separate: reject layers whose rows take part in several samples, also if an operation after
            them mixes samples, such as a BatchNorm in training mode. Layers that run once for the
            complete minibatch are always rejected.
        gradients: with `separate`, also compare the sums of the layers' gradients with the
            gradients of the backward pass, once. They differ if the loss uses a parameter outside
            its layer.
        without: names of parameters whose curvature is not needed.
        left_out_by: the argument with which users exclude a layer, for messages: "layers" or
            "skip".

    Raises:
        ConfigError: a layer with trainable parameters is unsupported, compiled, runs once for the
            complete minibatch, or is differentiated a second time; with `separate` also a BatchNorm
            in training mode.
        DataError: the leading dimensions of the inputs differ.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> with Capture(model) as capture:
        ...     model(torch.randn(8, 4)).square().sum().backward()
        >>> capture.records[0].derivatives_VM.shape
        torch.Size([1, 8, 3])
    """

    def __init__(self, model: nn.Module, *, layers: Iterable[str] | None = None, num_samples: int | None = None,
                 samples: Sequence[int] | None = None, arrived: Arrival | None = None,
                 called: Callable[[of_layers.LayerCall, Tensor], None] | None = None, separate: bool = False,
                 gradients: bool = False, without: Collection[str] = (), left_out_by: str = "layers") -> None:
        self.model = model
        self.records: list[of_layers.Record] = []
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in without}
        self._name_of = {id(p): name for name, p in self.parameters.items()}
        self._within = None if layers is None else tuple(layers)
        self._num_samples, self._samples = num_samples, samples
        self._arrived, self._called = arrived, called
        self._handles: list[RemovableHandle] = []
        self._numbers: Counter[str] = Counter()
        # calls without a derivative yet, and the graph edges of their outputs
        self.open_calls: dict[of_layers.LayerCall, GradientEdge] = {}
        # calls of the complete model without a derivative yet
        self._outputs: dict[int, GradientEdge] = {}
        self._num_outputs = 0
        self._forward = -1
        self._paused = False
        self._left_out_by = left_out_by
        self._refuses_coupled = separate
        # NGSGD layers would treat the backpropagated vectors as minibatches.
        self._is_plain = True
        # a backward pass, and whether its calls need a check
        self._checked: tuple[int, bool] = (-1, False)
        self.layers = self._chosen()
        self._separate = separate and self._is_plain
        self._compares = gradients and self._separate
        self._tries = Tries(model, (self._separate, gradients, frozenset(self.layers), frozenset(without)))
        # parameters of the recorded layers by name, and transposed weights; set by a check
        self._of_layers: dict[str, Tensor] = {}
        self._transposed: set[str] = set()
        # of the backward pass that is checked
        self._totals = Totals()
        self._comparisons: dict[str, RemovableHandle] = {}
        # its parameters of calls with a derivative
        self._passed: set[str] = set()

    def __enter__(self) -> Capture:
        try:
            self._handles.append(self.model.register_forward_pre_hook(self._before_model))
            for name, module in self.model.named_modules():
                if self._refuses_coupled:
                    self._handles.append(module.register_forward_pre_hook(
                        lambda module, _, name=name: of_layers.refuse_coupled(module, name)))
                if name in self.layers:
                    self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
            self._handles.append(self.model.register_forward_hook(self._after_model))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks; records remain."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_comparing()
        self.open_calls.clear()
        self._outputs.clear()

    def forget_listeners(self) -> None:
        """Remove the listeners, whose reference cycles would keep results alive for a while."""
        self._arrived = self._called = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore derivatives inside the context."""
        before, self._paused, _PAUSED.is_set = _PAUSED.is_set, True, True
        try:
            yield
        except RuntimeError as error:
            if "use_reentrant=True" in str(error):
                raise ConfigError(_REENTRANT) from error
            raise
        finally:
            self._paused, _PAUSED.is_set = False, before

    @property
    def is_paused(self) -> bool:
        """Whether derivatives belong to an additional backward pass, of this capture or another."""
        return self._paused or _PAUSED.is_set

    def sweep(self, output: Tensor | GradientEdge, vectors_V: Tensor) -> list[tuple[of_layers.LayerCall, Tensor]]:
        """Return (call, V x derivatives) of the open calls behind an output; the graph is kept."""
        # Blocks that exceed the cache are slower than single vectors.
        calls = self.open_calls
        at_once = CACHED // sum(call.output_shape.numel() for call in calls)
        with self.paused():
            found = vector_products(output, list(calls.values()), vectors_V, at_once)
        return [(call, e_VM) for call, e_VM in zip(calls, found, strict=True) if e_VM is not None]

    def record(self, call: of_layers.LayerCall, derivatives_VM: Tensor) -> of_layers.Record:
        """Return the call with its derivatives, of the selected samples, in at least float32."""
        return self._record(call, derivatives_VM, self._samples)

    def _record(self, call: of_layers.LayerCall, e_VM: Tensor, samples: Sequence[int] | None = None) -> of_layers.Record:
        x = call.input
        if x._version != call.version:
            raise DataError(f"the input of layer {call.layer} was changed in place after the call "
                            "of the layer, so its curvature would be wrong; replace that "
                            "operation by an out-of-place one.")
        N = self.num_samples_of(call)
        if len(x) % N or len(e_VM[0]) != len(x):
            raise DataError(f"layer {call.layer} has an input of {len(x)} rows and an output of "
                            f"{len(e_VM[0])}, which are not {N} samples; give num_samples, with "
                            "adjacent rows for each sample.")
        if samples is not None:
            if not all(-N <= n < N for n in samples):
                raise DataError(f"samples= has an index outside of the {N} samples of layer {call.layer}.")
            chosen = torch.as_tensor(samples, device=x.device)
            x = x.unflatten(0, (N, -1))[chosen].flatten(0, 1)
            e_VM = e_VM.unflatten(1, (N, -1))[:, chosen].flatten(1, 2)
            N = len(chosen)
        return of_layers.Record(call, N, of_layers.upcast(x), of_layers.upcast(e_VM))

    def num_samples_of(self, call: of_layers.LayerCall) -> int:
        """Return N, before the selection of samples."""
        return self._num_samples or len(call.input)

    def num_samples_seen(self, output: Tensor) -> int:
        """Return N of the model call behind an output, among calls without a derivative yet."""
        calls = self.open_calls
        if len({call.forward for call in calls}) > 1 and output.requires_grad:
            calls = next_calls(get_gradient_edge(output), calls) or calls
        return self.num_samples_of(next(iter(calls)))

    def check_output(self, edge: GradientEdge, like: Tensor) -> None:
        """Reject calls behind an output (of the model, or the input of a loss) whose rows are not
        samples, and parameters used outside their layer, before derivatives are backpropagated.
        """
        if not self._is_due():
            return
        calls = dict(self.open_calls)
        for call in run_once([edge, *self._outputs.values()], calls):
            raise ConfigError(f"layer {call.layer} runs once for the complete minibatch and its "
                              "output is repeated for every sample, so the derivative at its "
                              "output is a sum over samples. Give it an input for each sample, "
                              f"such as {call.layer}(torch.arange(T).expand(N, T)) of a position "
                              f"embedding, or {LEFT_OUT[self._left_out_by]}.")
        before = next_calls(edge, calls)
        N = self.num_samples_of(next(iter(calls)))
        if before and self._is_plain:
            with self.paused():
                left = {key: p for key, p in self._comparable().items() if key not in self._passed}
                name, reached = unaccounted(edge, like, calls, left, self._record, self._transposed)
            if name is not None:
                self._refuse_other_use(name)
        if not self._separate:
            for call in calls:
                self._tries.count(call, N, is_clear=not self._is_plain or call in reached)
        elif before and like.ndim:
            with self.paused():
                found = mixed_output(edge, like, before, N)
            self._judge(found, "the model's output", N)

    def _refuse_other_use(self, name: str) -> None:
        raise ConfigError(f"the gradient of {name} is not that of the rows of its layer. The weight "
                          "is also used outside the layer (torch.nn.functional.linear, a penalty in "
                          "the loss), or a hook or an overridden method changes the layer. Give "
                          "each use its own layer that shares the parameter, call backward() for a "
                          f"penalty by itself, or {LEFT_OUT[self._left_out_by]}.")

    def _comparable(self) -> dict[str, Tensor]:
        """Return the parameters without a hook of the user, which may change the gradient."""
        if not self._of_layers:
            for name, module in self.model.named_modules():
                if name in self.layers:
                    inside = module.parameters(recurse=expansion_of(module) is not None)
                    self._of_layers.update({self._name_of[id(p)]: p for p in inside if id(p) in self._name_of})
                if of_layers.has_transposed_weight(module):
                    self._transposed.add(f"{name}.weight".lstrip("."))
        return {name: p for name, p in self._of_layers.items() if not p._backward_hooks}

    def _compare(self, name: str, gradient: Tensor | None) -> None:
        number = torch._C._current_graph_task_id()
        if gradient is not None and self._handles and not self.is_paused and number == self._checked[0] \
                and self._totals.differ(name, gradient, self._transposed):
            self._refuse_other_use(name)

    def _stop_comparing(self) -> None:
        if self._passed:
            for handle in self._comparisons.values():
                handle.remove()
            self._comparisons.clear()
            self._passed.clear()

    def _judge(self, found: dict[of_layers.LayerCall, bool | None], source: str, num_rows: int) -> None:
        for call, is_mixed in found.items():
            if is_mixed:
                raise ConfigError(f"rows of layer {call.layer} take part in several samples of "
                                  f"{source}, so per-sample gradients do not exist. The layer runs "
                                  "once for the complete minibatch, samples are not the leading "
                                  "dimension of its input, or an operation after it mixes "
                                  "samples. Give it an input for each sample, samples first, or "
                                  f"{LEFT_OUT[self._left_out_by]}.")
            self._tries.count(call, num_rows, is_clear=is_mixed is False)

    def _is_due(self) -> bool:
        """Return whether a call of this backward pass was never checked."""
        number, calls = torch._C._current_graph_task_id(), self.open_calls
        if self._checked[0] != number and calls:
            num_samples = self.num_samples_of(next(iter(calls)))
            self._checked = number, self._tries.are_due(calls, num_samples)
            self._stop_comparing()
            if self._checked[1] and self._compares:
                self._totals = Totals()
                for name, p in self._comparable().items():
                    # Removed hooks of a tensor slow down every later pass; those of a node do not.
                    node = get_gradient_edge(p).node
                    self._comparisons[name] = node.register_prehook(lambda grads, name=name: self._compare(name, grads[0]))
        return bool(calls) and self._checked == (number, True)

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not self.is_paused and not _is_recomputation():
            self._forward += 1

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self.is_paused or _is_recomputation() \
                or torch._C._functorch.maybe_current_level() is not None:
            return
        with torch._C.DisableTorchFunction():
            for part in tree_leaves(output):
                if isinstance(part, Tensor) and part.requires_grad and part.ndim:
                    number = self._num_outputs
                    self._num_outputs += 1
                    self._outputs[number] = get_gradient_edge(part)
                    part.register_hook(lambda e_M, number=number: self._output_arrived(number, e_M))

    def _output_arrived(self, number: int, e_M: Tensor) -> None:
        if not self.is_paused and number in self._outputs:
            self.check_output(self._outputs[number], e_M)
            del self._outputs[number]

    def _chosen(self) -> dict[str, nn.Module]:
        chosen: dict[str, nn.Module] = {}
        unknown = []
        inside: tuple[str, ...] = ()
        for name, module in self.model.named_modules():
            # In one search, because every search of the modules takes time in every step.
            self._is_plain = self._is_plain and "preconditioner" not in vars(module)
            own = {key: p for key, p in module._parameters.items() if id(p) in self._name_of}
            if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
                raise ConfigError(f"{name or 'the model'} is compiled, and hooks do not run in "
                                  "compiled code; pass and call the original module of "
                                  "torch.compile for minibatches with curvature.")
            if name.startswith(inside) and inside:
                continue
            if expansion_of(module) is not None:
                inside = (*inside, f"{name}." if name else "")
                own = {key: p for key, p in module.named_parameters() if id(p) in self._name_of}
            if not own or not (self._within is None or any(f"{name}.".startswith(f"{outer}.") for outer in self._within)):
                continue
            if empty := [key for key, p in own.items() if not p.numel()]:
                unknown.append(f"layer {name or 'the model'} ({type(module).__name__}) has parameters "
                               f"without elements ({', '.join(empty)}); {self._remedy(name, empty)}.")
            elif of_layers.kind_of(module) is None and expansion_of(module) is None:
                unknown.append(f"layer {name or 'the model'} ({type(module).__name__}) has direct "
                               f"parameters ({', '.join(own)}) with an unknown forward pass; "
                               f"{self._remedy(name, own)}, or build it from torch layers.")
            chosen[name] = module
        if unknown:
            raise ConfigError(unknown)
        if not chosen:
            raise ConfigError(f"{type(self.model).__name__} has no layer with trainable parameters among "
                              f"{self._within or 'all layers'}; name some of model.named_modules().")
        return chosen

    def _remedy(self, name: str, own: Iterable[str]) -> str:
        if self._left_out_by != "skip":
            return LEFT_OUT["layers"]
        names = ", ".join(f'"{name}.{each}"' if name else f'"{each}"' for each in own)
        return f"add them to skip=({names},), so that they keep their gradient"

    def _hook(self, name: str) -> Callable[..., Any]:
        def product(part: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """Compute an affine product inside a layer, captured as a separate layer."""
            y = plain_product(part, x, weight, bias)
            with torch._C.DisableTorchFunction():
                self._note(f"{name}.{part}".lstrip("."), of_layers.Affine(), (weight, bias), x, y)
            return y

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            expand = expansion_of(module)
            if _is_recomputation():
                # Autograd needs the tensors of the first forward pass again.
                return None if expand is None else expand(module, args, kwargs, output, plain_product)
            if not torch.is_grad_enabled() or self.is_paused:
                return None
            if torch._C._functorch.maybe_current_level() is not None:
                raise ConfigError(f"layer {name} runs inside a torch.func transform, which hides "
                                  "its rows; collect its curvature in a plain forward and "
                                  "backward pass.")
            if torch._C._current_graph_task_id() != -1:
                raise ConfigError(_REENTRANT)
            if expand is not None:
                y = expand(module, args, kwargs, output, product)
                if has_other_result(module, output, y):
                    raise ConfigError(f"a forward hook changes the output of layer {name} "
                                      f"({type(module).__name__}), which is computed again for its "
                                      "rows; register the hook on a module around it, or "
                                      f"{LEFT_OUT[self._left_out_by]}.")
                return y
            x = args[0] if args else next(iter(kwargs.values()))
            kind = of_layers.kind_of(module)
            assert kind is not None
            # The function mode for losses would observe every attribute of the tensors.
            with torch._C.DisableTorchFunction():
                if output._is_view():
                    # An in-place operation on a view removes it, with its hooks, from the graph.
                    output = torch.ops.aten._unsafe_view(output, output.shape)
                self._note(name, kind, (getattr(module, "weight", None), getattr(module, "bias", None)), x, output)
            return output
        return hook

    def _note(self, layer: str, kind: of_layers.Kind, parameters: tuple[Tensor | None, Tensor | None],
              x: Tensor, output: Tensor) -> None:
        weight, bias = (None if p is None else self._name_of.get(id(p)) for p in parameters)
        if not output.requires_grad or weight is bias is None:
            return
        if not x.numel() or not output.numel():
            raise DataError(f"layer {layer} got an input of shape {tuple(x.shape)}, which has no rows "
                            "or no columns; skip empty minibatches.")
        if output.is_complex():
            raise ConfigError(f"layer {layer} has a complex output, whose curvature is not supported; "
                              f"{LEFT_OUT[self._left_out_by]}.")
        if x.ndim < 2 and x.is_floating_point():
            raise DataError(f"layer {layer} has an input of shape {tuple(x.shape)}, without a "
                            "dimension of samples; pass a minibatch.")
        call = of_layers.LayerCall(
            layer, self._numbers[layer], kind, weight, bias, x.detach(), x._version, output.shape, self._forward)
        self._numbers[layer] += 1
        self.open_calls[call] = get_gradient_edge(output)
        # Weak, because the graph outlives the call, whose input should be freed after use.
        seen = weakref.ref(call)
        output.register_hook(lambda e_M: self._arrive(seen(), layer, e_M))
        if self._called is not None:
            self._called(call, output)

    def _arrive(self, call: of_layers.LayerCall | None, layer: str, e_M: Tensor) -> None:
        # The capture is closed.
        if self.is_paused or not self._handles:
            return
        is_due = self._is_due()
        edge = None if call is None else self.open_calls.pop(call, None)
        if call is None or edge is None:
            raise ConfigError(f"layer {layer} was differentiated twice after one forward pass, but "
                              "its samples count once: add the losses before backward(), or call "
                              "the model once for each, and compute gradients of gradients "
                              "outside the context.")
        if is_due:
            self._passed.update(name for name in (call.weight, call.bias) if name is not None)
        if is_due and self._separate:
            before = next_calls(edge, self.open_calls)
            with self.paused():
                found = mixed_rows(edge, e_M, before, self._num_samples)
            N = self.num_samples_of(call)
            if self._compares:
                with torch.no_grad(), without_autocast(e_M.device.type):
                    self._totals.add(self._record(call, e_M.detach()[None]), e_M.dtype)
            self._judge(found, f"layer {layer}", N)
            # The rows of the last layer may never be requested.
            self._tries.count(call, N, is_clear=False)
        with torch.no_grad(), without_autocast(e_M.device.type):
            if self._arrived is None:
                self.records.append(self.record(call, e_M.detach()[None]))
            else:
                self._arrived(call, e_M.detach())


def _is_recomputation() -> bool:
    """Return whether `checkpoint(use_reentrant=False)` runs a forward pass again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_recomputation_hook" in hooks[0].__qualname__
