"""Integer momentum: exact reversal, a float64 trajectory, and errors that must be reported."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ngsgd.errors import DivergenceError, ReversalError
from ngsgd.hypergrad import ExactMomentum
from ngsgd.hypergrad.exact_momentum import CHUNK, load_library
from tests.reference.maclaurin import MaclaurinMomentum

GROUPS = (slice(0, 700), slice(700, 1501), slice(1501, 2000))
needs_compiler = pytest.mark.skipif(load_library() is None, reason="no C++ compiler here: there is only one engine to test")


def drawn(seed: int, size: int = 2000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def rates(t: int) -> list[float]:
    return [0.01 + 0.005 * math.sin(t), 0.02 / (1 + t), 0.003]


def gammas(t: int) -> list[float]:
    return [0.9 + 0.09 * math.sin(t / 5.0), 0.5 + 0.049 * (t % 11), 0.98]


def run(state: ExactMomentum, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """The state before each step, and after the last."""
    states = []
    for t in range(num_steps):
        states.append((state.x_P.clone(), state.u_P.clone()))
        state.step(drawn(t % 5), rates(t), gammas(t))
    return [*states, (state.x_P.clone(), state.u_P.clone())]


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_every_reverse_step_is_bitwise_the_forward_state(engine: str) -> None:
    weights = drawn(9)
    state = ExactMomentum(weights, GROUPS, engine=engine)
    states = run(state, 300)
    assert state.spill_bytes > 0
    for t in reversed(range(300)):
        state.undo_x(rates(t))
        assert torch.equal(state.x_P, states[t][0])
        state.undo_v(drawn(t % 5))
        assert torch.equal(state.u_P, states[t][1])
    assert torch.equal(state.weights(), weights)
    assert not state.u_P.any() and state.spill_bytes == 0


def test_equals_a_float64_trajectory() -> None:
    # reversal alone proves nothing: numbers that wrap around are undone exactly too
    state, w_P, v_P = ExactMomentum(drawn(9), GROUPS), drawn(9).double(), torch.zeros(2000, dtype=torch.float64)
    for t in range(200):
        state.step(drawn(t % 5), rates(t), gammas(t))
        for group, rate, gamma in zip(GROUPS, rates(t), gammas(t), strict=True):
            v_P[group] = gamma * v_P[group] - (1.0 - gamma) * drawn(t % 5)[group].double()
            w_P[group] += rate * v_P[group]
    assert float((state.position() - w_P).abs().max()) < 1e-9
    assert float((state.velocity() - v_P).abs().max()) < 1e-9


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_and_eager_engines_have_equal_bits(dtype: torch.dtype) -> None:
    size = CHUNK + 10_001
    weights = drawn(9, size).to(dtype)
    groups = (slice(0, 5_000), slice(5_000, size))  # more than a chunk, and not a multiple of one
    one, other = (ExactMomentum(weights, groups, engine=engine) for engine in ("eager", "fused"))
    for t in range(30):
        for state in (one, other):
            state.step(drawn(t, size).to(dtype), rates(t)[:2], gammas(t)[:2])
        assert torch.equal(one.x_P, other.x_P) and torch.equal(one.u_P, other.u_P)
        assert torch.equal(one.weights(), other.weights())
        assert one.digest() == other.digest() and one.velocity_norms() == other.velocity_norms()


def test_agrees_with_the_published_buffer() -> None:
    weights, gamma = drawn(9, 500), 58982 / 65536  # a gamma that the published form can hold
    state, published = ExactMomentum(weights, [slice(0, 500)]), MaclaurinMomentum(weights)
    starts = []
    for t in range(400):
        starts.append(published.x_P.clone())
        state.step(drawn(t % 5, 500), [0.01], [gamma])
        published.step(drawn(t % 5, 500), 0.01, gamma)
    assert published.spills
    assert float((state.position() - published.weights()).abs().max()) < 1e-9
    for t in reversed(range(400)):
        published.undo_x(0.01)
        assert torch.equal(published.x_P, starts[t])
        published.undo_v(drawn(t % 5, 500), gamma)
    assert not published.v_P.any() and not published.buffer_P.any()


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_stores_no_more_than_the_information_that_is_lost(gamma: float) -> None:
    num_steps = 200
    state = ExactMomentum(drawn(9), GROUPS)
    for t in range(num_steps):
        state.step(drawn(t % 5), [0.01] * 3, [gamma] * 3)
    assert 8 * state.spill_bytes / 2000 / num_steps <= 1.02 * math.log2(1.0 / gamma) + 8.0 / num_steps


@settings(max_examples=50)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-7, 1.2)), min_size=1, max_size=12), st.integers(0, 100))
def test_any_momentum_can_be_undone(momenta: list[float], seed: int) -> None:
    state = ExactMomentum(drawn(seed, 50), [slice(0, 50)])
    for t, gamma in enumerate(momenta):
        state.step(drawn(t, 50), [0.1], [gamma])
    for t in reversed(range(len(momenta))):
        state.undo_x([0.1])
        state.undo_v(drawn(t, 50))
    assert torch.equal(state.weights(), drawn(seed, 50)) and not state.u_P.any() and state.spill_bytes == 0


def test_without_keeping_nothing_is_put_aside() -> None:
    kept, free = (ExactMomentum(drawn(9), GROUPS, keeps=keeps) for keeps in (True, False))
    for t in range(100):
        for state in (kept, free):
            state.step(drawn(t % 5), rates(t), [0.0 if t == 50 else gamma for gamma in gammas(t)])
    assert torch.equal(kept.x_P, free.x_P) and free.spill_bytes == 0 and kept.spill_bytes > 0


def test_a_saved_state_continues_forward_and_backward() -> None:
    state, other = ExactMomentum(drawn(9), GROUPS), ExactMomentum(torch.zeros(2000), GROUPS)
    run(state, 90)
    other.load_state_dict(state.state_dict())
    for one in (state, other):
        one.step(drawn(90 % 5), rates(90), gammas(90))
    assert torch.equal(state.x_P, other.x_P)
    for t in reversed(range(91)):
        other.undo_x(rates(t))
        other.undo_v(drawn(t % 5))
    assert torch.equal(other.weights(), drawn(9))


@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_gradient_that_is_not_finite_is_refused_with_step_and_layer(bad: float, engine: str) -> None:
    state = ExactMomentum(drawn(9), GROUPS, engine=engine, names=("one", "two", "three"))
    run(state, 3)
    grad = drawn(1)
    grad[800] = bad
    with pytest.raises(DivergenceError, match="step 4"):
        state.step(grad, rates(3), gammas(3))


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_weights_that_leave_their_range_are_refused(engine: str) -> None:
    state = ExactMomentum(drawn(9), GROUPS, engine=engine)
    with pytest.raises(DivergenceError, match=r"layer 2.*step 1"):
        state.step(drawn(1), [0.1, 0.1, 1e6], [0.9] * 3)


def test_a_velocity_that_grows_without_end_is_refused() -> None:
    state = ExactMomentum(drawn(9), GROUPS)

    def grow() -> None:
        for _ in range(200):
            state.step(drawn(1), [0.0] * 3, [1.2] * 3)
    with pytest.raises(DivergenceError, match="velocity"):
        grow()


@pytest.mark.parametrize("gamma", [-0.1, math.nan, math.inf])
def test_an_impossible_momentum_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="Invalid momentum"):
        ExactMomentum(drawn(9), GROUPS).step(drawn(1), [0.1] * 3, [0.9, gamma, 0.9])


def test_a_start_out_of_range_and_groups_with_gaps_are_refused() -> None:
    with pytest.raises(DivergenceError, match="starting weight"):
        ExactMomentum(torch.tensor([1.0, 20000.0]), [slice(0, 2)])
    with pytest.raises(ValueError, match="Invalid groups"):
        ExactMomentum(drawn(9), (slice(0, 700), slice(701, 2000)))


@pytest.mark.parametrize("wrong", [{"rates": [0.011, 0.02, 0.003]}, {"gradient": 1e-6}])
def test_a_step_undone_with_other_numbers_is_reported(wrong: dict[str, object]) -> None:
    state = ExactMomentum(drawn(9), GROUPS)
    for t in range(5):
        state.step(drawn(t), [0.01, 0.02, 0.003], [0.9] * 3)
    grad = drawn(4)
    if "gradient" in wrong:
        grad[7] += 1e-6

    def undo() -> None:
        state.undo_x(wrong.get("rates", [0.01, 0.02, 0.003]))  # type: ignore[arg-type]
        state.undo_v(grad)
    with pytest.raises(ReversalError, match=r"^step 5"):
        undo()
