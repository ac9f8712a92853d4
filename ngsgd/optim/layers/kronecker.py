"""Natural gradient of a weight matrix from input rows and output-derivative rows.

The gradient is formed once, from preconditioned rows, inside the backward pass; hooks that
recompute it would need a second GEMM of the size of the layer. Source: arXiv 1410.7455, section 4.
Letters: N rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngsgd.ops import gemm
from ngsgd.ops.fisher_projection import PreconditionContext, row_norms, sum_sq_of_residual
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
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, one_N, num_rows = self.counted(X_NI, dY_NO)
        loss_scale = self.context.loss_scale()
        # The limit needs rows; in half precision, a correction after the GEMM would come after
        # rounding.
        needs_rows = self.context.sums_row_products or dtype != X_NI.dtype
        factors = not needs_rows and dY_NO.is_cpu and is_cheaper_factored(dY_NO.shape[0], X_NI.shape[1], dY_NO.shape[1])
        # Derivatives first: the input derivative has just read them, so they may still be cached.
        outputs = self.output_side.begin(dY_NO, num_rows=num_rows, loss_scale=loss_scale, corrects=not factors,
                                         scratch=None if factors else self.context.scratch.like("outputs", dY_NO))
        dYhat_NO, output_scale, correction = self.find_output_rows(outputs, dY_NO, factors)
        memory = self.context.scratch.like("inputs", X_NI)
        inputs = self.input_side.begin(X_NI, one_N, num_rows=num_rows, scratch=memory)
        # Both may be overwritten.
        Xhat_NI, one_hat_N, input_scale = (
            (memory.copy_(X_NI), None if one_N is None else one_N.clone(), 1.0) if inputs is None
            else inputs.preconditioned())
        scale = input_scale * output_scale
        if self.context.sums_row_products:
            self._sum_row_products(Xhat_NI, one_hat_N, dYhat_NO, num_rows, scale, loss_scale)
        gradient = _product(dYhat_NO, Xhat_NI, one_hat_N, scale, correction, dtype)
        if self.context.measures_cosine:
            plain_OI = dY_NO.T @ X_NI
            self.cosine = torch.nn.functional.cosine_similarity(gradient[0].view(-1), plain_OI.view(-1), dim=0)
        if inputs is not None:
            self.input_side.finish(inputs)
        if correction is not None:
            self.output_side.finish(correction)
        return gradient

    def shared_gradient(self, X_NI: Tensor, dY_NO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the plain gradients; keep the moments of the rows for the step."""
        dW_OI, db_O = gemm.mm(dY_NO.T.to(X_NI.dtype), X_NI), dY_NO.sum(dim=0)
        if self.bias is not None and not self.bias.requires_grad:
            self.context.shared.observe_bias(self, upcast(db_O) / self.context.loss_scale())
        X_NI, dY_NO = upcast(X_NI), upcast(dY_NO).contiguous()
        X_NI, one_N, num_rows = self.counted(X_NI, dY_NO)
        shared, keeps_rows = self.context.shared, self.context.sums_row_products
        one_N = one_N if self.input_side.dim != X_NI.shape[1] else None
        shared.observe(self.input_side, X_NI, one_N, num_rows, keeps_rows=keeps_rows)
        shared.observe(self.output_side, dY_NO, None, num_rows, keeps_rows=keeps_rows)
        return dW_OI, db_O if self.has_bias else None

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        assert self.leaf.grad is not None
        plain_OI = upcast(self.leaf.grad.T if self.is_transposed else self.leaf.grad.flatten(1))
        if self.bias is not None and self.bias.requires_grad and self.bias.grad is not None:
            db_O = self.bias.grad
        P_OD = plain_OI if db_O is None else torch.cat([plain_OI, db_O[:, None].to(plain_OI)], dim=1)
        P_OD = without_large_directions(P_OD, self.output_side, self.input_side)
        for scale in scales.values():
            P_OD = P_OD * scale
        dW_OI = P_OD[:, :plain_OI.shape[1]]
        if self.context.measures_cosine:
            self.cosine = torch.nn.functional.cosine_similarity(dW_OI.reshape(-1), plain_OI.reshape(-1), dim=0)
        self.leaf.grad.copy_(dW_OI.T if self.is_transposed else dW_OI.reshape(self.leaf.shape))
        if self.bias is not None and self.bias.requires_grad and self.bias.grad is not None:
            self.bias.grad.copy_(P_OD[:, -1])

    def find_output_rows(self, outputs: PreconditionContext | None, dY_NO: Tensor,
                     factors: bool) -> tuple[Tensor, Tensor | float, PreconditionContext | None]:
        """Precondition the output derivatives, or defer the correction to the weight gradient.

        Returns:
            (dYhat, gamma, None), or (dY, gamma, the call) if correcting the weight gradient is
            cheaper.
        """
        if outputs is None:
            return dY_NO, 1.0, None
        if factors and not self.output_side.is_polar:
            sum_sq_hat = sum_sq_of_residual(outputs.projection, self.output_side.gram())
            if sum_sq_hat is not None:
                return dY_NO, outputs.scale(sum_sq_hat), outputs
        dYhat_NO, _, scale = outputs.preconditioned(self.context.scratch.like("outputs", dY_NO))
        self.output_side.finish(outputs)
        return dYhat_NO, scale, None

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


