"""What methods that take products with second derivatives share: the minibatch's graph lives from `evaluate` to the end of `step`.

Between two looks at the curvature a step costs what a plain one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import upcast
from ngsgd.curvature.products.block import expanded
from ngsgd.curvature.second_order.full_model import FullModelProducts
from ngsgd.errors import ConfigError
from ngsgd.ops.second_derivatives import naming_missing, twice_differentiable
from ngsgd.preconditioners.base import Preconditioner

Gradients = Mapping[str, Tensor]


class SecondOrderMethod(Preconditioner):
    """Methods whose `update_curvature` asks `self.minibatch` for products; these are of the loss's mean per row, as curvature is
    with all methods.

    Any loss that torch can differentiate twice will do; one that is not torch's own counts as a mean.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.minibatch: FullModelProducts | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "minibatch": None}

    @contextlib.contextmanager
    def _watching(self, num_rows: int | None) -> Iterator[None]:
        if not self.is_due("curvature"):
            yield
            return
        # several passes before a step are one minibatch
        self.minibatch = self.minibatch or FullModelProducts(self.model)
        with self.minibatch, twice_differentiable():
            yield

    def backward(self, loss: Tensor) -> None:
        if self.minibatch is None:
            loss.backward()
        else:
            with naming_missing(type(self).__name__):
                self.minibatch.differentiate(loss)

    def step(self, lr: float | None = None) -> None:
        """Replaces `.grad` of every parameter by the preconditioned one; `lr` is needed for kl_clip alone."""
        try:
            # layers that are computed again (checkpointing) have to save the same tensors
            with naming_missing(type(self).__name__), expanded(self.model), twice_differentiable():
                super().step(lr)
        finally:
            self._forget_minibatch()

    def _forget_minibatch(self) -> None:
        """There will be no more products of this one; its graph takes much memory."""
        if self.minibatch is not None:
            self.minibatch.forget()
        self.minibatch = None

    def _look(self, grads: Gradients) -> bool:
        if self.minibatch is None or not self.minibatch.is_differentiated:
            raise ConfigError(f"{type(self).__name__} has no minibatch to differentiate twice; compute the loss by "
                              "preconditioner.evaluate(closure), or inside of watch() and with preconditioner.backward(loss).")
        self.update_curvature(grads)
        return True

    def product(self, kind: str, vectors: Gradients, **options: Any) -> dict[str, Tensor]:
        """The "hessian" or "ggn" of the minibatch times vectors, in at least float32."""
        assert self.minibatch is not None
        parameters = self.minibatch.parameters
        own = {name: self.oriented(name, v.to(parameters[name].dtype))
               for name, v in vectors.items()}
        found = getattr(self.minibatch, kind)(own, **options)
        return {name: self.oriented(name, upcast(value)) for name, value in found.items()}

    def drawn(self, grads: Gradients, *, signs: bool = False) -> dict[str, Tensor]:
        """A normal number, or a random sign, for every element of the gradients."""
        found = {}
        # in the order of names, which a restart does not change
        for name, g in sorted(grads.items()):
            v = torch.randn(g.shape, generator=self.generator, dtype=g.dtype, device=g.device)
            found[name] = torch.where(v < 0.0, -1.0, 1.0).to(g.dtype) if signs else v
        return found
