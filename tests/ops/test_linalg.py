"""Inverses, roots, solutions and quasi-Newton updates against dense ones in float64, and what
float32 is not enough for.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ngsgd.errors import DivergenceError
from ngsgd.ops.linalg import (
    bfgs_inverse,
    conjugate_gradients,
    damped_inverse,
    doubly_damped,
    eigh,
    inverse_root,
    less_upper_product,
    upper_gram,
    woodbury_rows,
)
from tests.preconditioners.problems import close
from tests.reference import quasi_newton as dense


def _spd(condition: float, dimension: int = 12) -> Tensor:
    U, _ = torch.linalg.qr(torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    spd: Tensor = U @ torch.logspace(0.0, -float(torch.log10(torch.tensor(condition))), dimension, dtype=torch.float64).diag() @ U.T
    return spd


def test_the_damped_inverse_is_that_of_the_damped_matrix() -> None:
    A = _spd(1e4)
    damped = A + 1e-3 * torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(damped_inverse(A, 1e-3) @ damped, torch.eye(12, dtype=torch.float64), rtol=0.0, atol=1e-11)


def test_matrices_that_float32_cannot_factorize_use_float64() -> None:
    A = torch.ones(2, 2)   # of rank 1, with a damping that float32 loses next to 1
    assert bool(torch.linalg.cholesky_ex(A + 1e-9 * torch.eye(2))[1])
    found = damped_inverse(A, 1e-9)
    assert found.dtype == torch.float32
    wanted = torch.linalg.inv(A.double() + 1e-9 * torch.eye(2, dtype=torch.float64)).float()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)   # condition 2e9 in float64


def test_non_finite_values_are_reported() -> None:
    bad = torch.full((3, 3), float("nan"))
    with pytest.raises(DivergenceError, match="positive"):
        damped_inverse(bad, 1.0)
    with pytest.raises(DivergenceError, match="eigenvalues"):
        eigh(bad)


@pytest.mark.parametrize("root", [2, 4, 6])
def test_inverse_roots(root: int) -> None:
    A = _spd(1e4)
    damped = A + 1e-6 * torch.eye(12, dtype=torch.float64)   # the largest eigenvalue is 1
    eye = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.matrix_power(inverse_root(A, root, 1e-6), root) @ damped, eye, rtol=0.0, atol=1e-9)


def test_woodbury() -> None:
    U, right = torch.randn(3, 12, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    wanted = torch.linalg.solve(U.T @ U + 0.1 * torch.eye(12, dtype=torch.float64), right)
    root = torch.linalg.cholesky(U @ U.T + 0.1 * torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(woodbury_rows(U, root, 0.1, right.T).T, wanted, rtol=1e-9, atol=1e-10)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _random_spd(size: int) -> Tensor:
    root = _drawn(size, size + 2)
    return root @ root.T


@pytest.mark.parametrize("curvature", [1.0, 0.01, -1.0], ids=["good", "flat", "negative"])
def test_a_damped_update_keeps_the_secant_and_the_definiteness(curvature: float) -> None:
    H, s = _random_spd(6), _drawn(6)
    y = curvature * torch.linalg.solve(_random_spd(6), s)
    wanted = dense.double_damping(H, s, y, 0.2, 0.1)
    s, y = doubly_damped(s, y, H @ y, least=0.2, damping=0.1)
    close(torch.stack([s, y]), torch.stack(wanted))
    updated = H.clone()
    assert bfgs_inverse(updated, s, y)
    close(updated, dense.bfgs(H, s, y))
    # one product of numbers up to |H| |y| in float64
    torch.testing.assert_close(updated @ y, s, rtol=0.0, atol=1e-14 * float(updated.norm() * y.norm()))
    assert float(torch.linalg.eigvalsh(updated)[0]) > 0.0


@pytest.mark.parametrize("bad", ["no curvature", "against it", "not finite", "too large"])
def test_an_update_that_would_spoil_the_inverse_is_refused(bad: str) -> None:
    H, s = _random_spd(6).float(), _drawn(6).float()
    y = {"no curvature": torch.zeros(6), "against it": -s, "not finite": s / 0.0, "too large": s * 1e-38}[bad]
    before = H.clone()
    assert not bfgs_inverse(H, 1e5 * s if bad == "too large" else s, y)
    assert torch.equal(H, before)


@pytest.mark.parametrize("size", [1, 5, 256, 300, 700])
def test_triangular_products_equal_full_ones(size: int) -> None:
    Q, t = _drawn(size, size).triu(), _drawn(size, size).triu()
    wanted = Q - t @ Q
    less_upper_product(Q, t)
    # sums of `size` products of numbers near 1 in float64
    torch.testing.assert_close(Q, wanted, rtol=0.0, atol=1e-13 * size)
    assert torch.equal(Q, Q.triu())
    out = torch.full((size, size), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(upper_gram(Q, out), wanted.T @ wanted, rtol=1e-12, atol=1e-12 * size**2)
    assert torch.equal(out, out.T)


def test_conjugate_gradients_solve_and_stop_at_negative_curvature() -> None:
    A, b = _random_spd(6), _drawn(6)
    x, taken = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-12)
    # residual 1e-12 |b|, and rounding at condition 1e3
    torch.testing.assert_close(A @ x, b, rtol=1e-9, atol=1e-9)
    assert taken <= 10
    again, more = conjugate_gradients(lambda v: A @ v, b, start_D=x, tolerance=1e-6)
    assert more == 1 and torch.equal(again, x)
    found, taken = conjugate_gradients(lambda v: -(A @ v), b)
    assert torch.equal(found, b) and taken == 1
