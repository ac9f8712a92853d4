"""Hessians, quasi-Newton updates and PSGD steps in dense float64, line by line from the papers'
formulas.

Nothing here is shared with ngsgd: Hessians come from torch.func, inverses are inverses, triangles
are full matrices.

Letters: D parameters of a model, O outputs, I inputs of a layer (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def flat(named: dict[str, Tensor]) -> Tensor:
    """All in one vector, in the order of names."""
    return torch.cat([value.flatten() for _, value in sorted(named.items())])


def hessian(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """D x D of the complete model, in the order of names."""
    return _second(model, x, loss)


def gauss_newton(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """J^T H J with dense Jacobians: D x D in the order of names."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    f = model(x).detach()
    H_FF = torch.func.hessian(lambda flat_F: loss(flat_F.view_as(f)))(f.flatten())
    J = torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)).flatten())(named)
    J_FD = torch.cat([J[name].flatten(1) for name in sorted(J)], dim=1)
    G: Tensor = J_FD.T @ H_FF @ J_FD
    return G


def _second(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    named = {name: p.detach() for name, p in sorted(model.named_parameters())}
    shapes = {name: p.shape for name, p in named.items()}

    def value(flat_D: Tensor) -> Tensor:
        parts = flat_D.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        found: Tensor = loss(torch.func.functional_call(model, values, (x,)))
        return found

    H: Tensor = torch.func.hessian(value)(flat(named))
    return H


def psgd_full(Q: Tensor, v: Tensor, h: Tensor, mu: float) -> Tensor:
    """Li 2018, equation 30: Q - mu / max|t| t Q, t = triu(Q h h^T Q^T - Q^-T v v^T Q^-1)."""
    inverse = torch.linalg.inv(Q)
    t = (Q @ torch.outer(h, h) @ Q.T - inverse.T @ torch.outer(v, v) @ inverse).triu()
    moved: Tensor = Q - mu / float(t.abs().max()) * t @ Q
    return moved


def psgd_kronecker(Ql: Tensor, Qr: Tensor, dX: Tensor, dG: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """The same for Q = Ql (x) Qr, whose largest diagonal elements are made equal before."""
    share = float((Ql.diagonal().max() / Qr.diagonal().max()) ** 0.5)
    Ql, Qr = Ql / share, Qr * share
    a = Ql @ dG @ Qr.T
    b = torch.linalg.inv(Ql).T @ dX @ torch.linalg.inv(Qr)
    tl, tr = (a @ a.T - b @ b.T).triu(), (a.T @ a - b.T @ b).triu()
    return Ql - mu / tl.abs().max() * tl @ Ql, Qr - mu / tr.abs().max() * tr @ Qr


def bfgs(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """(I - r s y^T) H (I - r y s^T) + r s s^T."""
    r = 1.0 / float(s @ y)
    identity = torch.eye(len(s), dtype=s.dtype)
    return (identity - r * torch.outer(s, y)) @ H @ (identity - r * torch.outer(y, s)) + r * torch.outer(s, s)


def double_damping(H: Tensor, s: Tensor, y: Tensor, mu_1: float, mu_2: float) -> tuple[Tensor, Tensor]:
    """Goldfarb, Ren and Bahamou 2020, algorithm 3."""
    theta, yHy = 1.0, float(y @ H @ y)
    if float(s @ y) < mu_1 * yHy:
        theta = (1.0 - mu_1) * yHy / (yHy - float(s @ y))
    s = theta * s + (1.0 - theta) * H @ y
    return s, y + mu_2 * s


def quadratic_factor(size: int, condition: float, seed: int) -> Tensor:
    """Symmetric, eigenvalues from 1 down to 1 / condition in equal ratios, eigenvectors drawn."""
    generator = torch.Generator().manual_seed(seed)
    U, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    values = torch.tensor([condition ** (-k / (size - 1)) for k in range(size)], dtype=torch.float64)
    factor: Tensor = U @ values.diag() @ U.T
    return factor
