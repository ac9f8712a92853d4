"""The update of Fisher estimates without eigenvalues: against Kaldi's, and against dense float64.

Letters: N rows, D dimension, R rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngsgd
from ngsgd import OnlineNaturalGradient
from ngsgd.errors import ArgumentError
from ngsgd.ops import polar_update
from ngsgd.optim.fisher.update_queue import UpdateQueue
from tests.optim.test_online_properties import rows
from tests.reference.online_natural_gradient import DensePolar

# With floors of rho and of single eigenvalues far below all eigenvalues.
WITHOUT_FLOORS = {"delta": 1e-12, "epsilon": 1e-30}
# The square root has errors of 1e-11, which the later updates forget at the rate of the estimate.
EXACT = 1e-8
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def spread_rows(num: int, dim: int, seed: int) -> Tensor:
    """Rows whose directions differ in size, so that no eigenvalue is at its floor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, dim, generator=generator).double() * torch.logspace(0, -1, dim).double()


def removed(ng: OnlineNaturalGradient) -> Tensor:
    """R^T E R, which multiplies rows; it does not depend on the basis of R."""
    factors = ng.factors
    assert factors is not None
    left_RD, right_RD = factors
    return left_RD.double().T @ right_RD.double()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def orthogonality(ng: OnlineNaturalGradient) -> float:
    R_RD = ng.polar_state.R_RD.double()
    return float((R_RD @ R_RD.T - torch.eye(len(R_RD)).double()).abs().max())


@pytest.mark.parametrize(("dim", "rank", "alpha"), [(24, 5, 4.0), (24, 11, 0.5), (9, 4, 0.0)])
def test_200_updates_are_those_of_kaldi_where_no_floor_is_active(dim: int, rank: int, alpha: float) -> None:
    exact, polar = (OnlineNaturalGradient(rank, update=update, alpha=alpha, **WITHOUT_FLOORS)  # type: ignore[arg-type]
                    for update in ("exact", "polar"))
    # Kaldi's form loses digits to Z, whose condition number is large in the first minibatches.
    for t in range(12):
        exact.precondition(spread_rows(200, dim, 1000 + t))
    polar.load_state_dict(exact.state_dict())
    start = None
    for t in range(200):
        X = spread_rows(200, dim, t)
        expected, scale = exact.precondition(X)
        found, own_scale = polar.precondition(X)
        assert difference(found, expected) < EXACT, t
        assert float(own_scale) == pytest.approx(float(scale), rel=EXACT)
        start = removed(polar) if start is None else start
    assert polar.is_polar and not exact.is_polar and start is not None
    assert exact.state is not None and exact.state.d_R.min() > 1e-6
    assert difference(removed(polar), start) > 1e-3
    assert difference(removed(polar), removed(exact)) < EXACT


@DTYPES
def test_updates_are_those_of_dense_matrices(dtype: torch.dtype) -> None:
    """Also with floors."""
    dim, rank = 14, 5
    polar = OnlineNaturalGradient(rank, update="polar")
    polar.precondition(rows(30, dim, 0, torch.float64))
    state = polar.state
    assert state is not None
    dense = DensePolar.from_w(state.W_RD.numpy(), state.d_R, state.rho, alpha=4.0)
    polar.load_state_dict({key: value.to(dtype) if key == "W" else value for key, value in polar.state_dict().items()})
    for t in range(1, 30):
        # of few directions in the middle, whose floors are active
        X = rows(30, dim, t)
        if 10 < t < 20:
            X[:, 2:] = 0.0
        Xhat, gamma = dense.precondition(X.numpy())
        found, scale = polar.precondition(X.to(dtype))
        # rounding of Y to float32 relative to its smallest singular value, at least 5e-4 of the
        # largest
        tolerance = 1e-8 if dtype == torch.float64 else 2e-3
        assert difference(found, torch.from_numpy(Xhat)) < tolerance, t
        assert float(scale) == pytest.approx(gamma, rel=tolerance)
        dense.update(X.numpy(), min(0.9, 1 - torch.exp(torch.tensor(-30 / 2000.0, dtype=torch.float64)).item()))


