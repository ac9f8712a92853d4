"""Natural gradient of a weight matrix from input rows and output-derivative rows.

The gradient is formed once, from preconditioned rows, inside the backward pass; hooks that
recompute it would need a second GEMM of the size of the layer. Source: arXiv 1410.7455, section 4.

With many more rows than columns on a CPU, the plain gradient P is preconditioned instead, which is
the same: (1 - V^T V) P (1 - W^T W). Only minibatches that update an estimate then project its rows;
the scale gamma (38) of others is that of rows whose scatter matrix is the estimate.
Letters: N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.ops.fisher_projection import row_norms
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.layers.common import FisherSettings, LayerContext, LayerPreconditioner, upcast


class KroneckerPreconditioner(LayerPreconditioner):
    """Fisher estimates of input rows with an appended 1 for the bias, and of derivative rows."""

    def __init__(self, context: LayerContext, num_inputs: int, num_outputs: int, has_bias: bool,
                 settings: FisherSettings) -> None:
        # Kaldi does not count the appended 1.
        rank_in = min(settings.rank_in, (num_inputs + 1) // 2)
        self.input_side = context.preconditioner(rank_in, num_inputs + has_bias, settings)
        self.output_side = context.preconditioner(settings.rank_out, num_outputs, settings)
        super().__init__(context, {"input": self.input_side, "output": self.output_side})
        self.has_bias = has_bias

    def gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (weight gradient O x I, bias gradient O or None), preconditioned on both sides."""
        if self.is_shared:
            return self.shared_gradient(X_NI, dY_NO)
        dtype = X_NI.dtype
        if dtype == upcast(X_NI).dtype and self.may_expect_scales(X_NI.is_cpu, len(X_NI)):
            return self._of_plain_gradient(X_NI, dY_NO)
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, one_N, num_rows = self.counted(X_NI, dY_NO)
        loss_scale = self.context.loss_scale()
        # Derivatives first: the input derivative has just read them, so they may still be cached.
        outputs = self.output_side.begin(dY_NO, num_rows=num_rows, loss_scale=loss_scale,
                                         scratch=self.context.scratch.like("outputs", dY_NO))
        dYhat_NO, _, output_scale = (dY_NO, None, 1.0) if outputs is None else outputs.preconditioned()
        if outputs is not None:
            self.output_side.finish(outputs)
        memory = self.context.scratch.like("inputs", X_NI)
        inputs = self.input_side.begin(X_NI, one_N, num_rows=num_rows, scratch=memory)
        # Both may be overwritten.
        Xhat_NI, one_hat_N, input_scale = (
            (memory.copy_(X_NI), None if one_N is None else one_N.clone(), 1.0) if inputs is None
            else inputs.preconditioned())
        scale = input_scale * output_scale
        if self.context.sums_row_products:
            self._sum_row_products(Xhat_NI, one_hat_N, dYhat_NO, num_rows, scale, loss_scale)
        gradient = _product(dYhat_NO, Xhat_NI, one_hat_N, scale, dtype)
        if self.context.measures_cosine:
            self._measure_cosine(gradient[0], dY_NO.T @ X_NI)
        if inputs is not None:
            self.input_side.finish(inputs)
        return gradient

    def num_plain_products(self) -> int:
        (rank_in, num_columns), (rank_out, num_outputs) = (side.shape for side in self.sides.values())
        return num_columns * num_outputs * (rank_in + rank_out)

    def _of_plain_gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        P_OD, one_N = self._plain_gradient(X_NI, dY_NO)
        rows = {self.output_side: (dY_NO, None, self.context.loss_scale()), self.input_side: (X_NI, one_N, 1.0)}
        moments, scale = {}, 1.0
        for side, (rows_ND, appended_N, loss_scale) in rows.items():
            moments[side] = side.moments_of(rows_ND, appended_N, loss_scale=loss_scale)
            scale *= side.scale_of(moments[side])
        found_OD = preconditioned(P_OD, self.output_side, self.input_side)
        num_inputs = X_NI.shape[1]
        self._measure_cosine(found_OD[:, :num_inputs], P_OD[:, :num_inputs])
        for side, own in moments.items():
            side.finish_moments(own)
        return found_OD[:, :num_inputs] * scale, found_OD[:, -1] * scale if self.has_bias else None

    def _plain_gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [dW | db], and the column of ones of the inputs."""
        if not self.has_bias:
            return gemm.mm(dY_NO.T, X_NI), None
        P_OD = X_NI.new_empty(dY_NO.shape[1], X_NI.shape[1] + 1)
        gemm.mm(dY_NO.T, X_NI, out=P_OD[:, :-1])
        torch.sum(dY_NO, dim=0, out=P_OD[:, -1])
        return P_OD, self.context.scratch.ones(X_NI)

    def _measure_cosine(self, gradient_OI: Tensor, plain_OI: Tensor) -> None:
        if self.context.measures_cosine:
            self.cosine = torch.nn.functional.cosine_similarity(gradient_OI.reshape(-1), plain_OI.reshape(-1), dim=0)

    def shared_gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the plain gradients; keep the moments of the rows for the step."""
        dW_OI, db_O = gemm.mm(dY_NO.T.to(X_NI.dtype), X_NI), dY_NO.sum(dim=0)
        if self.bias is not None and not self.bias.requires_grad:
            self.context.shared.observe_bias(self, upcast(db_O) / self.context.loss_scale())
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, one_N, num_rows = self.counted(X_NI, dY_NO)
        shared, keeps_rows = self.context.shared, self.context.sums_row_products
        one_N = one_N if self.input_side.dim != X_NI.shape[1] else None
        needs_scale = not self.may_expect_scales(X_NI.is_cpu, len(X_NI))
        shared.observe(self.input_side, X_NI, one_N, num_rows, keeps_rows=keeps_rows, needs_scale=needs_scale)
        shared.observe(self.output_side, dY_NO, None, num_rows, keeps_rows=keeps_rows, needs_scale=needs_scale)
        return dW_OI, db_O if self.has_bias else None

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        assert self.leaf.grad is not None
        plain_OI = upcast(self.leaf.grad.T if self.is_transposed else self.leaf.grad.flatten(1))
        if self.bias is not None and self.bias.requires_grad and self.bias.grad is not None:
            db_O = self.bias.grad
        P_OD = plain_OI if db_O is None else torch.cat([plain_OI, db_O[:, None].to(plain_OI)], dim=1)
        P_OD = preconditioned(P_OD, self.output_side, self.input_side) * math.prod(scales.values())
        dW_OI = P_OD[:, :plain_OI.shape[1]]
        self._measure_cosine(dW_OI, plain_OI)
        self.leaf.grad.copy_(dW_OI.T if self.is_transposed else dW_OI.reshape(self.leaf.shape))
        if self.bias is not None and self.bias.requires_grad and self.bias.grad is not None:
            self.bias.grad.copy_(P_OD[:, -1])

    def counted(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None, Tensor | float]:
        """Return (input rows, appended column, their number), if requested no zero derivatives."""
        if not self.context.ignore_zero_rows:
            return X_NI, self.context.scratch.ones(X_NI) if self.has_bias else None, float(X_NI.shape[0])
        counts_N = (dY_NO != 0).any(dim=1).to(X_NI.dtype)
        return X_NI * counts_N[:, None], counts_N if self.has_bias else None, counts_N.sum()

    def _sum_row_products(self, Xhat_NI: Tensor, one_hat_N: Tensor | None, dYhat_NO: Tensor, num_rows: Tensor | float,
                          scale: Tensor | float, loss_scale: Tensor | float) -> None:
        norms_N = row_norms(Xhat_NI, one_hat_N)
        total = torch.dot(norms_N, torch.linalg.vector_norm(dYhat_NO, dim=1)) * scale / loss_scale
        self.row_products = total if self.row_products is None else self.row_products + total
        self.num_rows = self.num_rows + num_rows


