"""Preconditioned gradients from dense matrices in float64, from the formulas of the papers.

Nothing here is shared with ngsgd: Jacobians come from autograd one output at a time, patches from
slices, matrices are dense.

Letters: N samples, F outputs of a sample, T positions of a layer, O outputs, I inputs of a layer
(with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference.curvature import loss_derivatives


def at_layer(model: nn.Module, layer: nn.Module, x: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """(input of the layer, N x F x shape of its output: the Jacobian of the model's outputs)."""
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.extend((args[0].detach(), output)))
    f_NF = model(x).reshape(num_samples, -1)
    handle.remove()
    rows = [torch.autograd.grad(number, seen[1], retain_graph=True)[0][n] for n in range(num_samples) for number in f_NF[n]]
    return seen[0], torch.stack(rows).view(*f_NF.shape, *seen[1].shape[1:])


def input_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """N x T x I."""
    if isinstance(layer, nn.Linear):
        a_NTI = x.reshape(len(x), -1, x.shape[-1])
    else:
        assert isinstance(layer, nn.Conv1d) and isinstance(layer.padding, tuple)
        (k,), (stride,), (dilation,), (pad,) = layer.kernel_size, layer.stride, layer.dilation, layer.padding
        padded = nn.functional.pad(x, (pad, pad))
        length = (padded.shape[2] - dilation * (k - 1) - 1) // stride + 1
        a_NTI = torch.stack([padded[:, :, t * stride: t * stride + dilation * (k - 1) + 1: dilation].flatten(1)
                             for t in range(length)], dim=1)
    return a_NTI if layer.bias is None else torch.cat([a_NTI, torch.ones(*a_NTI.shape[:2], 1, dtype=x.dtype)], dim=2)


def derivative_rows(model: nn.Module, layer: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor, *, num_rows: int,
                    exact: bool) -> tuple[Tensor, Tensor]:
    """(N x T x I, V x N x T x O) of F = 1/R sum over vectors and samples; R rows."""
    a, J = at_layer(model, layer, x, len(x))
    J_NFTO = J.flatten(3).transpose(2, 3) if isinstance(layer, nn.Conv1d) else J.reshape(*J.shape[:2], -1, J.shape[-1])
    d_NF, H_NFF = loss_derivatives(loss, model(x), len(x))
    if exact:
        values, vectors = torch.linalg.eigh(H_NFF * num_rows)
        root_NFV = vectors * values.clamp(min=0.0).sqrt()[:, None]
        e_VNTO = torch.einsum("nfv,nfto->vnto", root_NFV, J_NFTO)
    else:
        e_VNTO = torch.einsum("nf,nfto->nto", d_NF * num_rows, J_NFTO)[None]
    return input_rows(layer, a), e_VNTO


def kfac(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor, damping: float, *, num_rows: int, sharing: str) -> Tensor:
    """(B + sqrt(d)/pi I)^-1 (x) (A + pi sqrt(d) I)^-1 as one dense solve."""
    A, B = kronecker_factors(a_NTI, e_VNTO, num_rows=num_rows, sharing=sharing)
    pi = float((A.trace() / len(A)) / (B.trace() / len(B))) ** 0.5
    F = torch.kron((B + damping**0.5 / pi * torch.eye(len(B), dtype=B.dtype)).contiguous(),
                   (A + pi * damping**0.5 * torch.eye(len(A), dtype=A.dtype)).contiguous())
    direction: Tensor = torch.linalg.solve(F, G_OI.flatten()).view_as(G_OI)
    return direction


def kronecker_factors(a_NTI: Tensor, e_VNTO: Tensor, *, num_rows: int, sharing: str) -> tuple[Tensor, Tensor]:
    """A, the mean of a a^T; B, 1/R the sum of e e^T; one by one."""
    if sharing == "reduce":
        a_NTI, e_VNTO = a_NTI.mean(1, keepdim=True), e_VNTO.sum(2, keepdim=True)
    a_XI, e_XO = a_NTI.flatten(0, 1), e_VNTO.flatten(0, 2)
    A = sum((torch.outer(a, a) for a in a_XI), a_XI.new_zeros(a_XI.shape[1], a_XI.shape[1])) / len(a_XI)
    B = sum((torch.outer(e, e) for e in e_XO), e_XO.new_zeros(e_XO.shape[1], e_XO.shape[1])) / num_rows
    return A, B


def individual(a_NTI: Tensor, e_VNTO: Tensor) -> Tensor:
    """V N x (O I): gradients of samples, a loop over positions."""
    rows = []
    for e_NTO in e_VNTO:
        for a_TI, e_TO in zip(a_NTI, e_NTO, strict=True):
            rows.append(sum((torch.outer(e, a) for e, a in zip(e_TO, a_TI, strict=True)),
                            e_TO.new_zeros(e_TO.shape[1], a_TI.shape[1])).flatten())
    return torch.stack(rows)


def fisher(a_NTI: Tensor, e_VNTO: Tensor, *, num_rows: int) -> Tensor:
    """(O I) x (O I): the layer's block of F."""
    g = individual(a_NTI, e_VNTO)
    return g.T @ g / num_rows


