"""Products with the curvature of a complete model in one minibatch, from a retained graph.

    Hessian   d/d eps of the gradient at theta + eps v
    GGN       J^T H (J v), with J v from differentiating J^T u with respect to u

Both are of the loss divided by the weight of its rows, whatever its reduction, masks and scale; see
`ngsgd.preconditioners.fisher_recorder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ngsgd.curvature import losses
from ngsgd.curvature.layers import without_autocast
from ngsgd.curvature.loss_interception import LossCalls, require_linear
from ngsgd.curvature.products.block import expanded
from ngsgd.curvature.products.vectors import pushing
from ngsgd.curvature.samples import has_reentrant_checkpoint
from ngsgd.errors import ConfigError
from ngsgd.ops.second_derivatives import REENTRANT

# by parameter name, in the shapes of the parameters
Vectors = dict[str, Tensor]
_Push = Callable[[Sequence[Tensor]], Tensor]


class LossWeight:
    """Total weight of the rows of the differentiated losses; custom losses count as a mean."""

    def __init__(self) -> None:
        self.views: list[losses.LossEvaluation] = []
        self._mode = LossCalls(self._noted)
        # Whether objectives must be linear in the losses, and depend on these outputs through them.
        self._is_gauss_newton = False
        self._layers: list[GradientEdge] = []

    def __enter__(self) -> LossWeight:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._mode.forget()

    @property
    def total(self) -> float:
        """Return W; 1 if no loss is supported or every row is masked."""
        total = sum(float(view.weight_R.sum()) for view in self.views)
        return total if total > 0.0 else 1.0

    def _noted(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, value: Tensor,
               again: Callable[[Tensor], Tensor]) -> None:
        if value.requires_grad:
            number = self._mode.add(value)
            value.register_hook(lambda upstream: self._differentiated(number, settings, kind, output, target, upstream))

    def _differentiated(self, number: int, settings: dict[str, Any], kind: type[nn.Module], output: Tensor,
                        target: Tensor, upstream: Tensor) -> None:
        # Products of a function of a loss differentiate the loss again.
        if not self._mode.is_differentiating:
            return
        if self._is_gauss_newton:
            self._mode.require_term(number, self._layers)
        with torch.no_grad(), without_autocast(output.device.type):
            self.views.append(losses.evaluation(settings, kind, output, target, upstream))


class FullModelProducts(LossWeight):
    """Curvature products of one minibatch; call `differentiate` instead of `loss.backward()`.

    Args:
        model: the module.
        gauss_newton: whether `ggn` is needed; objectives that are not linear in supported losses
            are then refused by ConfigError.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with FullModelProducts(model) as minibatch:
        ...     minibatch.differentiate(nn.functional.mse_loss(model(torch.tensor([[3.0]])), torch.zeros(1, 1)))
        >>> minibatch.hessian({"weight": torch.ones(1, 1)})      # of (3 w)^2
        {'weight': tensor([[18.]])}
    """

    def __init__(self, model: nn.Module, *, gauss_newton: bool = False) -> None:
        super().__init__()
        self._is_gauss_newton = gauss_newton
        self._handles: list[RemovableHandle] = []
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._model = model
        # of each pass, by parameter
        self._gradients: list[tuple[GradientEdge | None, ...]] = []
        self._pushes: list[_Push] | None = None

    def __enter__(self) -> FullModelProducts:
        # New for each of several passes.
        self._expanded = expanded(self._model)
        self._expanded.__enter__()
        if self._is_gauss_newton:
            self._handles = [module.register_forward_hook(self._ran) for module in self._model.modules()
                             if module is self._model or module._parameters]
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._layers.clear()
        self._expanded.__exit__(kind, error, trace)

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
        """Return H v; parameters that are not in `vectors` are fixed.

        The last product frees the graph.
        """
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
            self._pushes = [_pushing(view.output, tuple(self.parameters.values())) for view in self.views]
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


def _pushing(output: Tensor, parameters: tuple[Tensor, ...]) -> _Push:
    """Return v -> J v, with the Jacobian of an output with respect to the parameters."""
    with torch.enable_grad():
        u = torch.zeros_like(output).requires_grad_()
        return pushing(u, torch.autograd.grad(output, parameters, u, retain_graph=True, create_graph=True, allow_unused=True))
