"""Products with one parameter's block of the Hessian, of the generalized Gauss-Newton matrix (GGN) and of the positive-curvature
Hessian (Chen and Hsieh 2018), without the block itself.

The forward passes that were collected run again, with the same random numbers, when a product is asked for first; their graphs
serve all further products and go with the mapping that `collect` gave.

    Hessian   d/d eps of the gradient at theta + eps v
    GGN       J^T H (J v), with J v from differentiating J^T u by u
    PCH       GGN plus J_x^T m(r) J_x v for every curved operation (see hessian.py), m(r) = |r| or max(r, 0)

Letters: V vectors.
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

from ngsgd.curvature.layer_decomposition import expansion_of
from ngsgd.curvature.losses import LossEvaluation
from ngsgd.curvature.products.hessian import residuals
from ngsgd.errors import ConfigError, DataError


@dataclass(frozen=True)
class Pass:
    """What it takes to run one forward pass and its loss again."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor
    versions: tuple[int, ...]                            # of the parameters
    # value of the loss for an output
    loss: Callable[[Tensor], Tensor]
    # what its second derivative is made of, for what the loss saw
    evaluation: Callable[[Tensor], LossEvaluation]
    upstream: Tensor
    # what the loss saw of an output
    view: Callable[[Tensor], Tensor]
    # what several losses of one forward pass share
    runs: dict[str, Any]

    def output(self) -> Tensor:
        """The network's output again, with a graph of its own.

        Raises:
            DataError: the parameters have changed since.
        """
        if tuple(p._version for p in self.model.parameters()) != self.versions:
            raise DataError("the parameters have changed since the curvature was collected; ask for products before the "
                            "optimiser's step.")
        return self._output

    @property
    def _output(self) -> Tensor:
        if "output" not in self.runs:
            # torch's fused attention has no second derivative
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), expanded(self.model), sdpa_kernel(SDPBackend.MATH):
                torch.set_rng_state(self.random_state)
                self.runs["output"] = self.model(*self.args, **self.kwargs)
        output: Tensor = self.runs["output"]
        return output

    @functools.cached_property
    def _parameters(self) -> dict[int, int]:
        """Places of the parameters among those that take gradients, by id."""
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
        """What multiplies vectors by the loss's second derivative."""
        with torch.enable_grad():
            return self.evaluation(self.view(self._output))

    @functools.cached_property
    def output_derivative(self) -> Tensor:
        """Of the loss by the network's output."""
        f = self._output.detach().requires_grad_()
        with torch.enable_grad():
            (df,) = torch.autograd.grad(self.loss(f), f, self.upstream)
        return df

    def gradient_of(self, p: Tensor) -> Tensor | None:
        """Of the loss with respect to a parameter, with its graph; None where it does not depend on it."""
        return self._gradients[self._parameters[id(p)]]

    def pushing(self, p: Tensor) -> Callable[[Tensor], Tensor]:
        """v to J v, J the Jacobian of the output with respect to a parameter."""
        u, pulled = self._pulled_ones
        return _pushed(u, pulled[self._parameters[id(p)]])


@contextlib.contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Recurrent and attention layers made of plain products: torch's own cannot always be differentiated twice."""
    def linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        expand = expansion_of(module)
        assert expand is not None
        return expand(module, args, kwargs, output, linear)

    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in model.modules() if expansion_of(m) is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Products:
    """Products with the blocks of one parameter; sums over all collected passes.

    `hmp(v)`, `ggnmp(v)`, `pchmp(v, modify="abs")` take V x shape of the parameter, or the shape itself, and return as much.
    """

    def __init__(self, name: str, passes: list[Pass]) -> None:
        self.name, self.passes = name, passes

    def hmp(self, v: Tensor) -> Tensor:
        """The Hessian's block times v."""
        return self._summed(v, self._hessian)

    def ggnmp(self, v: Tensor) -> Tensor:
        """The GGN's block times v."""
        return self._summed(v, self._ggn)

    def pchmp(self, v: Tensor, *, modify: str = "abs") -> Tensor:
        """The block of the positive-curvature Hessian times v; `modify`: "abs" or "clip" of what makes curvature negative.

        Raises:
            ConfigError: an operation after the parameter is neither linear, piecewise linear nor elementwise.
        """
        if modify not in ("abs", "clip"):
            raise ConfigError(f"modify is {modify!r}; it must be 'abs' or 'clip'.")
        return self._summed(v, lambda one, f, p, v_V: self._positive(one, f, p, v_V, modify))

    def _summed(self, v: Tensor, product: Callable[[Pass, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        p = self.passes[0].model.get_parameter(self.name)
        if v.shape[-p.ndim:] != p.shape or v.ndim not in (p.ndim, p.ndim + 1):
            raise DataError(f"a product with the curvature of {self.name} takes vectors of shape {tuple(p.shape)}, one or a "
                            "batch of them, "
                            f"and got {tuple(v.shape)}.")
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
    """V x shape; a single one is not copied."""
    return products[0][None] if len(products) == 1 else torch.stack(products)


def _pulled(output: Tensor | GradientEdge, p: Tensor, u: Tensor) -> Tensor:
    """J^T u; zeros where the output does not depend on the parameter."""
    if isinstance(output, Tensor) and not output.requires_grad:
        return torch.zeros_like(p)
    (pulled,) = torch.autograd.grad(output, [p], [u], retain_graph=True, allow_unused=True)
    return torch.zeros_like(p) if pulled is None else pulled.detach()


def _pushing(source: GradientEdge, like: Tensor, p: Tensor) -> Callable[[Tensor], Tensor]:
    """v to J v, J the Jacobian of what is at an edge of the graph with respect to the parameter."""
    with torch.enable_grad():
        u = torch.zeros_like(like).requires_grad_()
        (pulled,) = torch.autograd.grad([source], [p], [u], retain_graph=True, create_graph=True, allow_unused=True)
    return _pushed(u, pulled)


def _pushed(u: Tensor, pulled: Tensor | None) -> Callable[[Tensor], Tensor]:
    """v to J v: J^T u is linear in u, and its derivative by u times v is J v."""
    def push(v: Tensor) -> Tensor:
        if pulled is None or not pulled.requires_grad:
            return torch.zeros_like(u)
        (pushed,) = torch.autograd.grad([pulled], [u], [v], retain_graph=True, allow_unused=True)
        return torch.zeros_like(u) if pushed is None else pushed
    return push
