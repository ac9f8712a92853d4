"""Curvature from its definitions: one backward pass per sample and per output, in float64, and
dense matrices.

Nothing here is shared with ngsgd.curvature: Jacobians come from autograd, one output number of one
sample at a time, and the derivatives of the loss with respect to the output from autograd too.

Letters: N samples, F outputs of a sample (all its frames), P elements of a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]   # of the complete minibatch's output


def gradients(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """N x P of every parameter: the gradient of each sample's loss."""
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad),
                            strict=True)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for name, p, g in zip(names, parameters, found, strict=True):
            rows[name].append(torch.zeros_like(p).flatten() if g is None else g.flatten())
    return {name: torch.stack(g) for name, g in rows.items()}


def jacobians(model: nn.Module, x: Tensor, num_samples: int) -> dict[str, Tensor]:
    """N x F x P of every parameter: the outputs of sample n with respect to the parameter."""
    f_NF = model(x).reshape(num_samples, -1)
    return {name: rows.view(*f_NF.shape, -1) for name,
            rows in gradients(model, f_NF.flatten()).items()}


def loss_derivatives(loss: Loss, output: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """(N x F, N x F x F): first and second derivative of the loss by each sample's output."""
    f = output.detach().requires_grad_()
    (d,) = torch.autograd.grad(loss(f), f, create_graph=True)
    d_NF = d.reshape(num_samples, -1)
    N, F = d_NF.shape
    H_NFF = f.new_zeros(N, F, F)
    for i in range(F):
        if not d_NF.requires_grad:
            break
        (row,) = torch.autograd.grad(d_NF[:, i].sum(), f, retain_graph=True, allow_unused=True)
        if row is not None:
            H_NFF[:, i] = row.reshape(N, F)
    return d_NF.detach(), H_NFF


def individual_gradients(J: dict[str, Tensor], d_NF: Tensor) -> dict[str, Tensor]:
    """N x P."""
    return {name: torch.einsum("nf,nfp->np", d_NF, J_NFP) for name, J_NFP in J.items()}


def ggn_blocks(J: dict[str, Tensor], H_NFF: Tensor) -> dict[str, Tensor]:
    """N x P x P of every parameter: J^T H J of each sample."""
    return {name: torch.einsum("nfp,nfg,ngq->npq", J_NFP, H_NFF, J_NFP) for name, J_NFP in J.items()}


def ggn(model: nn.Module, output: Callable[[int], Tensor], loss: Callable[[int, Tensor], Tensor],
        num_samples: int) -> dict[str, Tensor]:
    """The same from one scalar loss of each sample, which need not be an index of one output."""
    blocks: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for n in range(num_samples):
        f_F = output(n).flatten()
        J = gradients(model, f_F)
        H_FF = torch.autograd.functional.hessian(lambda f, n=n: loss(n, f), f_F.detach())
        for name, J_FP in J.items():
            blocks[name].append(J_FP.T @ H_FF @ J_FP)
    return {name: torch.stack(each) for name, each in blocks.items()}


def hessian_blocks(model: nn.Module, loss: Loss, x: Tensor, *, rows_together: bool = True) -> dict[str, Tensor]:
    """P x P of every parameter; a row at a time where torch needs it (group norm)."""
    value = loss(model(x))
    blocks = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            (gradient,) = torch.autograd.grad(value, p, create_graph=True)
            blocks[name] = p.new_zeros(p.numel(), p.numel())
            if gradient.requires_grad:
                unit_PP = torch.eye(p.numel(), dtype=p.dtype).view(-1, *p.shape)
                differentiate = functools.partial(torch.autograd.grad, gradient, p, retain_graph=True, allow_unused=True)
                rows = [differentiate(unit_PP, is_grads_batched=True)[0]] if rows_together else [
                    differentiate(unit_P)[0] for unit_P in unit_PP]
                if rows[0] is not None:
                    blocks[name] = torch.cat([row.reshape(-1, p.numel()) for row in rows])
    return blocks


def kronecker_factors(rows_NTI: Tensor, J_NFTO: Tensor, H_NFF: Tensor, sharing: str) -> tuple[Tensor, Tensor]:
    """(B, A) by the three ways of treating positions."""
    N, T, I = rows_NTI.shape  # noqa: E741
    B = J_NFTO.new_zeros(J_NFTO.shape[-1], J_NFTO.shape[-1])
    A = rows_NTI.new_zeros(I, I)
    for n in range(N):
        if sharing == "expand":
            for t in range(T):
                B += J_NFTO[n, :, t].T @ H_NFF[n] @ J_NFTO[n, :, t]
                A += torch.outer(rows_NTI[n, t], rows_NTI[n, t]) / (N * T)
            continue
        summed_FO = J_NFTO[n].sum(dim=1)
        B += summed_FO.T @ H_NFF[n] @ summed_FO
        if sharing == "reduce":
            mean_I = rows_NTI[n].mean(dim=0)
            A += torch.outer(mean_I, mean_I) / N
        else:
            A += rows_NTI[n].T @ rows_NTI[n] / N
    return B, A


def recursion_of_averages(modules: list[nn.Module], x: Tensor, H_NFF: Tensor) -> list[Tensor]:
    """Gbar at the output of every module of a chain, from dense Jacobians of each sample."""
    inputs = [x]
    for module in modules:
        inputs.append(module(inputs[-1]).detach())
    G = H_NFF.sum(dim=0)
    found = []
    for module, rows in zip(reversed(modules), reversed(inputs[:-1]), strict=True):
        found.append(G)
        D = rows[0].numel()
        total = rows.new_zeros(D, D)
        for row in rows:
            jacobian = torch.autograd.functional.jacobian(lambda r, module=module: module(r[None])[0], row)
            J = jacobian.reshape(len(G), D)
            total += J.T @ G @ J / len(rows)
        G = total
    return found[::-1]