class ObservedLinear(KroneckerPreconditioner):
    """Fisher estimates of input rows, without the 1 of the bias, and of derivative rows.

    Gradients are plain; optimizers such as NaturalMuon apply the estimates in their step.
    """

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        """Leave the gradient plain."""

    def __init__(self, context: LayerContext, num_inputs: int, num_outputs: int, has_bias: bool, settings: FisherSettings) -> None:
        super().__init__(context, num_inputs, num_outputs, False, settings)
        self.has_bias = has_bias

    def gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the plain (weight gradient O x I, bias gradient O or None)."""
        if self.is_shared:
            return self.shared_gradient(X_NI, dY_NO)
        dW_OI = dY_NO.T @ X_NI
        db_O = dY_NO.sum(dim=0) if self.has_bias else None
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, _, num_rows = self.counted(X_NI, dY_NO)
        self.input_side.observe(X_NI, num_rows=num_rows)
        self.output_side.observe(dY_NO, num_rows=num_rows, loss_scale=self.context.loss_scale())
        return dW_OI, db_O


def preconditioned(P_OD: Tensor, outputs: OnlineNaturalGradient, inputs: OnlineNaturalGradient) -> Tensor:
    """Multiply P by the inverse Fisher matrices of both sides, up to a factor."""
    x_OD = upcast(P_OD)
    if (factors := inputs.factors) is not None:
        left_RD, right_RD = (factor.to(x_OD) for factor in factors)
        x_OD = gemm.sub_matmul(x_OD, gemm.mm(x_OD, left_RD.T), right_RD)
    if (factors := outputs.factors) is not None:
        left_RO, right_RO = (factor.to(x_OD) for factor in factors)
        x_OD = gemm.sub_matmul(x_OD, right_RO.T, gemm.mm(left_RO, x_OD))
    return x_OD.to(P_OD.dtype)


def _product(dYhat_NO: Tensor, Xhat_NI: Tensor, one_hat_N: Tensor | None, scale: Tensor | float,
             dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the (weight, bias) gradient; overwrites the rows."""
    # Scale before the conversion to half precision, to stay in its range.
    dW_OI = (gemm.scaled_mm(dYhat_NO.T, Xhat_NI, scale) if dtype == Xhat_NI.dtype
             else gemm.mm(dYhat_NO.to(dtype).T, Xhat_NI.mul_(scale).to(dtype)).to(Xhat_NI.dtype))
    return dW_OI, None if one_hat_N is None else gemm.scaled_mv(dYhat_NO.T, one_hat_N, scale)