def ekfac(a_NTI: Tensor, e_VNTO: Tensor, G_OI: Tensor, damping: float, *, num_rows: int, sharing: str) -> Tensor:
    """U diag(U^T F U)^-1 U^T g with U = U_B (x) U_A and F of frames or of samples."""
    A, B = kronecker_factors(a_NTI, e_VNTO, num_rows=num_rows, sharing=sharing)
    U = torch.kron(torch.linalg.eigh(B)[1].contiguous(), torch.linalg.eigh(A)[1].contiguous())
    if sharing == "expand":
        a_NTI = a_NTI.flatten(0, 1)[:, None]
        e_VNTO = e_VNTO.flatten(1, 2)[:, :, None]
    F = fisher(a_NTI, e_VNTO, num_rows=num_rows)
    return (U @ ((U.T @ G_OI.flatten()) / ((U.T @ F @ U).diagonal() + damping))).view_as(G_OI)


def natural_gradient(F: Tensor, G: Tensor, damping: float) -> Tensor:
    """(F + d I)^-1 g."""
    direction: Tensor = torch.linalg.solve(F + damping * torch.eye(len(F), dtype=F.dtype), G.flatten()).view_as(G)
    return direction


def unit_blocks(F: Tensor, num_outputs: int) -> Tensor:
    """F without what lies between the rows of different outputs."""
    width = len(F) // num_outputs
    mask: Tensor = torch.block_diag(*[torch.ones(width, width, dtype=F.dtype)] * num_outputs)
    return F * mask


def shampoo(gradients: list[Tensor], ridge: float, *, decay: float | None) -> Tensor:
    """The last gradient (a matrix or a vector) with L^(-1/4) on the left and R^(-1/4) on the right,
    as one dense Kronecker product.

    `decay` None: sums of all gradients' products; else their moving average, the weights of which
    add up to 1.
    """
    G = gradients[-1]
    steps = len(gradients)
    raw = [1.0 if decay is None else (1.0 - decay) * decay ** (steps - 1 - step) for step in range(steps)]
    weights = raw if decay is None else [w / sum(raw) for w in raw]

    def power(L: Tensor, root: int) -> Tensor:
        values, U = torch.linalg.eigh(L)
        found: Tensor = U @ (values.clamp(min=0.0) + ridge * values.max()).pow(-1.0 / root).diag() @ U.T
        return found

    if G.ndim == 1:
        return power(sum((w * torch.outer(g, g) for w, g in zip(weights, gradients, strict=True)), G.new_zeros(())), 2) @ G
    L = sum((w * g @ g.T for w, g in zip(weights, gradients, strict=True)), G.new_zeros(()))
    R = sum((w * g.T @ g for w, g in zip(weights, gradients, strict=True)), G.new_zeros(()))
    return (torch.kron(power(L, 4).contiguous(), power(R, 4).contiguous()) @ G.flatten()).view_as(G)


def soap(gradients: list[Tensor], *, beta_1: float, beta_2: float, eps: float, look_every: int, basis_every: int) -> list[Tensor]:
    """The direction of every step (Vyas et al. 2024, algorithm 3); a vector's basis is the
    identity.

    The first gradient only begins L and R, whose eigenvectors are the first basis. A step's
    direction is taken in the basis of the steps before. Later bases are one round of power
    iteration, columns in falling order of their Rayleigh quotients, made orthogonal by
    Gram-Schmidt; v keeps to its columns, m stays in the original space.
    """
    first = gradients[0]
    m, v, directions = torch.zeros_like(first), torch.zeros_like(first), [torch.zeros_like(first)]
    sides = range(2 if first.ndim == 2 else 0)
    factors = [_second_moment(first, k) * (1.0 - beta_2) for k in sides]
    bases = [torch.linalg.eigh(L)[1] for L in factors]
    for step, G in enumerate(gradients[1:], start=1):
        m, v = beta_1 * m + (1.0 - beta_1) * G, beta_2 * v + (1.0 - beta_2) * _in_basis(G, bases).square()
        adam = (_in_basis(m, bases) / (1.0 - beta_1**step)) / ((v / (1.0 - beta_2**step)).sqrt() + eps)
        directions.append(_in_basis(adam, [Q.T for Q in bases]))
        if step % look_every == 0:
            factors = [beta_2 * factors[k] + (1.0 - beta_2) * _second_moment(G, k) for k in sides]
        if step % basis_every == 0:
            for k, (L, Q) in enumerate(zip(factors, bases, strict=True)):
                order = (Q.T @ L @ Q).diagonal().argsort(descending=True)
                bases[k], v = _gram_schmidt((L @ Q)[:, order]), v.index_select(k, order)
    return directions


def _second_moment(G: Tensor, side: int) -> Tensor:
    return G @ G.T if side == 0 else G.T @ G


def _in_basis(G: Tensor, bases: list[Tensor]) -> Tensor:
    return bases[0].T @ G @ bases[1] if bases else G


def _gram_schmidt(columns: Tensor) -> Tensor:
    """Twice, since once leaves the rounding of nearly dependent columns."""
    found: list[Tensor] = []
    for column in columns.T:
        rest = column
        for _ in range(2):
            rest = rest - sum((q * (q @ rest) for q in found), torch.zeros_like(rest))
            rest = rest / rest.norm()
        found.append(rest)
    return torch.stack(found, dim=1)


def adam(gradients: list[Tensor], *, beta_1: float, beta_2: float, eps: float) -> Tensor:
    """The last step's direction (Kingma and Ba 2015, algorithm 1)."""
    m = v = torch.zeros_like(gradients[0])
    for G in gradients:
        m, v = beta_1 * m + (1.0 - beta_1) * G, beta_2 * v + (1.0 - beta_2) * G * G
    t = len(gradients)
    return (m / (1.0 - beta_1**t)) / ((v / (1.0 - beta_2**t)).sqrt() + eps)