@DTYPES
def test_rows_of_few_directions_keep_the_estimate_orthonormal(dtype: torch.dtype) -> None:
    polar = OnlineNaturalGradient(12, update="polar", num_samples_history=50.0)
    for t in range(60):
        generator = torch.Generator().manual_seed(t)
        few = torch.randn(64, 3, generator=generator).double() @ torch.eye(3, 40).double()
        X = (few * 1e3 if 20 <= t < 40 else few if t < 20 else rows(64, 40, t)).to(dtype)
        found, scale = polar.precondition(X)
        assert torch.isfinite(found).all() and float((found * scale).norm()) == pytest.approx(float(X.norm()), rel=1e-4)
    assert orthogonality(polar) < 1e-3


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rows_of_every_scale_have_the_update_of_kaldi(size: float) -> None:
    exact, polar = (OnlineNaturalGradient(5, update=update, relative_floor=True, delta=1e-9) for update in ("exact", "polar"))
    for t in range(20):
        X = size * spread_rows(100, 20, t)
        assert difference(polar.precondition(X)[0], exact.precondition(X)[0]) < EXACT
    assert polar.is_polar


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_minibatch_that_is_not_finite_has_no_effect(bad: float) -> None:
    """1e30 is finite, its square in float32 is not."""
    polar = OnlineNaturalGradient(5, update="polar", on_nonfinite="skip")
    for t in range(5):
        polar.precondition(rows(40, 20, t, torch.float32))
    before = [value.clone() for value in polar.polar_state]
    X = rows(40, 20, 6, torch.float32)
    X[3, 4] = bad
    polar.precondition(X)
    assert all(map(torch.equal, before, polar.polar_state))
    polar.precondition(rows(40, 20, 7, torch.float32))
    assert not any(map(torch.equal, before, polar.polar_state))


def test_masked_rows_do_not_count() -> None:
    whole, masked = (OnlineNaturalGradient(5, update="polar") for _ in range(2))
    for t in range(10):
        X = rows(40, 20, t)
        whole.observe(X)
        both = torch.cat([X, torch.zeros(30, 20).double()])
        masked.observe(both, num_rows=torch.tensor(40.0))
        # no row at all
        masked.observe(torch.zeros(8, 20).double(), num_rows=torch.tensor(0.0))
    assert difference(removed(masked), removed(whole)) < EXACT


def test_estimates_of_all_shapes_are_updated_together() -> None:
    """Padded, and some of them alone in some minibatches."""
    shapes = [(20, 5, torch.float32), (9, 4, torch.float64), (20, 5, torch.float32), (31, 12, torch.float32), (9, 4, torch.float64)]
    queue = UpdateQueue(deferred=True)
    together = [OnlineNaturalGradient(rank, update="polar", queue=queue) for _, rank, _ in shapes]
    alone = [OnlineNaturalGradient(rank, update="polar") for _, rank, _ in shapes]
    for t in range(20):
        for number, (dim, _, dtype) in enumerate(shapes):
            if t % 3 and number == 2:
                continue
            X = rows(40, dim, 100 * t + number, dtype)
            together[number].observe(X)
            alone[number].observe(X)
        queue.flush()
    for one, other in zip(together, alone, strict=True):
        # rounding of the products, which are of other sizes, times the condition number
        tolerance = 1e-9 if one.polar_state.R_RD.dtype == torch.float64 else 1e-5
        assert one.num_calls == other.num_calls
        assert difference(removed(one), removed(other)) < tolerance
        assert difference(one.polar_state.M_RR, other.polar_state.M_RR) < tolerance


def test_both_forms_are_one_estimate() -> None:
    polar = OnlineNaturalGradient(6, update="polar")
    for t in range(8):
        polar.precondition(rows(40, 20, t))
    state = polar.state
    assert state is not None
    again = polar_update.polar(state, polar.smoothing)
    assert difference(again.R_RD.T @ again.V_RD, removed(polar)) < EXACT
    loaded = OnlineNaturalGradient(6, update="exact")
    loaded.load_state_dict(polar.state_dict())
    assert difference(removed(loaded), removed(polar)) < EXACT
    polar.set_alpha(1.0)
    loaded.set_alpha(1.0)
    X = rows(40, 20, 9)
    assert difference(polar.precondition(X)[0], loaded.precondition(X)[0]) < EXACT


def test_a_training_state_continues_bitwise() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [ngsgd.NGSGD(model, 0.01, loss_reduction="sum", update="polar") for model in models]

    def step(number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(32, 12, generator=generator), torch.randint(4, (32,), generator=generator)
        optimizers[number].zero_grad()
        nn.functional.cross_entropy(models[number](x), y, reduction="sum").backward()
        optimizers[number].step()
    for t in range(13):
        step(0, t)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_training_state(optimizers[0].training_state())
    before = nn.utils.parameters_to_vector(models[0].parameters()).detach().clone()
    for t in range(13, 20):
        step(0, t)
        step(1, t)
    after = nn.utils.parameters_to_vector(models[0].parameters()).detach()
    assert not torch.equal(before, after)
    assert torch.equal(after, nn.utils.parameters_to_vector(models[1].parameters()).detach())
    for (name, one), (_, other) in zip(optimizers[0].preconditioners(), optimizers[1].preconditioners(), strict=True):
        assert all(map(torch.equal, one.polar_state, other.polar_state)), name


def test_an_unknown_form_is_an_error() -> None:
    options: dict[str, Any] = {"update": "eigen"}
    with pytest.raises(ArgumentError):
        OnlineNaturalGradient(**options)
    with pytest.raises(ArgumentError):
        ngsgd.NGSGD(nn.Linear(3, 2), **options)
