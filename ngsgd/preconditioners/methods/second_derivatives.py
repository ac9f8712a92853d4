"""Methods without a matrix, and the base of methods that keep the graph of a minibatch.

They solve (C + d I) x = g of all parameters by products with the curvature C of the minibatch:

    HessianFree   conjugate gradients
    KSD           x in the span of g, C g, .., C^(k - 1) g and the last direction
    LiSSA         x_0 = g / s,  x_(j + 1) = x_j + (g - (C + d I) x_j) / s
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.layers import upcast
from ngsgd.curvature.products import FullModelProducts, expanded
from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import conjugate_gradients, eigh
from ngsgd.ops.tensors import naming_missing, twice_differentiable
from ngsgd.preconditioners.base import DirectMethod, Preconditioner
from ngsgd.preconditioners.blocks import flat, unflat
from ngsgd.preconditioners.states import Layout

Gradients = Mapping[str, Tensor]


class SecondOrderMethod(Preconditioner):
    """Methods that take products from `self.minibatch`, whose graph is kept until `step` ends."""

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
            raise ConfigError(f"{type(self).__name__} has no minibatch to differentiate twice; compute the loss with "
                              f"preconditioner.evaluate(closure), or inside watch() and with preconditioner.backward(loss).")
        self.update_curvature(grads)
        return True

    def drawn(self, grads: Gradients, *, signs: bool = False) -> dict[str, Tensor]:
        """Return normal random numbers, or random signs, in the shapes of the gradients."""
        # Sorted by name, because a restart may change the order.
        z = {name: torch.randn(g.shape, generator=self.generator, dtype=g.dtype, device=g.device)
             for name, g in sorted(grads.items())}
        return {name: torch.where(each > 0.0, 1.0, -1.0).to(each) for name, each in z.items()} if signs else z

    def product(self, kind: str, vectors: Gradients, *, is_last: bool = False) -> dict[str, Tensor]:
        """Return the "hessian" or "ggn" of the minibatch times vectors, in at least float32."""
        assert self.minibatch is not None
        parameters = self.minibatch.parameters
        own = {name: self.blocks.oriented(name, v.to(parameters[name].dtype)) for name, v in vectors.items()}
        found = self.minibatch.ggn(own) if kind == "ggn" else self.minibatch.hessian(own, is_last=is_last)
        return {name: self.blocks.oriented(name, upcast(value)) for name, value in found.items()}


class MatrixFree(SecondOrderMethod, DirectMethod):
    """Base of the methods without a matrix, which need memory for the graph and a few gradients.

    Args:
        products: C: "ggn", the Gauss-Newton matrix, or "hessian".
        ema_decay: factor of the last direction, from which `solved` may start. Default 0.95.
        options: see `Preconditioner`.
    """

    products: str = "ggn"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_products = 0     # products so far
        self.is_gauss_newton = self.products == "ggn"

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return {"statistics.direction": self.blocks.shape(name)}

    def solved(self, product: Callable[[Tensor], Tensor], g_D: Tensor, start_D: Tensor | None) -> Tensor:
        """Return x, by products with C + d I; `start_D`: decayed last direction."""
        raise NotImplementedError

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.minibatch is None:
            raise ConfigError(f"{type(self).__name__} needs the graph of the minibatch, which step() frees; call step().")

        def damped(v_D: Tensor) -> Tensor:
            self.num_products += 1
            return flat(self.product(self.products, unflat(v_D, grads))) + self.damping * v_D
        g_D, start_D = flat(grads), None
        if self.ema_decay and all(name in self.statistics for name in grads):
            start_D = flat({name: self.statistics[name]["direction"] for name in grads}).mul_(self.ema_decay)
        direction_D = self.solved(damped, g_D, start_D)
        found = unflat(direction_D, grads)
        # The iterates of a gradient that is not finite are those of the last minibatch.
        if bool(direction_D.isfinite().all()) and bool(g_D.sum().isfinite()):
            for name, value in found.items():
                self.statistics.put(name, {"direction": value.clone()})
        else:
            self.note_skipped()
        return found


class HessianFree(MatrixFree, kind="hessian_free"):
    """Hessian-free optimization (Martens 2010): (C + d I) x = g by conjugate gradients.

    The iteration starts from the decayed last direction. Negative curvature ends it.

    Args:
        max_cg_steps: products per minibatch, each about two backward passes. Default 10.
        cg_tolerance: norm of the residual relative to the gradient norm. Default 1e-3.
        options: see `MatrixFree`; "ggn" is the default of products.
    """

    max_cg_steps: int = 10
    cg_tolerance: float = 1e-3

    def solved(self, product: Callable[[Tensor], Tensor], g_D: Tensor, start_D: Tensor | None) -> Tensor:
        return conjugate_gradients(product, g_D, start_D=start_D, max_steps=self.max_cg_steps, tolerance=self.cg_tolerance)[0]


class KSD(MatrixFree, kind="ksd"):
    """Krylov subspace descent (Vinyals and Povey 2012), with the quadratic model of the minibatch.

    The paper minimizes the loss itself over the subspace, by BFGS on another minibatch.

    Args:
        dimension: number of powers of C, of which each takes one product. Default 20.
        options: see `MatrixFree`; "ggn" is the default of products.
    """

    dimension: int = 20

    def solved(self, product: Callable[[Tensor], Tensor], g_D: Tensor, start_D: Tensor | None) -> Tensor:
        # its images have no eigenvalues
        if not bool(g_D.sum().isfinite()):
            return g_D
        basis, images = list[Tensor](), list[Tensor]()
        x_D: Tensor = g_D
        for number in range(self.dimension + (start_D is not None)):
            v_D = x_D if start_D is None or number < self.dimension else start_D
            length = v_D.norm()
            # Twice, because one pass leaves rounding errors of the size of small remainders.
            for each_D in (*basis, *basis):
                v_D = v_D - (each_D @ v_D) * each_D
            # A vector of the span adds nothing to it.
            if bool(v_D.norm() <= torch.finfo(v_D.dtype).eps**0.5 * length):
                continue
            basis.append(v_D / v_D.norm())
            images.append(product(basis[-1]))
            x_D = images[-1]
        if not basis:
            return g_D
        V_DK = torch.stack(basis, dim=1)
        values_K, U_KK = eigh(V_DK.T @ torch.stack(images, dim=1))
        # as in the paper, negative curvature counts by its size, and has a floor
        W_DK = V_DK @ U_KK
        return W_DK @ ((W_DK.T @ g_D) / values_K.abs().clamp(min=self.damping))


class LiSSA(MatrixFree, kind="lissa"):
    """LiSSA (Agarwal et al. 2017): the Neumann series of the inverse; no direction is kept.

    The paper samples an example for each product; here all products are of the minibatch.

    Args:
        num_terms: products per minibatch. Default 10.
        scale: s; the series converges if it is above the largest eigenvalue of C + d I. Default 10.
        options: see `MatrixFree`; "hessian" is the default of products, ema_decay must be 0.
    """

    products: str = "hessian"
    ema_decay: float = 0.0
    num_terms: int = 10
    scale: float = 10.0

    def solved(self, product: Callable[[Tensor], Tensor], g_D: Tensor, start_D: Tensor | None) -> Tensor:
        x_D = g_D / self.scale
        for _ in range(self.num_terms):
            x_D = x_D + (g_D - product(x_D)) / self.scale
        return x_D
