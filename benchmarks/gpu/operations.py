"""Every operation of `ngsgd.ops` that takes tensors, as a function that runs on any device in any
precision.

A test compares the list with the public functions; those that run on the host only are in
`HOST_ONLY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import averaging, fisher_projection, gemm, linalg, max_change, nonlinearities


class Draw:
    """Random tensors whose values do not depend on device and precision.

    >>> import torch
    >>> a, b = (Draw(torch.device("cpu"), dtype)(2, 3) for dtype in (torch.float32, torch.float64))
    >>> torch.equal(a.double(), b)
    True
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int) -> Tensor:
        return self._numbers(*shape).to(self.device, self.dtype)

    def _numbers(self, *shape: int) -> Tensor:
        # float32 values, which both precisions represent exactly
        return torch.randn(*shape, generator=self._generator)

    def definite(self, dim: int) -> Tensor:
        """Symmetric, with condition about 100."""
        rows = self(4 * dim, dim)
        return rows.T @ rows / (4 * dim) + 0.01 * torch.eye(
            dim, device=self.device, dtype=self.dtype
        )

    def orthonormal_rows(self, num_rows: int, dim: int) -> Tensor:
        """Rows of norm 0.9, like W of an estimate."""
        # on the CPU, because other libraries choose other signs
        q: Tensor = torch.linalg.qr(self._numbers(dim, num_rows).double())[0].T
        return (0.9 * q).to(self.device, self.dtype).contiguous()

    def full(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device, dtype=self.dtype)


def _project(draw: Draw) -> Any:
    X, one, W = (
        draw(64, 300),
        torch.ones(64, device=draw.device, dtype=draw.dtype),
        draw.orthonormal_rows(20, 301),
    )
    found = fisher_projection.project(X, W, one)
    return found.H_NR, found.Xhat_ND, found.one_hat_N, found.sum_sq, found.sum_sq_hat


def _with_residual(draw: Draw) -> Any:
    X, W = draw(64, 300), draw.orthonormal_rows(20, 300)
    held = fisher_projection.Projection(
        fisher_projection.sum_of_squares(X), fisher_projection.coefficients(X, W)
    )
    return fisher_projection.with_residual(held, X, W).Xhat_ND


def _add_mm(draw: Draw) -> Tensor:
    total = draw(30, 40)
    gemm.add_mm(total, draw(30, 300), draw(300, 40), keep=0.5, scale=2.0)
    return total


def _less_upper(draw: Draw) -> Tensor:
    Q = torch.triu(draw(90, 90))
    linalg.less_upper_product(Q, torch.triu(0.1 * draw(90, 90)))
    return Q


def _conjugate_gradients(draw: Draw) -> Tensor:
    A = draw.definite(20)
    return linalg.conjugate_gradients(lambda v: A @ v, draw(20), max_steps=60, tolerance=1e-7)[0]


def _bfgs(draw: Draw) -> Tensor:
    H, s = draw.definite(12), draw(12)
    linalg.bfgs_inverse(H, s, draw.definite(12) @ s)
    return H


def _woodbury(draw: Draw) -> Tensor:
    U = draw(10, 50)
    root = linalg.damped_cholesky(U @ U.T, 0.5)
    return linalg.woodbury_rows(U, root, 0.5, draw(6, 50))


def _limits(draw: Draw) -> Any:
    return max_change.max_change_limits(draw(5).abs(), draw(5).abs(), 0.7).factors_C


def _average(draw: Draw) -> Any:
    return averaging.average_parameters([{"w": draw(30, 4)}, {"w": draw(30, 4)}], [1.0, 3.0])


OPERATIONS: dict[str, Callable[[Draw], Any]] = {
    "averaging.average_parameters": _average,
    "fisher_projection.project": _project,
    "fisher_projection.with_residual": _with_residual,
    "fisher_projection.sum_of_squares": lambda draw: fisher_projection.sum_of_squares(
        draw(64, 300), draw(64)
    ),
    "fisher_projection.coefficients": lambda draw: fisher_projection.coefficients(
        draw(64, 300), draw(20, 301), draw(64)
    ),
    "gemm.mm": lambda draw: gemm.mm(draw(200, 300), draw(300, 250)),
    "gemm.scaled_mm": lambda draw: gemm.scaled_mm(draw(200, 300), draw(300, 250), draw.full(0.3)),
    "gemm.scaled_mv": lambda draw: gemm.scaled_mv(draw(200, 300), draw(300), draw.full(0.3)),
    "gemm.sub_matmul": lambda draw: gemm.sub_matmul(draw(200, 250), draw(200, 30), draw(30, 250)),
    "gemm.linear": lambda draw: gemm.linear(draw(4, 50, 300), draw(250, 300), draw(250)),
    "gemm.input_gradient": lambda draw: gemm.input_gradient(draw(4, 50, 250), draw(250, 300)),
    "gemm.add_mm": _add_mm,
    "linalg.damped_inverse": lambda draw: linalg.damped_inverse(draw.definite(40), 0.1),
    "linalg.damped_cholesky": lambda draw: linalg.damped_cholesky(draw.definite(40), 0.1),
    "linalg.eigh": lambda draw: linalg.eigh(draw.definite(40))[0],
    "linalg.inverse_root": lambda draw: linalg.inverse_root(draw.definite(40), 4, 1e-6),
    "linalg.woodbury_rows": _woodbury,
    "linalg.less_upper_product": _less_upper,
    "linalg.upper_gram": lambda draw: linalg.upper_gram(
        torch.triu(draw(90, 90)), torch.empty_like(draw(90, 90))
    ),
    "linalg.conjugate_gradients": _conjugate_gradients,
    "linalg.doubly_damped": lambda draw: linalg.doubly_damped(
        draw(9), draw(9), draw(9), least=0.2, damping=0.1
    ),
    "linalg.bfgs_inverse": _bfgs,
    "max_change.max_change_limits": _limits,
    "max_change.row_product_factor": lambda draw: max_change.row_product_factor(
        draw.full(3.0), 64.0, 0.1, 0.001
    ),
    "nonlinearities.p_norm": lambda draw: nonlinearities.p_norm(draw(64, 200), 10),
    "nonlinearities.p_norm_gradient": lambda draw: nonlinearities.p_norm_gradient(
        x := draw(64, 200), nonlinearities.p_norm(x, 10), draw(64, 20), 10
    ),
    "nonlinearities.renormalize": lambda draw: nonlinearities.renormalize(draw(64, 200), 1.0),
    "nonlinearities.renormalize_gradient": lambda draw: nonlinearities.renormalize_gradient(
        draw(64, 200), draw(64, 200), 1.0
    ),
    "nonlinearities.inverse_rms": lambda draw: nonlinearities.inverse_rms(draw(64, 200), 1.0),
}
# compared with tests/reference and Kaldi's vectors through the classes that use them
THROUGH_CLASSES = ("natural_gradient", "orthonormal", "polar_update", "simple_natural_gradient")
# NumPy, C++ for the CPU, contexts and views
HOST_ONLY = (
    "fisher_projection.sum_sq_of_residual",
    "fisher_projection.row_norms",
    "linalg.shared_damping",
    "linalg.split_damping",
    "averaging.pool_variances",
    "averaging.mean_of_chunk",
    "averaging.shares_of",
    "averaging.is_statistic",
    "compression",
    "tensors",
    "second_derivatives",
    "gemm.rows_of",
    "gemm.is_there",
    "gemm.is_faster",
    "fisher_projection.is_native",
    "fisher_projection.workspace_size",
    "fisher_projection.load_library",
    "nonlinearities.is_native",
    "nonlinearities.load_library",
)