def is_cheaper_factored(num_rows: int, num_inputs: int, num_outputs: int) -> bool:
    """Return whether dY^T Xhat - W^T (H^T Xhat) costs less than dYhat = dY - H W on a CPU."""
    # Both sides omit a factor 2 R.
    return num_inputs * (num_rows + num_outputs) < num_rows * num_outputs


def without_large_directions(u_OI: Tensor, outputs: OnlineNaturalGradient, inputs: OnlineNaturalGradient) -> Tensor:
    """Multiply u by the inverse Fisher matrices of both sides, up to a factor."""
    x_OI = upcast(u_OI)
    if (factors := inputs.factors) is not None:
        left_RI, right_RI = (factor.to(x_OI) for factor in factors)
        x_OI = torch.addmm(x_OI, x_OI @ left_RI.T, right_RI, alpha=-1)
    if (factors := outputs.factors) is not None:
        left_RO, right_RO = (factor.to(x_OI) for factor in factors)
        x_OI = torch.addmm(x_OI, right_RO.T, left_RO @ x_OI, alpha=-1)
    return x_OI.to(u_OI.dtype)


def _product(dYhat_NO: Tensor, Xhat_NI: Tensor, one_hat_N: Tensor | None, scale: Tensor | float,
             correction: PreconditionContext | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the (weight, bias) gradient; a `correction` of dY itself is made in R dimensions."""
    # Scale before the conversion to half precision, to stay in its range.
    if dtype != Xhat_NI.dtype:
        dW_OI = gemm.mm(dYhat_NO.to(dtype).T, Xhat_NI.mul_(scale).to(dtype)).to(Xhat_NI.dtype)
    else:
        taken_RI = None if correction is None else gemm.mm(correction.projection.H_NR.T, Xhat_NI).mul_(scale)
        dW_OI = gemm.scaled_mm(dYhat_NO.T, Xhat_NI, scale)
        if correction is not None and taken_RI is not None:
            dW_OI = gemm.sub_matmul(dW_OI, correction.estimate.right_RD.T, taken_RI, dW_OI)
    if one_hat_N is None:
        return dW_OI, None
    if correction is None:
        return dW_OI, gemm.scaled_mv(dYhat_NO.T, one_hat_N, scale)
    db_O = torch.mv(dYhat_NO.T, one_hat_N.mul_(scale))
    return dW_OI, db_O.addmv_(correction.estimate.right_RD.T, torch.mv(correction.projection.H_NR.T, one_hat_N), alpha=-1)
