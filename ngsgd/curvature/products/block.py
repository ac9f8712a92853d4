"""Products with the Hessian, GGN or positive-curvature Hessian block of one parameter.

The collected forward passes run again, with the same random numbers, at the first product. Their
graphs serve all further products and are freed with the mapping of `collect`.

    Hessian   d/d eps of the gradient at theta + eps v
    GGN       J^T H (J v), with J v from differentiating J^T u with respect to u
    PCH       GGN plus J_x^T m(r) J_x v for every curved operation, m(r) = |r| or max(r, 0)

GGN: generalized Gauss-Newton matrix. PCH: Chen and Hsieh 2018; see hessian.py. Letters: V vectors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from ngsgd.curvature.layer_decomposition import expansion_of, plain_product
from ngsgd.curvature.losses import LossEvaluation
from ngsgd.curvature.products.hessian import residuals
from ngsgd.curvature.products.vectors import pushing
from ngsgd.errors import ConfigError, DataError


@dataclass(frozen=True)
class Pass:
    """Arguments and state to run one forward pass and its loss again."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor
    versions: tuple[int, ...]                            # versions of the parameters
    # returns the loss of an output
    loss: Callable[[Tensor], Tensor]
    # returns the loss evaluation of the input of the loss
    evaluation: Callable[[Tensor], LossEvaluation]
    upstream: Tensor
    # maps an output to the input of the loss
    view: Callable[[Tensor], Tensor]
    # shared by several losses of one forward pass
    runs: dict[str, Any]

    def output(self) -> Tensor:
        """Compute the network output again, with a new graph.

        Raises:
            DataError: the parameters have changed.
        """
        if tuple(p._version for p in self.model.parameters()) != self.versions:
            raise DataError("the parameters have changed since the curvature was collected; "
                            "compute products before the optimizer step.")
        return self._output

    @property
    def _output(self) -> Tensor:
        if "output" not in self.runs:
            # torch's fused attention has no second derivative.
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), expanded(self.model), sdpa_kernel(SDPBackend.MATH):
                torch.set_rng_state(self.random_state)
                self.runs["output"] = self.model(*self.args, **self.kwargs)
        output: Tensor = self.runs["output"]
        return output

    @functools.cached_property
    def _parameters(self) -> dict[int, int]:
        """Return positions of the parameters among the trainable ones, by id."""
        return {id(p): place for place, p in enumerate(p for p in self.model.parameters() if p.requires_grad)}

    @functools.cached_property
    def _gradients(self) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            return self._differentiated(self.loss(self._output), self.upstream)

    @property
    def _pulled_ones(self) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if "pulled" not in self.runs:
            with torch.enable_grad():
                u = torch.zeros_like(self._output).requires_grad_()
                self.runs["pulled"] = u, self._differentiated(self._output, u)
        pulled: tuple[Tensor, tuple[Tensor | None, ...]] = self.runs["pulled"]
        return pulled

    def _differentiated(self, value: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(value, parameters, upstream, create_graph=True, allow_unused=True)
        return found

    @functools.cached_property
    def second_derivative(self) -> LossEvaluation:
        """Return the evaluation that multiplies vectors by the loss Hessian."""
        with torch.enable_grad():
            return self.evaluation(self.view(self._output))

    @functools.cached_property
    def output_derivative(self) -> Tensor:
        """Return the gradient of the loss with respect to the network output."""
        f = self._output.detach().requires_grad_()
        with torch.enable_grad():
            (df,) = torch.autograd.grad(self.loss(f), f, self.upstream)
        return df

    def gradient_of(self, p: Tensor) -> Tensor | None:
        """Return the gradient of the loss with respect to a parameter, with its graph, or None."""
        return self._gradients[self._parameters[id(p)]]

    def pushing(self, p: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function v -> J v, with the Jacobian J of the output with respect to a
        parameter.
        """
        u, pulled = self._pulled_ones
        push = pushing(u, [pulled[self._parameters[id(p)]]])
        return lambda v: push([v])


@contextlib.contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Decompose recurrent and attention layers, because torch's are not always twice
    differentiable.
    """
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
        return self._summed(v, self._hessian)

    def ggnmp(self, v: Tensor) -> Tensor:
        """Return the GGN block times v."""
        return self._summed(v, self._ggn)

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
        return self._summed(v, lambda one, f, p, v_V: self._positive(one, f, p, v_V, modify))

    def _summed(self, v: Tensor, product: Callable[[Pass, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        p = self.passes[0].model.get_parameter(self.name)
        if v.shape[-p.ndim:] != p.shape or v.ndim not in (p.ndim, p.ndim + 1):
            raise DataError(f"a product with the curvature of {self.name} needs vectors of shape "
                            f"{tuple(p.shape)}, one or a batch of them, and got {tuple(v.shape)}.")
        v_V = v if v.ndim > p.ndim else v[None]
        first, *others = (product(one, one.output(), p, v_V) for one in self.passes)
        total = sum(others, start=first)
        return total if v.ndim > p.ndim else total[0]

    def _hessian(self, one: Pass, f: Tensor, p: Tensor, v_V: Tensor) -> Tensor:
        gradient = one.gradient_of(p)
        return torch.zeros_like(v_V) if gradient is None else _stacked([_pulled(gradient, p, v) for v in v_V])

    def _ggn(self, one: Pass, f: Tensor, p: Tensor, v_V: Tensor) -> Tensor:
        push, H = one.pushing(p), one.second_derivative
        return _stacked([_pulled(H.output, p, H.product(one.view(push(v))[None])[0]) for v in v_V])

    def _positive(self, one: Pass, f: Tensor, p: Tensor, v_V: Tensor, modify: str) -> Tensor:
        total = self._ggn(one, f, p, v_V)
        for source, r in residuals(get_gradient_edge(f), one.output_derivative, [get_gradient_edge(p)], "pchmp"):
            modified = r.abs() if modify == "abs" else r.clamp(min=0.0)
            push = _pushing(source, r, p)
            total = total + _stacked([_pulled(source, p, modified * push(v)) for v in v_V])
        return total


def _stacked(products: list[Tensor]) -> Tensor:
    """Stack to V x shape; a single one is not copied."""
    return products[0][None] if len(products) == 1 else torch.stack(products)


def _pulled(output: Tensor | GradientEdge, p: Tensor, u: Tensor) -> Tensor:
    """Return J^T u; zeros if the output does not depend on the parameter."""
    if isinstance(output, Tensor) and not output.requires_grad:
        return torch.zeros_like(p)
    (pulled,) = torch.autograd.grad(output, [p], [u], retain_graph=True, allow_unused=True)
    return torch.zeros_like(p) if pulled is None else pulled.detach()


def _pushing(source: GradientEdge, like: Tensor, p: Tensor) -> Callable[[Tensor], Tensor]:
    """Return v -> J v, with the Jacobian J at a graph edge with respect to the parameter."""
    with torch.enable_grad():
        u = torch.zeros_like(like).requires_grad_()
        push = pushing(u, torch.autograd.grad([source], [p], [u], retain_graph=True, create_graph=True, allow_unused=True))
    return lambda v: push([v])
