"""Projection of the rows of several Fisher estimates of one shape in few device operations.

On a GPU the launch of an operation costs more than the GEMM of a narrow layer. Results equal those
of `OnlineNaturalGradient.begin` and `finish` up to the order of sums.

Letters: L estimates, N rows each, D dimension (without the appended 1), R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.natural_gradient import FisherState
from ngsgd.preconditioners.online import OnlineNaturalGradient


class GroupProjection(NamedTuple):
    """Projection of the rows [X | 1] of L estimates.

    The last field is None without an appended 1.
    """

    X_LND: Tensor
    H_LNR: Tensor
    Xhat_LND: Tensor
    one_hat_LN1: Tensor | None


class EstimateGroup:
    """L estimates with a common queue; call `project`, then `finish` for each minibatch."""

    def __init__(self, estimates: Sequence[OnlineNaturalGradient]) -> None:
        self._estimates = tuple(estimates)
        self._W_LRD: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()

    def project(self, X_LND: Tensor, one: Tensor | None) -> GroupProjection:
        """Project the rows onto the Fisher factors.

        Args:
            X_LND: rows.
            one: 0-d tensor 1 on the device, if a 1 is appended to the rows.
        """
        W_LRD = self._factors(X_LND)
        V_LRD = W_LRD[:, :, : X_LND.shape[2]]
        if one is None:
            H_LNR = torch.bmm(X_LND, V_LRD.mT)
            return GroupProjection(X_LND, H_LNR, torch.baddbmm(X_LND, H_LNR, V_LRD, alpha=-1), None)
        last_LR1 = W_LRD[:, :, -1:]
        H_LNR = torch.baddbmm(last_LR1.mT, X_LND, V_LRD.mT)
        one_hat_LN1 = torch.baddbmm(one.expand(1, 1, 1), H_LNR, last_LR1, alpha=-1)
        return GroupProjection(X_LND, H_LNR, torch.baddbmm(X_LND, H_LNR, V_LRD, alpha=-1),
                               one_hat_LN1)

    def finish(self, projection: GroupProjection, norm_L: Tensor, num_rows: float,
               loss_scale: Tensor | float) -> None:
        """Update the estimates that are due; `norm_L` is the Frobenius norm of the rows."""
        moving = [estimate.updates_now() for estimate in self._estimates]
        if any(moving):
            X_LND, H_LNR, _, one_hat_LN1 = projection
            J_LRD = torch.bmm(H_LNR.mT, X_LND)
            if one_hat_LN1 is not None:
                J_LRD = torch.cat([J_LRD, H_LNR.sum(dim=1)[:, :, None]], dim=2)
            KL_L2RR = torch.stack([torch.bmm(J_LRD, J_LRD.mT), torch.bmm(H_LNR.mT, H_LNR)], dim=1)
            sum_sq_L = norm_L.square()
            for number, estimate in enumerate(self._estimates):
                if moving[number]:
                    estimate.queue.add(estimate, J_LRD[number], KL_L2RR[number],
                                       (sum_sq_L[number], num_rows, loss_scale))
        for estimate in self._estimates:
            estimate.count_call()

    def _factors(self, like: Tensor) -> Tensor:
        """Return W of all estimates in one tensor, and make the estimates views of it."""
        states = [estimate.current(like) for estimate in self._estimates]
        if self._W_LRD is None or any(
                state.W_RD is not view for state, view in zip(states, self._views, strict=True)):
            self._W_LRD = torch.stack([state.W_RD for state in states])
            self._views = self._W_LRD.unbind()
            for estimate, state, view in zip(self._estimates, states, self._views, strict=True):
                estimate.hold(FisherState(view, state.d_R, state.rho))
        return self._W_LRD
