"""Properties of the online preconditioner for all rows: symmetries, degenerate rows, masks,
schedules, states.

Letters: N rows, D dimension, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd import OnlineNaturalGradient
from ngsgd.errors import DivergenceError
from ngsgd.ops.natural_gradient import reorthogonalized
from ngsgd.optim.fisher.update_queue import UpdateQueue
from tests.reference.online_natural_gradient import DenseFisher

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
EPSILON, DELTA = 1e-10, 5e-4  # the floors of d and rho, absolute and relative
# Both sides in float64. Z squares the condition number of the Fisher matrix, at most about 1 /
# DELTA, and the smallest eigenvalues are floored relative to the largest. So 1e-16 * 4e6 and a few
# calls of it
EXACT = 1e-8


def rows(num: int, dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Correlated rows: a few strong directions, and noise."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(num, 3, generator=generator).double() @ torch.randn(3, dim, generator=generator).double()
    return (2.0 * strong + torch.randn(num, dim, generator=generator).double()).to(dtype)


def warmed(dim: int, seed: int, dtype: torch.dtype = torch.float64, **options: Any) -> OnlineNaturalGradient:
    """An estimate after three minibatches, which no longer depends on the noise of the start."""
    ng = OnlineNaturalGradient(**{"rank": 4, **options})
    for t in range(3):
        ng.precondition(rows(40, dim, 1000 + 7 * seed + t, dtype))
    return ng


def copied(ng: OnlineNaturalGradient, *, change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
           **options: Any) -> OnlineNaturalGradient:
    """Another object with the same estimate, or with a changed one."""
    settings_of = {"rank": ng.rank, "update_period": ng.update_period, "num_samples_history": ng.num_samples_history,
                   "alpha": ng.smoothing.alpha, "schedule": ng.schedule, "on_nonfinite": ng.on_nonfinite}
    copy = OnlineNaturalGradient(**{**settings_of, **options})
    copy.load_state_dict(change(ng.state_dict()))
    return copy


def assert_close(ours: Tensor | float, theirs: Tensor | float, tolerance: float = EXACT) -> None:
    """Relative to the norm of the reference."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    error = float((ours - theirs).norm())
    assert error <= tolerance * float(theirs.norm()), error


