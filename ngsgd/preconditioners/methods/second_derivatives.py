"""Base class of methods with second derivatives; it keeps the graph of a minibatch for a step.

The graph exists from `evaluate` to the end of `step`. Steps without a curvature update cost the
same as plain steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.layers import upcast
from ngsgd.curvature.products.block import expanded
from ngsgd.curvature.second_order.full_model import FullModelProducts
from ngsgd.errors import ConfigError
from ngsgd.ops.second_derivatives import naming_missing, twice_differentiable
from ngsgd.preconditioners.base import Preconditioner

Gradients = Mapping[str, Tensor]


class SecondOrderMethod(Preconditioner):
    """Methods whose `update_curvature` takes products from `self.minibatch`.

    Products are of the mean loss per row, as curvature is for all methods. Any loss that torch can
    differentiate twice is supported; a custom loss counts as a mean.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.minibatch: FullModelProducts | None = None
        # Whether `product` is called with "ggn".
        self.is_gauss_newton = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "minibatch": None}

    @contextlib.contextmanager
    def watching(self, num_rows: int | None) -> Iterator[None]:
        if not self.is_due("curvature"):
            yield
            return
        # Several passes before a step are one minibatch.
        self.minibatch = self.minibatch or FullModelProducts(self.model, gauss_newton=self.is_gauss_newton)
        with self.minibatch, twice_differentiable():
            yield

    def backward(self, loss: Tensor) -> None:
        if self.minibatch is None:
            loss.backward()
        else:
            with naming_missing(type(self).__name__):
                self.minibatch.differentiate(loss)
            # Torch does not differentiate sparse gradients again.
            if names := [name for name, p in self.model.named_parameters()
                         if p.grad is not None and p.grad.layout is not torch.strided and name not in self.skipped]:
                raise ConfigError(f"{type(self).__name__} needs second derivatives, and the gradient of {names[0]} is "
                                  f"sparse, as by nn.Embedding(sparse=True): use sparse=False, or skip=({names[0]!r},).")

    def step(self, lr: float | None = None) -> None:
        """Replace `.grad` of every parameter by the preconditioned gradient.

        Args:
            lr: learning rate of the optimizer; only kl_clip needs it.
        """
        try:
            # Recomputed layers (checkpointing) must save the same tensors.
            with naming_missing(type(self).__name__), expanded(self.model), twice_differentiable():
                super().step(lr)
        finally:
            self.forget_minibatch()

    def forget_minibatch(self) -> None:
        """Free the graph, which is large; no further products of this minibatch are possible."""
        if self.minibatch is not None:
            self.minibatch.forget()
        self.minibatch = None

    def observe(self, grads: Gradients) -> bool:
        if self.minibatch is None or not self.minibatch.is_differentiated:
            raise ConfigError(f"{type(self).__name__} has no minibatch to differentiate twice; "
                              "compute the loss with preconditioner.evaluate(closure), or inside "
                              "watch() and with preconditioner.backward(loss).")
        self.update_curvature(grads)
        return True

    def product(self, kind: str, vectors: Gradients, *, is_last: bool = False) -> dict[str, Tensor]:
        """Return the "hessian" or "ggn" of the minibatch times vectors, in at least float32."""
        assert self.minibatch is not None
        parameters = self.minibatch.parameters
        own = {name: self.blocks.oriented(name, v.to(parameters[name].dtype))
               for name, v in vectors.items()}
        found = self.minibatch.ggn(own) if kind == "ggn" else self.minibatch.hessian(own, is_last=is_last)
        return {name: self.blocks.oriented(name, upcast(value)) for name, value in found.items()}
