"""Preconditioned gradients from dense D x D matrices in float64.

Nothing here is shared with ngsgd: every matrix is written down, Kronecker products too, roots come
from eigenvalues, and averages are sums over all steps.

Letters: D parameters of a block, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.preconditioners import individual, kronecker_factors, unit_blocks


def averaged(matrices: Sequence[Tensor], decay: float, last: int = 0) -> Tensor:
    """The moving average of matrices, the weights of which add up to 1; of the `last` ones only."""
    weights = [decay ** (len(matrices) - 1 - step) if decay else 1.0 for step in range(len(matrices))]
    if last:
        matrices, weights = matrices[-last:], weights[-last:]
    return torch.stack([w * M for w, M in zip(weights, matrices, strict=True)]).sum(dim=0) / sum(weights)


def of_eigenvalues(M: Tensor, power: float) -> Tensor:
    """|M|^power; eigenvalues that are rounding noise count as 0, as does 0^power."""
    values, U = torch.linalg.eigh(M)
    size = values.abs()
    found = torch.where(size > 1e-13 * size.max(), size.clamp(min=1e-300).pow(power), 0.0)
    power_of_M: Tensor = U @ found.diag() @ U.T
    return power_of_M


def solved(C: Tensor, g: Tensor, damping: float) -> Tensor:
    """(C + d I)^-1 g."""
    found: Tensor = torch.linalg.solve(C + damping * torch.eye(len(C), dtype=C.dtype), g.flatten())
    return found.view_as(g)


def factored(A: Tensor, B: Tensor, G: Tensor, damping: float) -> Tensor:
    """(B + sqrt(d)/pi I)^-1 G (A + pi sqrt(d) I)^-1 as one dense solve."""
    pi = float((A.trace() / len(A)) / (B.trace() / len(B))) ** 0.5
    damped = [M + size * torch.eye(len(M), dtype=M.dtype) for M, size in ((B, damping**0.5 / pi), (A, damping**0.5 * pi))]
    found: Tensor = torch.linalg.solve(torch.kron(damped[0].contiguous(), damped[1].contiguous()), G.flatten())
    return found.view_as(G)


def dimensions(vectors: Sequence[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """(A, B) of gradients: the means of G^T G and of G G^T, divided by the root of their trace."""
    A = torch.stack([G.T @ G for G in vectors]).sum(dim=0) / num_rows
    B = torch.stack([G @ G.T for G in vectors]).sum(dim=0) / num_rows
    return A / B.trace() ** 0.5, B / B.trace() ** 0.5


def represented(C: Tensor, representation: str, granularity: str, num_outputs: int) -> Tensor:
    """The matrix that is stored instead of C."""
    if representation == "element":
        return C.diagonal().diag()
    return unit_blocks(C, num_outputs) if granularity == "unit" else C


def of_rows(a_NTI: Tensor, e_VNTO: Tensor, G: Tensor, representation: str, solver: str, damping: float, num_rows: int) -> Tensor:
    """The direction of one layer with a Kronecker representation of its Fisher matrix."""
    if representation == "kronecker":
        A, B = kronecker_factors(a_NTI, e_VNTO, num_rows=num_rows, sharing="expand")
    else:
        A, B = dimensions([g.view_as(G) for g in individual(a_NTI, e_VNTO)], num_rows)
    return factored(A, B, G, damping) if solver == "cholesky" else solved(torch.kron(B.contiguous(), A.contiguous()), G, damping)


def leading(C: Tensor, rank: int) -> Tensor:
    """C of its largest eigenvalues."""
    values, U = torch.linalg.eigh(C)
    found: Tensor = U[:, -rank:] @ values[-rank:].diag() @ U[:, -rank:].T
    return found


def tonga(gradients: Sequence[Tensor], decay: float, rank: int) -> Tensor:
    """The moving average of g g^T, cut to its largest eigenvalues after every `rank` gradients."""
    C, weight, rows = torch.zeros(len(gradients[0]), len(gradients[0]), dtype=gradients[0].dtype), 0.0, 0
    for g in gradients:
        C, weight, rows = decay * C + (1.0 - decay) * torch.outer(g, g), decay * weight + 1.0 - decay, rows + 1
        if rows >= 2 * rank:
            C, rows = leading(C, rank), rank
    return C / weight


def sparse(C: Tensor, g: Tensor, num_outputs: int, damping: float) -> Tensor:
    """FANG's solve: the covariance of the model in which a weight depends on its bias alone."""
    D, places = len(C), torch.arange(len(C)).view(num_outputs, -1)
    C = C + damping * torch.eye(D, dtype=C.dtype)
    # gradient = L noise, in which noise has independent elements but for the biases
    biases, noise, L = places[:, -1], torch.zeros_like(C), torch.eye(D, dtype=C.dtype)
    noise[biases[:, None], biases] = C[biases[:, None], biases]
    for o in range(num_outputs):
        for w in places[o, :-1]:
            b = biases[o]
            L[w, b] = C[w, b] / C[b, b]
            noise[w, w] = C[w, w] - C[w, b] ** 2 / C[b, b]
    found: Tensor = torch.linalg.solve(L @ noise @ L.T, g.flatten())
    return found.view_as(g)
