"""Layers with plain gradients whose rows update Fisher estimates.

Optimizers such as NaturalMuon apply the estimates in their step. Letters: N rows, I inputs, O
outputs.
"""

from __future__ import annotations

from torch import Tensor

from ngsgd.optim.layers.common import FisherSettings, LayerContext, upcast
from ngsgd.optim.layers.convolution import SplicedPreconditioner
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner


class ObservedLinear(KroneckerPreconditioner):
    """Fisher estimates of input rows, without the 1 of the bias, and of derivative rows."""

    def __init__(self, context: LayerContext, num_inputs: int, num_outputs: int, has_bias: bool, settings: FisherSettings) -> None:
        super().__init__(context, num_inputs, num_outputs, False, settings)
        self.has_bias = has_bias

    def gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the plain (weight gradient O x I, bias gradient O or None)."""
        dW_OI = dY_NO.T @ X_NI
        db_O = dY_NO.sum(dim=0) if self.has_bias else None
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, _, num_rows = self.counted(X_NI, dY_NO)
        self.input_side.observe(X_NI, num_rows=num_rows)
        self.output_side.observe(dY_NO, num_rows=num_rows, loss_scale=self.context.loss_scale())
        return dW_OI, db_O


class ObservedTdnn(ObservedLinear, SplicedPreconditioner):
    """Fisher estimates of spliced input frames of a Conv1d with one group."""
