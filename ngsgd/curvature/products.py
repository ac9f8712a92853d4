"""Products with the Hessian, GGN or positive-curvature Hessian of one parameter or of all.

    Hessian   d/d eps of the gradient at theta + eps v
    GGN       J^T H (J v), with J v from differentiating J^T u with respect to u
    PCH       GGN plus J_x^T m(r) J_x v for every curved operation, m(r) = |r| or max(r, 0)

PCH: Chen and Hsieh 2018; see graph.py. Letters: V vectors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from ngsgd.curvature.graph import pushing, residuals
from ngsgd.curvature.layer_decomposition import expansion_of, plain_product
from ngsgd.curvature.losses import LossCall, LossCalls, LossEvaluation, require_linear
from ngsgd.curvature.samples import has_reentrant_checkpoint
from ngsgd.errors import ConfigError, DataError
from ngsgd.ops.tensors import REENTRANT, without_autocast

_VIEWS = ("View", "ReshapeAlias", "Alias", "Slice", "Select", "Narrow", "Split", "Chunk", "Unbind", "Transpose", "TBackward",
          "Permute", "Squeeze", "Unsqueeze", "Expand", "AsStrided", "Diagonal")


@dataclass(frozen=True)
class Pass:
    """Arguments and state to run one forward pass and its loss again."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor
    versions: tuple[int, ...]   # of the parameters
    loss: LossCall
    upstream: Tensor
    # maps an output to the input of the loss
    view: Callable[[Tensor], Tensor]
    # shared by several losses of one forward pass
    runs: dict[str, Any]

    @property
    def output(self) -> Tensor:
        """The network output, computed again with a new graph."""
        if "output" not in self.runs:
            # torch's fused attention has no second derivative.
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), expanded(self.model), sdpa_kernel(SDPBackend.MATH):
                torch.set_rng_state(self.random_state)
                self.runs["output"] = self.model(*self.args, **self.kwargs)
        output: Tensor = self.runs["output"]
        return output

    def _differentiated(self, value: Tensor, upstream: Tensor) -> dict[int, Tensor | None]:
        """Return the gradient of each parameter, with its graph, by id."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(value, parameters, upstream, create_graph=True, allow_unused=True)
        return {id(p): g for p, g in zip(parameters, found, strict=True)}

    @functools.cached_property
    def gradients(self) -> dict[int, Tensor | None]:
        """Gradients of the loss by id of the parameter, with their graph, or None."""
        with torch.enable_grad():
            return self._differentiated(self.loss.of(self.view(self.output)), self.upstream)

    @functools.cached_property
    def second_derivative(self) -> LossEvaluation:
        """The evaluation that multiplies vectors by the loss Hessian."""
        with torch.enable_grad():
            return self.loss.evaluation(self.view(self.output), self.upstream)

    @functools.cached_property
    def output_derivative(self) -> Tensor:
        """Gradient of the loss with respect to the network output."""
        f = self.output.detach().requires_grad_()
        with torch.enable_grad():
            (df,) = torch.autograd.grad(self.loss.of(self.view(f)), f, self.upstream)
        return df

    def pushing(self, p: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        """Return v -> J v, with the Jacobian J of the output with respect to a parameter."""
        if "pulled" not in self.runs:
            with torch.enable_grad():
                u = torch.zeros_like(self.output).requires_grad_()
                self.runs["pulled"] = u, self._differentiated(self.output, u)
        u, pulled = self.runs["pulled"]
        return pushing(u, [pulled[id(p)]])


@contextlib.contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Decompose recurrent and attention layers: torch's are not always twice differentiable."""
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        expand = expansion_of(module)
        assert expand is not None
        return expand(module, args, kwargs, output, plain_product)
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules() if expansion_of(m) is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Products:
    """Products with the curvature blocks of one parameter, summed over all collected passes.

    `hmp(v)`, `ggnmp(v)` and `pchmp(v, modify="abs")` take V x shape of the parameter, or one vector
    in its shape, and return the same shape.

    Example:
        >>> import torch
        >>> from ngsgd.curvature import collect
        >>> model, loss_fn = torch.nn.Linear(4, 3), torch.nn.MSELoss()
        >>> with collect(model, "ggnmp", loss_fn=loss_fn) as q:
        ...     loss_fn(model(torch.randn(8, 4)), torch.zeros(8, 3)).backward()
        >>> q["weight"].ggnmp(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(self, name: str, passes: list[Pass]) -> None:
        self.name, self.passes = name, passes

    def hmp(self, v: Tensor) -> Tensor:
        """Return the Hessian block times v."""
        def product(one: Pass, p: Tensor, v_V: Tensor) -> Tensor:
            g = one.gradients[id(p)]
            return torch.zeros_like(v_V) if g is None else _stacked([_pulled(g, p, v) for v in v_V])
        return self._summed(v, product)

    def ggnmp(self, v: Tensor) -> Tensor:
        """Return the GGN block times v."""
        return self._summed(v, _ggn)

    def pchmp(self, v: Tensor, *, modify: str = "abs") -> Tensor:
        """Return the block of the positive-curvature Hessian times v.

        Args:
            v: V x shape of the parameter, or its shape.
            modify: "abs" or "clip" of negative curvature.

        Raises:
            ConfigError: an operation after the parameter is neither linear, piecewise linear nor
                elementwise.
        """
        if modify not in ("abs", "clip"):
            raise ConfigError(f"modify is {modify!r}; it must be 'abs' or 'clip'.")

        def product(one: Pass, p: Tensor, v_V: Tensor) -> Tensor:
            total, edge = _ggn(one, p, v_V), get_gradient_edge(one.output)
            for source, r in residuals(edge, one.output_derivative, [get_gradient_edge(p)], "pchmp"):
                modified = r.abs() if modify == "abs" else r.clamp(min=0.0)
                push = _pushing(source, r, [p])
                total = total + _stacked([_pulled(source, p, modified * push([v])) for v in v_V])
            return total
        return self._summed(v, product)

    def _summed(self, v: Tensor, product: Callable[[Pass, Tensor, Tensor], Tensor]) -> Tensor:
        p = self.passes[0].model.get_parameter(self.name)
        if v.shape[-p.ndim:] != p.shape or v.ndim not in (p.ndim, p.ndim + 1):
            raise DataError(f"a product with the curvature of {self.name} needs vectors of shape "
                            f"{tuple(p.shape)}, one or a batch of them, and got {tuple(v.shape)}.")
        v_V = v if v.ndim > p.ndim else v[None]
        if any(tuple(p._version for p in one.model.parameters()) != one.versions for one in self.passes):
            raise DataError("the parameters have changed since the curvature was collected; "
                            "compute products before the optimizer step.")
        first, *others = (product(one, p, v_V) for one in self.passes)
        total = sum(others, start=first)
        return total if v.ndim > p.ndim else total[0]


def _ggn(one: Pass, p: Tensor, v_V: Tensor) -> Tensor:
    push, H = one.pushing(p), one.second_derivative
    return _stacked([_pulled(H.output, p, H.product(one.view(push([v]))[None])[0]) for v in v_V])


def _stacked(products: list[Tensor]) -> Tensor:
    """Stack to V x shape; a single one is not copied."""
    return products[0][None] if len(products) == 1 else torch.stack(products)


def _pulled(output: Tensor | GradientEdge, p: Tensor, u: Tensor) -> Tensor:
    """Return J^T u; zeros if the output does not depend on the parameter."""
    if isinstance(output, Tensor) and not output.requires_grad:
        return torch.zeros_like(p)
    (pulled,) = torch.autograd.grad(output, [p], [u], retain_graph=True, allow_unused=True)
    return torch.zeros_like(p) if pulled is None else pulled.detach()


_Push = Callable[[Sequence[Tensor]], Tensor]


def _pushing(source: Tensor | GradientEdge, like: Tensor, parameters: Sequence[Tensor]) -> _Push:
    """Return v -> J v, with the Jacobian at a graph edge with respect to the parameters."""
    with torch.enable_grad():
        u = torch.zeros_like(like).requires_grad_()
        return pushing(u, torch.autograd.grad(source, parameters, u, retain_graph=True, create_graph=True, allow_unused=True))


class ModelCalls:
    """Record the last call of the model, for passes that run again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call: tuple[Any, ...] | None = None
        # graph node, memory, strides and offset of an output, which itself can be freed after use
        self._output: tuple[Any, int, tuple[int, ...], int] | None = None
        self._handles = [model.register_forward_pre_hook(self._before, with_kwargs=True), model.register_forward_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._output = None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Activation checkpointing calls it again in a backward pass.
        if torch._C._current_graph_task_id() == -1:
            self._call, self._output = (args, kwargs, torch.get_rng_state(), {}), None

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and isinstance(output, Tensor):
            memory = output.untyped_storage().data_ptr()
            self._output = output.grad_fn, memory, output.stride(), int(output.storage_offset())

    def taken(self, seen: Tensor, loss: LossCall, upstream: Tensor) -> Pass:
        """Return the pass that led to the input of a loss."""
        view = self._view_to(seen)
        if self._call is None or view is None:
            raise ConfigError("products with curvature blocks need a loss of the model output, "
                              "from its last call before the backward pass, or of a view of that "
                              "output (a slice, flatten, transpose). Move operations between them, "
                              "such as a copy or a softmax, into forward() of the model.")
        args, kwargs, state, runs = self._call
        versions = tuple(p._version for p in self._model.parameters())
        return Pass(self._model, args, kwargs, state, versions, loss, upstream.detach(), view, runs)

    def _view_to(self, part: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a function that applies `part`, if a view, to another output of that layout."""
        if self._output is None:
            return None
        of_output, memory, layout, start = self._output
        node = part.grad_fn
        # Only through views: an in-place operation has their memory, too.
        while node is not None and node is not of_output:
            node = node.next_functions[0][0] if node.name().startswith(_VIEWS) else None
        if node is None or part.untyped_storage().data_ptr() != memory:
            return None
        size, stride, offset = part.size(), part.stride(), int(part.storage_offset()) - start

        def view(output: Tensor) -> Tensor:
            if output.stride() != layout:
                output = torch.empty_strided(output.size(), layout, dtype=output.dtype, device=output.device).copy_(output)
            return output.as_strided(size, stride, output.storage_offset() + offset)
        return view


# by parameter name, in the shapes of the parameters
Vectors = dict[str, Tensor]


class FullModelProducts:
    """Curvature products of one minibatch; call `differentiate` instead of `loss.backward()`.

    They are of the loss divided by the weight of its rows. With `gauss_newton`, `ggn` is available,
    and objectives that are not linear in supported losses are refused by ConfigError.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with FullModelProducts(model) as minibatch:
        ...     minibatch.differentiate(nn.functional.mse_loss(model(torch.tensor([[3.0]])), torch.zeros(1, 1)))
        >>> minibatch.hessian({"weight": torch.ones(1, 1)})      # of (3 w)^2
        {'weight': tensor([[18.]])}
    """

    def __init__(self, model: nn.Module, *, gauss_newton: bool = False) -> None:
        # of the differentiated losses
        self.views: list[LossEvaluation] = []
        self._mode = LossCalls(self._noted)
        # Whether objectives must be linear in the losses, and depend on these outputs through them.
        self._is_gauss_newton = gauss_newton
        self._layers: list[GradientEdge] = []
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._model = model
        # of each pass, by parameter
        self._gradients: list[tuple[GradientEdge | None, ...]] = []
        self._pushes: list[_Push] | None = None

    def __enter__(self) -> FullModelProducts:
        # New for each of several passes.
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(expanded(self._model))
        self._entered.callback(self._layers.clear)
        for module in self._model.modules() if self._is_gauss_newton else ():
            if module is self._model or module._parameters:
                self._entered.callback(module.register_forward_hook(self._ran).remove)
        self._entered.callback(self._mode.forget)
        self._entered.enter_context(self._mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)

    @property
    def total(self) -> float:
        """Return W; 1 if no loss is supported or every row is masked: custom losses are a mean."""
        total = sum(float(view.weight_R.sum()) for view in self.views)
        return total if total > 0.0 else 1.0

    def _noted(self, loss: LossCall, output: Tensor, value: Tensor) -> None:
        if value.requires_grad:
            number = self._mode.add(value)
            value.register_hook(lambda upstream: self._differentiated(number, loss, output, upstream))

    def _differentiated(self, number: int, loss: LossCall, output: Tensor, upstream: Tensor) -> None:
        # Products of a function of a loss differentiate the loss again.
        if not self._mode.is_differentiating:
            return
        if self._is_gauss_newton:
            self._mode.require_term(number, self._layers)
        with torch.no_grad(), without_autocast(output.device.type):
            self.views.append(loss.evaluation(output, upstream))

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        self._layers.extend(get_gradient_edge(part) for part in tree_leaves(output)
                            if isinstance(part, Tensor) and part.requires_grad)

    @property
    def is_differentiated(self) -> bool:
        """Whether there is a gradient to differentiate again."""
        return bool(self._gradients)

    def differentiate(self, loss: Tensor) -> None:
        """Add the gradient to `.grad`, as `backward()` does, and keep its graph."""
        parameters, num_known = tuple(self.parameters.values()), len(self.views)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        # If nothing before such a checkpoint has parameters, torch returns None for those inside.
        if any(g is None for g in gradients) and has_reentrant_checkpoint(loss):
            raise ConfigError(f"this method {REENTRANT}")
        if self._is_gauss_newton and len(self.views) == num_known and loss.grad_fn is not None:
            require_linear([loss.grad_fn], (), {edge.node for edge in self._layers})
        for p, g in zip(parameters, gradients, strict=True):
            if g is not None:
                p.grad = g.detach().clone() if p.grad is None else p.grad + g.detach()
        # Graph edges suffice to differentiate gradients again; the gradients are as large as the
        # model.
        self._gradients.append(tuple(get_gradient_edge(g) if g is not None and g.requires_grad else None for g in gradients))

    def forget(self) -> None:
        """Free the graph now, because reference cycles would keep it until garbage collection."""
        self._gradients.clear()
        self.views.clear()
        self._pushes = None

    def hessian(self, vectors: Mapping[str, Tensor], *, is_last: bool = False) -> Vectors:
        """Return H v; parameters not in `vectors` are fixed. The last product frees the graph."""
        total: Vectors = {}
        for gradients in self._gradients:
            along = [(g, vectors[name]) for name, g in zip(self.parameters, gradients, strict=True)
                     if name in vectors and g is not None]
            if along:
                self._add_pulled(total, vectors, [g for g, _ in along], [v for _, v in along], retain=not is_last)
        found = self._mean(total, vectors)
        if is_last:
            self.forget()
        return found

    def ggn(self, vectors: Mapping[str, Tensor]) -> Vectors:
        """Return G v, with G = J^T H J; ConfigError without a supported loss."""
        if not self.views:
            raise ConfigError("the Gauss-Newton matrix needs a supported loss; call cross-entropy, "
                              "mean squared error or binary cross-entropy with logits from torch, "
                              "or use products of the Hessian (HessianFree: products=\"hessian\").")
        if self._pushes is None:
            self._pushes = [_pushing(view.output, view.output, tuple(self.parameters.values())) for view in self.views]
        v = tuple(vectors[name] if name in vectors else torch.zeros_like(p) for name, p in self.parameters.items())
        total: Vectors = {}
        for view, push in zip(self.views, self._pushes, strict=True):
            self._add_pulled(total, vectors, [view.output], [view.product(push(v)[None])[0]])
        return self._mean(total, vectors)

    def _add_pulled(self, total: Vectors, names: Iterable[str], outputs: Sequence[Tensor] | Sequence[GradientEdge],
                    upstream: list[Tensor], *, retain: bool = True) -> None:
        parameters = [self.parameters[name] for name in names]
        found = torch.autograd.grad(outputs, parameters, upstream, retain_graph=retain, allow_unused=True)
        for name, g in zip(names, found, strict=True):
            if g is not None:
                total[name] = total[name] + g.detach() if name in total else g.detach()

    def _mean(self, total: Vectors, names: Iterable[str]) -> Vectors:
        """Divide by the weight of the rows, one tensor after the other to save memory."""
        return {name: total.pop(name) / self.total if name in total else torch.zeros_like(self.parameters[name]) for name in names}
