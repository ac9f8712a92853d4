"""SOAP with factors that minimize a Kullback-Leibler divergence.

    L_1 <- b L_1 + (1 - b) / D_2  G L_2^-1 G^T,   L_2 <- b L_2 + (1 - b) / D_1  G^T L_1^-1 G

The products use L^-1 = Q diag(1 / l) Q^T with the current basis Q and l = diag(Q^T L Q).

Source: Lin et al. 2025 (arXiv 2509.03378).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.preconditioners.methods.shampoo import SOAP
from ngsgd.preconditioners.states import State

# smallest l, relative to the largest of a factor
_LEAST = 1e-6


class KLSOAP(SOAP):
    """Adam in the eigenbasis of factors whose product is the covariance nearest to the gradients'.

    SOAP measures each factor of a matrix with plain gradients. KL-SOAP whitens the other dimensions
    first, so that a few large directions of one side do not determine the basis of the other. The
    first gradient has nothing to whiten by, and its factors get equal scales. Everything else is
    that of `SOAP`.

    Args:
        model: the module to precondition.
        damping, ema_decay, momentum, block_size: see `SOAP`.
        options: see `Preconditioner`.

    Source: Lin et al. 2025 (arXiv 2509.03378).

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = KLSOAP(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    def measure_gradient(self, name: str, g: Tensor) -> State:
        if g.ndim < 2:
            return {}
        bases = self.inverses.get(name)
        known = self.curvature(name) if bases else {}
        found = {}
        for index, block in enumerate(self._blocks(g)):
            keys = [f"{index}.{k}" for k in range(block.ndim)]
            # As in SOAP, square the first gradient in float64.
            own = self._rotated(block, index, bases, transpose=True) if bases else block.double()
            # The root of a smaller number is infinite in this dtype, and 0 * inf is NaN.
            tiny = torch.finfo(own.dtype).tiny
            scale = own.double().square().mean().clamp(min=tiny).pow(-0.5 / own.ndim).to(own)
            roots = [scale.expand(length) for length in own.shape]
            if bases:
                # Earlier gradients of zeros have nothing to whiten by, either.
                is_known = torch.stack([known[key].any() for key in keys]).all()
                roots = [torch.where(is_known, _inverse_roots(known[key], bases[key]), root)
                         for key, root in zip(keys, roots, strict=True)]
            for k, key in enumerate(keys):
                G_DX = _whitened(own, roots, k)
                G_DX = gemm.mm(bases[key], G_DX) if bases else G_DX
                found[key] = gemm.mm(G_DX, G_DX.T) / G_DX.shape[1]
        return found


def _whitened(own: Tensor, roots: Sequence[Tensor], kept: int) -> Tensor:
    """Divide all dimensions but one by their standard deviations; return a row per index of it."""
    for k, root_D in enumerate(roots):
        if k != kept:
            own = own * root_D.view([-1 if i == k else 1 for i in range(own.ndim)])
    return own.movedim(kept, 0).reshape(own.shape[kept], -1)


def _inverse_roots(L_DD: Tensor, Q_DD: Tensor) -> Tensor:
    """Return 1 / sqrt(l) with l = diag(Q^T L Q)."""
    l_D = (Q_DD * gemm.mm(L_DD, Q_DD)).sum(dim=0)
    return torch.maximum(l_D, _LEAST * l_D.max()).clamp(min=torch.finfo(l_D.dtype).tiny).rsqrt()
