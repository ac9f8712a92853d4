"""The natural gradient of an affine layer from two preconditioners that stand alone (section A3 of
the method).

Letters: N rows (frames), I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd import OnlineNaturalGradient


class KroneckerReference:
    """scales * Yhat^T Xhat, of rows [X | 1] and dY; for a Conv1d X are the spliced inputs."""

    def __init__(self, num_inputs: int, num_outputs: int, *, has_bias: bool) -> None:
        self.has_bias = has_bias
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
        Xhat, input_scale = self.input_side.precondition(X1)
        dYhat, output_scale = self.output_side.precondition(dY_NO)
        return input_scale * Xhat, output_scale * dYhat
