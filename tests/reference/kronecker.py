"""The natural gradient of an affine layer from two preconditioners that stand alone (section A3 of
the method).

Letters: N rows (frames), I inputs, O outputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ngsgd import OnlineNaturalGradient


class KroneckerReference:
    """scales * Yhat^T Xhat, of rows [X | 1] and dY; for a Conv1d X are the spliced inputs."""

    def __init__(self, num_inputs: int, num_outputs: int, *, has_bias: bool, expects_scales: bool = False) -> None:
        self.has_bias, self.expects_scales = has_bias, expects_scales
        # the 1 does not count
        self.input_side = OnlineNaturalGradient(min(20, (num_inputs + 1) // 2), update_period=4)
        self.output_side = OnlineNaturalGradient(min(80, (num_outputs + 1) // 2), update_period=4)

    def gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """(weight O x I, bias) gradients."""
        Xhat, dYhat = self.rows(X_NI, dY_NO)
        gradient = dYhat.T @ Xhat
        return (gradient[:, :-1], gradient[:, -1]) if self.has_bias else (gradient, None)

    def rows(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor]:
        """Preconditioned rows, scales included."""
        X1 = torch.cat([X_NI, torch.ones(len(X_NI), 1).to(X_NI)], dim=1) if self.has_bias else X_NI
        return self.scaled_rows(self.input_side, X1), self.scaled_rows(self.output_side, dY_NO)

    def scaled_rows(self, side: OnlineNaturalGradient, X_ND: Tensor) -> Tensor:
        """Preconditioned rows; gamma is the expected one of rows without update, if asked for."""
        expected = expected_scale(side) if self.expects_scales and not side.updates_now() else None
        Xhat, scale = side.precondition(X_ND)
        return Xhat * (scale if expected is None else expected)


def expected_scale(side: OnlineNaturalGradient) -> float:
    """sqrt(tr F / tr P F P) of dense D x D matrices, where rows become X P."""
    state = side.state
    assert state is not None
    W, d, rho = state.W_RD.double(), torch.from_numpy(state.d_R), state.rho
    dim = W.shape[1]
    beta = rho * (1.0 + side.smoothing.alpha) + side.smoothing.alpha / dim * float(d.sum())
    R = W / (d / (d + beta)).sqrt()[:, None]
    F = R.T @ torch.diag(d) @ R + rho * torch.eye(dim, dtype=torch.float64)
    P = torch.eye(dim, dtype=torch.float64) - W.T @ W
    return math.sqrt(float(F.trace()) / float((P @ F @ P).trace()))