def assert_same_state(ours: OnlineNaturalGradient, theirs: OnlineNaturalGradient, tolerance: float = EXACT, *,
                      size: float = 1.0, rotation: Tensor | None = None) -> None:
    """d, rho and W^T W, independent of the rows of W; `size` times theirs, and rotated."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["t"] == other["t"]
    assert_close(mine["d"], size * other["d"], tolerance)
    trace = float(other["rho"]) + float(other["d"].sum()) / other["W"].shape[1]
    assert abs(float(mine["rho"]) - size * float(other["rho"])) <= tolerance * size * trace
    W_RD = other["W"] if rotation is None else other["W"] @ rotation
    assert_close(mine["W"].T @ mine["W"], W_RD.T @ W_RD, tolerance)


def assert_equal_bits(ours: OnlineNaturalGradient, theirs: OnlineNaturalGradient) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["t"] == other["t"]
    assert all(torch.equal(mine[key], other[key]) for key in ("W", "d", "rho"))


def is_moved(before: dict[str, Any], ng: OnlineNaturalGradient) -> bool:
    return not torch.equal(before["W"], ng.state_dict()["W"])


def spread_e(state: dict[str, Any], alpha: float) -> Tensor:
    """e_i of (43), written out once more."""
    D = state["W"].shape[1]
    beta = float(state["rho"]) * (1 + alpha) + alpha / D * float(state["d"].sum())
    e_R: Tensor = 1 / (beta / state["d"] + 1)
    return e_R


def assert_sound(ng: OnlineNaturalGradient) -> None:
    """Finite, above the floors, rows of R orthonormal."""
    state = ng.state_dict()
    # in float64 what Kaldi lets pass before it makes the rows orthonormal again. It looks only
    # where the eigenvalues of Z are more than 1e6 apart, and up to there rounding of K to float32
    # leaves 6e-8 * 1e6 in the row of the smallest
    orthogonality, slack = (1e-3, 1e-9) if state["W"].dtype == torch.float64 else (0.1, 1e-2)
    W_RD, d_R, rho = state["W"].double(), state["d"], float(state["rho"])
    assert bool(torch.isfinite(W_RD).all() and torch.isfinite(d_R).all()) and math.isfinite(rho)
    # d_1 = sqrt(c_1) - rho' <= sqrt(c_1), since rho' is never below 0 by more than rounding of the
    # same kind
    floor = max(EPSILON, DELTA * float(d_R.max()) * (1 - slack))
    assert float(d_R.min()) >= floor and rho >= floor
    R_RD = W_RD / spread_e(state, ng.smoothing.alpha).sqrt()[:, None]
    assert float((R_RD @ R_RD.T - torch.eye(len(d_R)).double()).abs().max()) <= orthogonality


# ------------------------------------------------------------------ the dense reference, symmetries

@settings(max_examples=40, deadline=None)
@given(dim=st.integers(3, 14), rank=st.integers(1, 8), num_rows=st.integers(2, 40),
       alpha=st.sampled_from([0.1, 1.0, 4.0, 10.0]), seed=st.integers(0, 10_000))
def test_equals_the_dense_reference(dim: int, rank: int, num_rows: int, alpha: float, seed: int) -> None:
    fast = OnlineNaturalGradient(rank, alpha=alpha)
    for t in range(3):  # away from the start, where float noise decides directions
        fast.precondition(rows(num_rows + 20, dim, seed + t))
    state = fast.state_dict()
    dense = DenseFisher.from_w(state["W"].numpy(), state["d"].numpy(), float(state["rho"]), alpha=alpha)
    eta = min(0.9, 1 - math.exp(-num_rows / 2000))
    for t in range(10, 15):
        X = rows(num_rows, dim, seed + t)
        xhat, scale = fast.precondition(X)
        dense_xhat, gamma = dense.precondition(X.numpy())
        dense.update(X.numpy(), eta)
        # both float64; Z squares the condition number of the Fisher matrix, at most 1 / delta =
        # 2000, so 1e-16 * 4e6
        np.testing.assert_allclose(xhat.numpy(), dense_xhat, rtol=1e-7, atol=1e-8 * float(X.abs().max()))
        np.testing.assert_allclose(float(scale), gamma, rtol=1e-7)
    W = fast.state_dict()["W"].numpy()
    np.testing.assert_allclose(W.T @ W, dense.W.T @ dense.W, rtol=1e-6, atol=1e-7)


def test_strong_directions_are_shortened_relative_to_weak_ones() -> None:
    ng = OnlineNaturalGradient(2, alpha=0.1)
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([10.0, 1.0, 1.0, 1.0])
    for _ in range(20):
        X = torch.randn(200, 4, generator=generator) * size
        xhat, _ = ng.precondition(X)
    ratio = xhat.norm(dim=0) / X.norm(dim=0)
    assert ratio[0] < 0.1 * ratio[1:].min()


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 60), dim=st.integers(1, 20), rank=st.integers(1, 25), period=st.integers(1, 4),
       alpha=st.sampled_from([0.0, 0.1, 4.0]), seed=st.integers(0, 10_000), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_scaled_result_keeps_the_frobenius_norm(num: int, dim: int, rank: int, period: int, alpha: float, seed: int,
                                                    dtype: torch.dtype) -> None:
    ng = OnlineNaturalGradient(rank, period, alpha=alpha)
    for t in range(4):
        X = rows(num, dim, seed + t, dtype)
        xhat, scale = ng.precondition(X)
        # two sums of up to 1200 squares in the dtype of the rows
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        assert float((scale.double() * xhat.double()).norm()) == pytest.approx(float(X.double().norm()), rel=tolerance)


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(5, 15), alpha=st.sampled_from([0.1, 4.0]), seed=st.integers(0, 10_000))
def test_rotated_rows_give_rotated_results(num: int, dim: int, alpha: float, seed: int) -> None:
    plain = warmed(dim, seed, alpha=alpha)
    Q_DD: Tensor = torch.linalg.qr(rows(dim, dim, seed + 1))[0]
    rotated = copied(plain, change=lambda state: {**state, "W": state["W"] @ Q_DD})
    for t in range(3):
        X = rows(num, dim, seed + t)
        (xhat, scale), (xhat_rotated, scale_rotated) = plain.precondition(X), rotated.precondition(X @ Q_DD)
        assert_close(xhat_rotated, xhat @ Q_DD)
        assert_close(scale_rotated, scale)
    assert_same_state(rotated, plain, rotation=Q_DD)


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 40), power=st.integers(-3, 3), seed=st.integers(0, 10_000))
def test_the_unit_of_the_rows_does_not_matter(num: int, power: int, seed: int) -> None:
    unit = 2.0**power
    plain = warmed(8, seed)
    scaled = copied(plain, change=lambda state: {**state, "d": unit**2 * state["d"], "rho": unit**2 * state["rho"]})
    for t in range(3):
        X = rows(num, 8, seed + t)
        (xhat, scale), (xhat_scaled, scale_scaled) = plain.precondition(X), scaled.precondition(unit * X)
        assert_close(xhat_scaled, unit * xhat)
        assert_close(scale_scaled, scale)
    assert_same_state(scaled, plain, size=unit**2)


@settings(max_examples=20, deadline=None)
@given(num=st.integers(2, 40), seed=st.integers(0, 10_000))
def test_the_order_of_the_rows_does_not_matter(num: int, seed: int) -> None:
    plain = warmed(8, seed)
    shuffled = copied(plain)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    for t in range(2):
        X = rows(num, 8, seed + t)
        (xhat, _), (xhat_shuffled, _) = plain.precondition(X), shuffled.precondition(X[order])
        assert_close(xhat_shuffled, xhat[order])
    assert_same_state(shuffled, plain)


# ---------------------------------------------------------------------------------- degenerate rows

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda X: X,
    "zeros": torch.zeros_like,
    "rank_1": lambda X: X[:, :1] * X[:1],
    "duplicates": lambda X: X[:1].repeat(len(X), 1),
    "one_row": lambda X: torch.cat([X[:1], torch.zeros_like(X[1:])]),
    "one_column": lambda X: torch.cat([X[:, :1], torch.zeros_like(X[:, 1:])], dim=1),
    "ones": torch.ones_like,
    "huge": lambda X: 1e12 * X,
    "large": lambda X: 1e6 * X,
    "small": lambda X: 1e-6 * X,
    "tiny": lambda X: 1e-18 * X}


@settings(max_examples=40, deadline=None)
@given(minibatches=st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 200)), min_size=1, max_size=12),
       dim=st.integers(2, 24), rank=st.integers(1, 30), alpha=st.sampled_from([0.1, 4.0]), period=st.sampled_from([1, 4]),
       dtype=st.sampled_from([torch.float32, torch.float64]), seed=st.integers(0, 10_000))
def test_any_sequence_of_degenerate_minibatches_leaves_results_finite_and_the_estimate_sound(
        minibatches: list[tuple[str, int]], dim: int, rank: int, alpha: float, period: int, dtype: torch.dtype, seed: int) -> None:
    ng = OnlineNaturalGradient(rank, period, alpha=alpha)
    for t, (kind, num) in enumerate(minibatches):
        X = KINDS[kind](rows(num, dim, seed + t, dtype))
        xhat, scale = ng.precondition(X)
        assert xhat.shape == X.shape and xhat.dtype == dtype
        assert bool(torch.isfinite(xhat).all()) and bool(torch.isfinite(scale)), (t, kind)
        # I - W^T W only shortens
        assert float(xhat.double().norm()) <= float(X.double().norm()) * (1 + 1e-5)
        assert_sound(ng)


@DTYPES
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_run_of_the_same_degenerate_minibatch_stays_sound(kind: str, dtype: torch.dtype) -> None:
    X = KINDS[kind](rows(30, 12, 0, dtype))
    ng = OnlineNaturalGradient(5)
    for _ in range(60):
        xhat, scale = ng.precondition(X)
        assert bool(torch.isfinite(scale * xhat).all())
        assert_sound(ng)


@DTYPES
@pytest.mark.parametrize("when", [0, 1, 5])
def test_a_minibatch_of_zeros_stays_zeros_with_scale_one(when: int, dtype: torch.dtype) -> None:
    ng = OnlineNaturalGradient(3)
    for t in range(8):
        X = rows(20, 8, t, dtype)
        xhat, scale = ng.precondition(torch.zeros_like(X) if t == when else X)
        if t == when:
            assert float(scale) == 1.0 and not xhat.any()
        assert_sound(ng)


def test_huge_rows_in_float32_move_the_estimate_as_they_do_in_float64() -> None:
    # |x| of 1e12 to the fourth power is past float32's range
    narrow, wide = OnlineNaturalGradient(3), OnlineNaturalGradient(3)
    for t in range(6):
        X = 1e12 * rows(40, 8, t)
        (xhat, _), (xhat_wide, _) = narrow.precondition(X.float()), wide.precondition(X)
        assert_close(xhat, xhat_wide, 1e-5)  # float32's rounding of X - H W
    # Z squares the condition number of up to 2000: 6e-8 * 2000, a few calls of it
    assert_same_state(narrow, wide, 1e-3)


@pytest.mark.parametrize("num", [1, 5, 50])
def test_rows_of_dimension_one_come_back_as_they_are_and_are_not_counted(num: int) -> None:
    ng = OnlineNaturalGradient(3)
    X = rows(num, 1, 0)
    xhat, scale = ng.precondition(X)
    assert torch.equal(xhat, X) and float(scale) == 1.0
    assert ng.state is None and ng.state_dict() == {"t": 0}


@pytest.mark.parametrize(("dim", "rank", "effective"), [(2, 1, 1), (2, 30, 1), (5, 4, 4), (5, 5, 4), (5, 80, 4), (30, 7, 7)])
def test_the_rank_is_lowered_below_the_dimension(dim: int, rank: int, effective: int) -> None:
    ng = OnlineNaturalGradient(rank)
    for t in range(5):
        ng.precondition(rows(10, dim, t))
        assert_sound(ng)
    assert tuple(ng.state_dict()["W"].shape) == (effective, dim)


def spoilt_state(error: float) -> tuple[Tensor, Tensor]:
    """(W, e) whose rows of R are off orthonormal by about `error`; 1: two rows are the same."""
    R_RD = torch.linalg.qr(rows(9, 4, 0))[0].T.contiguous()
    R_RD[1] = (1 - error) * R_RD[1] + error * R_RD[0]
    e_R = torch.tensor([0.9, 0.5, 0.2, 0.01]).double()
    return e_R.sqrt()[:, None] * R_RD, e_R


@DTYPES
@pytest.mark.parametrize("error", [0.01, 0.5, 0.9999, 1.0])
def test_reorthogonalised_rows_are_orthonormal_and_keep_their_span(error: float, dtype: torch.dtype) -> None:
    W_RD, e_R = spoilt_state(error)
    out_RD = reorthogonalized(W_RD.to(dtype), e_R)
    R_RD = out_RD.double() / e_R.sqrt()[:, None]
    assert out_RD.dtype == dtype and out_RD.is_contiguous()
    # one rounding to the dtype; Cholesky factors whose inverse has elements up to 100 are used
    torch.testing.assert_close(R_RD @ R_RD.T, torch.eye(4).double(), rtol=0.0, atol=1e-6 if dtype == torch.float32 else 1e-11)
    if error < 1.0 and dtype == torch.float64:
        # row i is a combination of the first i rows, with a positive share of itself, so signs
        # stay; the inverse of rows that are nearly the same multiplies rounding by 1e4
        first = torch.linalg.lstsq(W_RD.T, R_RD.T).solution
        torch.testing.assert_close(first.T @ W_RD, R_RD, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(torch.tril(first.T), first.T, rtol=0.0, atol=1e-6)
        assert bool((first.diagonal() > 0.0).all())


def test_rows_orthonormal_to_a_thousandth_are_left_alone() -> None:
    W_RD, e_R = spoilt_state(5e-4)
    assert torch.equal(reorthogonalized(W_RD, e_R), W_RD)


# ----------------------------------------------------------------- masks, loss scales, ones, queues

@settings(max_examples=30, deadline=None)
@given(num=st.integers(2, 40), kept=st.floats(0.1, 0.9), seed=st.integers(0, 10_000), start=st.booleans(),
       on_device=st.booleans())
def test_masked_rows_count_as_if_they_were_not_there(num: int, kept: float, seed: int, start: bool, on_device: bool) -> None:
    masked = OnlineNaturalGradient(4) if start else warmed(9, seed)
    dense = OnlineNaturalGradient(4) if start else copied(masked)
    for t in range(4):
        X = rows(num, 8, seed + t)
        m_N = (torch.rand(num, generator=torch.Generator().manual_seed(seed + t)) < kept).double()
        m_N[0] = 1.0
        if t == 0 and start:
            m_N[:] = 1.0  # fewer rows than D at the start leave directions to the noise of rounding
            X = rows(40, 8, seed)
            m_N = torch.cat([torch.ones(30), torch.zeros(10)]).double()
        num_rows = m_N.sum() if on_device else float(m_N.sum())
        a = masked.begin(X * m_N[:, None], m_N, num_rows=num_rows)
        counted = X[m_N > 0]
        b = dense.begin(counted, torch.ones(len(counted)).double())
        assert a is not None and b is not None
        (a_hat, ones_a, _), (b_hat, ones_b, _) = a.preconditioned(), b.preconditioned()
        assert ones_a is not None and ones_b is not None
        assert_close(a_hat[m_N > 0], b_hat, 1e-10)  # sums over the same rows and zeros
        assert_close(ones_a[m_N > 0], ones_b, 1e-10)
        assert not a_hat[m_N == 0].any() and not ones_a[m_N == 0].any()
        masked.finish(a)
        dense.finish(b)
        assert_same_state(masked, dense, 1e-10)


def test_a_minibatch_without_rows_that_count_changes_nothing() -> None:
    ng = warmed(8, 0)
    before = ng.state_dict()
    call = ng.begin(torch.zeros(7, 8).double(), num_rows=torch.tensor(0.0))
    assert call is not None and not call.preconditioned().Xhat_ND.any() and float(call.preconditioned().scale) == 1.0
    ng.finish(call)
    assert all(torch.equal(before[key], ng.state_dict()[key]) for key in ("W", "d", "rho"))
    assert_sound(ng)


@pytest.mark.parametrize("num_rows", [0.0, torch.tensor(0.0)])
def test_an_estimate_does_not_start_from_rows_that_do_not_count(num_rows: Tensor | float) -> None:
    ng, clean = OnlineNaturalGradient(3), OnlineNaturalGradient(3)
    assert ng.begin(torch.zeros(7, 8), num_rows=num_rows) is None
    for each in (ng, clean):
        each.precondition(rows(20, 8, 0))
    assert_equal_bits(ng, clean)


@settings(max_examples=30, deadline=None)
@given(scales=st.lists(st.sampled_from([0.5, 3.0, 1024.0, 65536.0]), min_size=4, max_size=4), num=st.integers(30, 60),
       seed=st.integers(0, 10_000), on_device=st.booleans())
def test_a_loss_scale_that_changes_does_not_enter_the_estimate(scales: list[float], num: int, seed: int, on_device: bool) -> None:
    scaled, plain = OnlineNaturalGradient(4), OnlineNaturalGradient(4)
    for t, s in enumerate(scales):
        X = rows(num, 8, seed + t)
        a = scaled.begin(s * X, loss_scale=torch.tensor(s).double() if on_device else s)
        b = plain.begin(X)
        assert a is not None and b is not None
        (a_hat, _, a_scale), (b_hat, _, b_scale) = a.preconditioned(), b.preconditioned()
        assert_close(a_hat, s * b_hat)
        assert_close(a_scale, b_scale)
        scaled.finish(a)
        plain.finish(b)
        assert_same_state(scaled, plain)


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 40), dim=st.integers(1, 12), rank=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_an_appended_column_of_ones_may_be_kept_apart(num: int, dim: int, rank: int, seed: int) -> None:
    apart, together = OnlineNaturalGradient(rank), OnlineNaturalGradient(rank)
    for t in range(5):
        X = rows(60 if t == 0 else num, dim, seed + t)
        X1 = torch.cat([X, torch.ones(len(X), 1).double()], dim=1)
        call, whole = apart.begin(X, torch.ones(len(X)).double()), together.begin(X1)
        assert call is not None and whole is not None
        Xhat, ones, scale = call.preconditioned()
        assert ones is not None
        assert_close(torch.cat([Xhat, ones[:, None]], dim=1), whole.preconditioned().Xhat_ND)
        assert_close(scale, whole.preconditioned().scale)
        apart.finish(call)
        together.finish(whole)
        assert_same_state(apart, together)


@DTYPES
@settings(max_examples=15, deadline=None)
@given(nums=st.lists(st.integers(1, 40), min_size=1, max_size=16), period=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_updates_that_wait_in_a_queue_are_bit_equal_to_immediate_ones(dtype: torch.dtype, nums: list[int], period: int,
                                                                     seed: int) -> None:
    queue = UpdateQueue(deferred=True)
    # those of one rank are updated together
    waiting = [OnlineNaturalGradient(rank, period, queue=queue) for rank in (2, 5, 5)]
    immediate = [OnlineNaturalGradient(rank, period, queue=UpdateQueue(deferred=False))
                 for rank in (2, 5, 5)]
    for t, num in enumerate(nums):
        for k, (a, b) in enumerate(zip(waiting, immediate, strict=True)):
            X = rows(num, 6 + k, seed + t, dtype)
            ours, theirs = a.precondition(X), b.precondition(X)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        if t % 2:  # else an update waits until its estimate is needed
            queue.flush()
    for a, b in zip(waiting, immediate, strict=True):
        assert_equal_bits(a, b)


def test_an_update_waits_until_its_own_estimate_is_needed_or_the_step_is_done() -> None:
    queue = UpdateQueue(deferred=True)
    ng, other = (OnlineNaturalGradient(2, queue=queue) for _ in range(2))

    def rho() -> float:
        assert ng._state is not None
        return float(ng._state.rho)
    ng.precondition(rows(20, 6, 0))
    start = rho()
    other.precondition(rows(20, 6, 1))
    assert rho() == start
    queue.flush()
    first = rho()
    assert first != start
    ng.precondition(rows(20, 6, 2))
    assert rho() == first
    assert ng.state is not None and ng.state.rho != first


# ---------------------------------------------------------------------------------------- schedules

@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize(("schedule", "expected"), [("nnet3", [*range(11), 14, 18, 22]), ("nnet2", [*range(10), 13, 17, 21])])
def test_calls_that_update_are_kaldis(schedule: str, expected: list[int], freezing: bool) -> None:
    ng = OnlineNaturalGradient(3, 4, schedule=schedule)
    updates = []
    for t in range(25):
        if freezing:  # frozen calls in between, as backstitch makes them, neither update nor count
            ng.freeze()
            if t:
                before = ng.state_dict()
                ng.precondition(rows(20, 8, 100 + t))
                assert not is_moved(before, ng)
            ng.freeze(False)
        before = start_of(ng, rows(20, 8, t)) if t == 0 else ng.state_dict()
        ng.precondition(rows(20, 8, t))
        updates += [t] if is_moved(before, ng) else []
    assert updates == expected
    assert ng.num_calls == 25


def start_of(ng: OnlineNaturalGradient, X: Tensor) -> dict[str, Any]:
    """The estimate made from X, before X updates it: what a frozen first call leaves."""
    twin = OnlineNaturalGradient(ng.rank, ng.update_period, schedule=ng.schedule)
    twin.freeze()
    twin.precondition(X)
    assert twin.num_calls == 0
    return twin.state_dict()


@pytest.mark.parametrize(("schedule", "num", "passes"), [("nnet3", 3, 1), ("nnet3", 4, 3), ("nnet2", 3, 3), ("nnet2", 4, 3)])
def test_the_start_passes_over_the_first_minibatch_three_times_or_once_if_it_has_no_more_rows_than_the_rank(
        schedule: str, num: int, passes: int) -> None:
    X = rows(num, 8, 0)
    made = start_of(OnlineNaturalGradient(3, schedule=schedule), X)
    R_RD = np.array([[1.1, 0, 0, 1, 0, 0, 1, 0], [0, 1.1, 0, 0, 1, 0, 0, 1], [0, 0, 1.1, 0, 0, 1, 0, 0]])
    dense = DenseFisher(R_RD / np.linalg.norm(R_RD, axis=1, keepdims=True), np.full(3, EPSILON), EPSILON, alpha=4.0)
    for _ in range(passes):
        dense.update(X.numpy(), 1 - math.exp(-num / 2000))
    # both float64; see EXACT
    np.testing.assert_allclose(made["d"].numpy(), dense.d, rtol=1e-7)
    np.testing.assert_allclose(float(made["rho"]), dense.rho, rtol=1e-7)
    np.testing.assert_allclose((made["W"].T @ made["W"]).numpy(), dense.W.T @ dense.W, rtol=0.0, atol=1e-7)


# --------------------------------------------------------------------------------- settings, states

@DTYPES
@pytest.mark.parametrize(("old", "new"), [(4.0, 1.0), (0.1, 10.0), (4.0, 0.0)])
def test_a_changed_alpha_equals_a_fresh_object_with_that_alpha_and_the_same_fisher_matrix(old: float, new: float,
                                                                                          dtype: torch.dtype) -> None:
    changed = warmed(9, 0, dtype, alpha=old)

    def rescaled(state: dict[str, Any]) -> dict[str, Any]:
        ratio_R = (spread_e(state, new) / spread_e(state, old)).sqrt()
        return {**state, "W": (ratio_R[:, None] * state["W"].double()).to(dtype)}
    fresh = copied(changed, change=rescaled, alpha=new)
    changed.set_alpha(new)
    assert_sound(changed)
    # float32: one rounding of W; alpha 0 divides by e near 1
    tolerance = 1e-4 if dtype == torch.float32 else EXACT
    # not the one of the old alpha
    torch.testing.assert_close(changed.gram(), fresh.gram(), rtol=1e-6, atol=1e-6)
    for t in range(4):
        X = rows(20, 9, t, dtype)
        (xhat, scale), (xhat_fresh, scale_fresh) = changed.precondition(X), fresh.precondition(X)
        assert_close(xhat, xhat_fresh, tolerance)
        assert_close(scale, scale_fresh, tolerance)
    assert_same_state(changed, fresh, 10 * tolerance)


def test_set_alpha_before_the_first_call_is_the_constructors_alpha() -> None:
    changed, fresh = OnlineNaturalGradient(3, alpha=4.0), OnlineNaturalGradient(3, alpha=0.5)
    changed.set_alpha(0.5)
    for ng in (changed, fresh):
        ng.precondition(rows(20, 8, 0))
    assert_equal_bits(changed, fresh)


def test_the_gram_matrix_follows_every_change_of_the_estimate() -> None:
    ng = OnlineNaturalGradient(3)
    other = warmed(8, 1, rank=3).state_dict()

    def assert_current() -> None:
        W_RD = ng.state_dict()["W"]
        assert torch.equal(ng.gram(), W_RD @ W_RD.T)
    for t in range(3):
        ng.precondition(rows(20, 8, t))
        assert_current()
    ng.set_alpha(1.0)
    assert_current()
    ng.load_state_dict(other)
    assert_current()
    ng.precondition(rows(20, 8, 5, torch.float32))  # the estimate follows the dtype of the rows
    assert ng.gram().dtype == torch.float32
    assert_current()


def test_a_state_survives_saving_with_another_object_and_before_the_first_call() -> None:
    ng, other = OnlineNaturalGradient(3), warmed(8, 0)
    other.load_state_dict(ng.state_dict())
    assert other.state is None and other.num_calls == 0
    saved = warmed(8, 2)
    state = saved.state_dict()
    before = {key: state[key].clone() for key in ("W", "d", "rho")}
    # updates work in place: a state that was handed out must not change
    saved.precondition(rows(20, 8, 0))
    assert all(torch.equal(before[key], state[key]) for key in before)
    ng.load_state_dict(state)
    ng.precondition(rows(20, 8, 0))
    assert all(torch.equal(before[key], state[key]) for key in before)


def test_a_loaded_state_continues_bitwise_identically() -> None:
    ng = OnlineNaturalGradient(3, update_period=4)
    for t in range(13):
        ng.precondition(rows(20, 8, t))
    copy = OnlineNaturalGradient(3, update_period=4)
    copy.load_state_dict(ng.state_dict())
    for t in range(13, 20):
        ours, theirs = (p.precondition(rows(20, 8, t)) for p in (ng, copy))
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"update_period": 0}, {"alpha": -1.0}, {"num_samples_history": 0.0},
                                   {"epsilon": 0.0}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        OnlineNaturalGradient(**wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- values that are
# not finite

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
FIRST, UPDATING, NOT_UPDATING = 0, 5, 12
WHEN = pytest.mark.parametrize("when", [FIRST, UPDATING, NOT_UPDATING], ids=["first", "updating", "not_updating"])


def spoilt_rows(bad: float, dtype: torch.dtype) -> Tensor:
    X = rows(20, 8, 99, dtype)
    X[3, 4] = bad
    return X


@DTYPES
@WHEN
@BAD
def test_raise_names_the_rows_and_leaves_everything_as_it_was(bad: float, when: int, dtype: torch.dtype) -> None:
    ng, clean = (OnlineNaturalGradient(3, 4, on_nonfinite="raise") for _ in range(2))
    for t in range(16):
        if t == when:
            with pytest.raises(DivergenceError, match=r"20 x 8.*not finite"):
                ng.precondition(spoilt_rows(bad, dtype))
        for each in (ng, clean):
            each.precondition(rows(20, 8, t, dtype))
    assert_equal_bits(ng, clean)


@pytest.mark.parametrize("deferred", [False, True])
@DTYPES
@WHEN
@BAD
def test_skip_returns_rows_that_are_not_finite_and_leaves_the_estimate_alone(bad: float, when: int, dtype: torch.dtype,
                                                                            deferred: bool) -> None:
    ng = OnlineNaturalGradient(3, 4, on_nonfinite="skip", queue=UpdateQueue(deferred=deferred))
    for t in range(16):
        if t == when:
            before = ng.state_dict()
            xhat, scale = ng.precondition(spoilt_rows(bad, dtype))
            # the step must be able to see it: neither the rows nor the scaled rows may look sound
            assert not bool(torch.isfinite(xhat).all()) and not bool(torch.isfinite(scale * xhat).all())
            after = ng.state_dict()
            assert ("W" in before) == ("W" in after)
            assert all(torch.equal(before[key], after[key]) for key in ("W", "d", "rho") if key in before)
        xhat, scale = ng.precondition(rows(20, 8, t, dtype))
        assert bool(torch.isfinite(scale * xhat).all())
    assert_sound(ng)


@BAD
def test_skip_on_the_first_call_starts_from_the_next(bad: float) -> None:
    ng, clean = (OnlineNaturalGradient(3, on_nonfinite="skip") for _ in range(2))
    ng.precondition(spoilt_rows(bad, torch.float32))
    for each in (ng, clean):
        each.precondition(rows(20, 8, 0, torch.float32))
    assert_equal_bits(ng, clean)


def test_rows_whose_squares_overflow_are_skipped_and_the_next_ones_are_not() -> None:
    ng, clean = (warmed(8, 0, torch.float32, on_nonfinite="skip") for _ in range(2))
    ng.precondition(1e25 * rows(20, 8, 1, torch.float32))  # finite themselves
    assert not is_moved(clean.state_dict(), ng)
    assert bool(torch.isfinite(ng.precondition(rows(20, 8, 2, torch.float32))[0]).all())
