"""Outer optimizers against their formulas in float64, torch's SGD, and each other."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ngsgd.config import OuterConfig, types_of
from ngsgd.optim.outer import Average, BlockMomentum, Bmuf, DiLoCo, OuterInfo, OuterOptimizer, OuterRule, make_rule
from tests.reference import outer as reference

DIM = 7
RULES: dict[str, OuterRule] = {
    "average": Average(), "gain_1": Bmuf(1.0), "gain_sqrt": Bmuf(), "gain_4": Bmuf(4.0), "nbm": BlockMomentum(0.9, 0.7),
    "cbm": BlockMomentum(0.8, nesterov=False), "diloco": DiLoCo(),
    # every kind that a run can choose, with its defaults
    **{f"outer={kind}": make_rule(OuterConfig(kind)) for kind in get_args(types_of(OuterConfig)["kind"])},
}
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
# both float64: 40 outer iterations of a few roundings each, numbers of size 10
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def info(outer_iter: int = 0, *, num_outer_iters: int = 100, num_jobs: int = 4, lr: float = 0.01) -> OuterInfo:
    return OuterInfo(outer_iter, num_outer_iters, num_jobs, lr)


def bits(vector: Any) -> list[int]:
    return np.asarray(vector).view(np.uint32 if vector.dtype == np.float32 else np.uint64).tolist()  # type: ignore[no-any-return]


def drive(outer: OuterOptimizer, moves: Sequence[Any], infos: Sequence[OuterInfo] | None = None) -> reference.Path:
    """(W, B) after each outer iteration in which one job's result moved by moves[t] from B."""
    path = []
    for t, G in enumerate(moves):
        outer.step([outer.broadcast() + G], [1.0], infos[t] if infos else info(t))
        path.append((outer.eval_model().copy(), outer.broadcast()))
    return path


def assert_same_path(found: reference.Path, expected: reference.Path) -> None:
    for (found_W, found_B), (W, B) in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_W, W, **CLOSE)
        np.testing.assert_allclose(found_B, B, **CLOSE)


def random_moves(count: int = 40, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, DIM))


def some_model(size: int = DIM, dtype: Any = np.float64, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


def after_a_few_steps(rule: OuterRule, size: int, *, num_threads: int = 1, ema_decay: float = 0.0, chunk_size: int = 0,
                      seed: int = 0) -> OuterOptimizer:
    """float32, three jobs; the same numbers for the same seed."""
    random = np.random.default_rng(seed)
    outer = OuterOptimizer(rule, random.normal(size=size).astype(np.float32), num_threads=num_threads, ema_decay=ema_decay)
    outer.chunk_size = chunk_size or outer.chunk_size
    for t in range(3):
        start = outer.broadcast()
        outer.step([start + random.normal(size=size).astype(np.float32) for _ in range(3)], [1, 2, 3], info(t, num_jobs=9))
    return outer


# ------------------------------------------------------------------------------------- the formulas
@pytest.mark.parametrize("nesterov", [True, False])
def test_block_momentum_follows_the_papers_formulas(nesterov: bool) -> None:
    moves, start = random_moves(), some_model()
    outer = OuterOptimizer(BlockMomentum(0.9, 0.7, nesterov), start)
    assert_same_path(drive(outer, moves), reference.block_momentum(start, moves, [0.9] * 40, 0.7, nesterov=nesterov))


@given(num_jobs=st.lists(st.integers(1, 64), min_size=2, max_size=12), gain=st.sampled_from([0.0, 1.0, 3.0, 64.0]))
def test_bmuf_recomputes_its_momentum_when_the_number_of_jobs_changes(num_jobs: list[int], gain: float) -> None:
    moves, start = random_moves(len(num_jobs)), some_model()
    infos = [info(t, num_outer_iters=1000, num_jobs=n) for t, n in enumerate(num_jobs)]
    etas = [1.0 - 1.0 / max(1.0, min(gain or math.sqrt(n), n)) for n in num_jobs]
    assert_same_path(drive(OuterOptimizer(Bmuf(gain), start), moves, infos),
                     reference.block_momentum(start, moves, etas, 1.0, nesterov=True))


def test_diloco_follows_the_papers_formulas() -> None:
    moves, start = random_moves(), some_model()
    assert_same_path(drive(OuterOptimizer(DiLoCo(0.7, 0.9), start), moves), reference.diloco(start, moves, 0.7, 0.9))


@given(decay=st.floats(0.01, 0.999), count=st.integers(1, 30))
def test_the_moving_average_is_shipped_and_never_broadcast(decay: float, count: int) -> None:
    start, moves = some_model(), random_moves(count)
    plain, averaged = (OuterOptimizer(DiLoCo(), start, ema_decay=a) for a in (0.0, decay))
    models = [W for W, _ in drive(plain, moves)]
    assert_same_path(drive(averaged, moves), [(W, W) for W in models])
    np.testing.assert_allclose(averaged.final_model(), reference.moving_average(models, decay), **CLOSE)
    assert bits(plain.final_model()) == bits(models[-1])


# -------------------------------------------------------------------- one rule is a case of another
def torch_path(start: Any, moves: Any, *, nesterov: bool) -> list[Any]:
    theta = torch.nn.Parameter(torch.from_numpy(start.copy()))
    sgd = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=nesterov)
    path = []
    for G in moves:
        theta.grad = torch.from_numpy(-G)
        sgd.step()
        path.append(theta.detach().numpy().copy())
    return path


def test_diloco_and_the_broadcast_of_nesterov_block_momentum_are_torchs_nesterov_sgd() -> None:
    start, moves = some_model(), random_moves()
    expected = torch_path(start, moves, nesterov=True)
    diloco = drive(OuterOptimizer(DiLoCo(0.7, 0.9), start), moves)
    nbm = drive(OuterOptimizer(BlockMomentum(0.9, 0.7), start), moves)
    np.testing.assert_allclose([W for W, _ in diloco], expected, **CLOSE)
    np.testing.assert_allclose([B for _, B in nbm], expected, **CLOSE)


def test_classical_block_momentum_is_torchs_sgd_with_momentum() -> None:
    start, moves = some_model(), random_moves()
    expected = torch_path(start, moves, nesterov=False)
    cbm = drive(OuterOptimizer(BlockMomentum(0.9, 0.7, nesterov=False), start), moves)
    np.testing.assert_allclose([B for _, B in cbm], expected, **CLOSE)


@pytest.mark.parametrize("rule", [Average(), Bmuf(1.0)], ids=["average", "gain_1"])
@settings(deadline=None)
@given(num_jobs=st.integers(1, 64), seed=st.integers(0, 10_000))
def test_averaging_and_gain_1_are_bitwise_the_weighted_mean(rule: OuterRule, num_jobs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    outer = OuterOptimizer(rule, some_model(50, np.float32))
    for t in range(3):
        vectors = [(random.normal(size=50) * 10.0 ** random.integers(-44, 38, 50)).astype(np.float32) for _ in range(num_jobs)]
        for vector in vectors:
            vector[:2] = -0.0, 0.0
        weights = random.integers(1, 10**6, num_jobs).tolist()
        outer.step(vectors, weights, info(t, num_jobs=num_jobs))
        expected = bits(reference.float32_mean(vectors, weights))
        assert bits(outer.eval_model()) == expected
        assert bits(outer.broadcast()) == expected


def test_the_configuration_chooses_the_rule() -> None:
    assert [make_rule(OuterConfig(kind=kind)) for kind in ("diloco", "streaming")] == [DiLoCo(0.7, 0.9)] * 2
    assert make_rule(OuterConfig(kind="bmuf", gain=3.0)) == Bmuf(3.0)
    assert isinstance(make_rule(OuterConfig("average")), Average)
    assert make_rule(OuterConfig()) == Bmuf(0.0)  # the one that measured best


# --------------------------------------------------------------------------------------------- gain
GAINS = {
    "average": (Average(), 1.0), "gain_1": (Bmuf(1.0), 1.0), "gain_4": (Bmuf(4.0), 4.0), "gain_sqrt": (Bmuf(), 4.0),
    "bmuf": (Bmuf(16.0), 16.0), "nbm": (BlockMomentum(0.9, 0.7), 7.0), "cbm": (BlockMomentum(0.9, 0.7, nesterov=False), 7.0),
    "diloco": (DiLoCo(), 7.0),
}


@pytest.mark.parametrize(("rule", "gain"), GAINS.values(), ids=GAINS)
def test_a_constant_move_moves_the_model_by_the_gain_in_the_end(rule: OuterRule, gain: float) -> None:
    G, num_outer_iters = some_model(), 600
    infos = [info(t, num_outer_iters=num_outer_iters, num_jobs=16) for t in range(num_outer_iters)]
    assert rule.gain(16, num_outer_iters) == pytest.approx(gain, rel=1e-14)
    (before, _), (after, _) = drive(OuterOptimizer(rule, np.zeros(DIM)), [G] * num_outer_iters, infos)[-2:]
    # (1 - 1/16)^600 is 1e-17; two models 600 gains away from zero are subtracted
    np.testing.assert_allclose(after - before, gain * G, rtol=1e-10)


@pytest.mark.parametrize(("num_jobs", "num_outer_iters", "gain"),
                         [(1, 1000, 1.0), (4, 1000, 2.0), (64, 1000, 8.0), (64, 20, 4.0), (64, 4, 1.0), (1000, 10**6, 1000**0.5)])
def test_the_default_gain_is_the_root_of_the_jobs_as_far_as_the_run_can_fill_it(num_jobs: int, num_outer_iters: int,
                                                                               gain: float) -> None:
    assert Bmuf().gain(num_jobs, num_outer_iters) == gain
    # it can be filled, so momentum is there from the first outer iteration
    assert Bmuf().coefficients(info(0, num_jobs=num_jobs, num_outer_iters=num_outer_iters), {}) == {"eta": 1.0 - 1.0 / gain}


def test_a_gain_that_the_run_cannot_fill_grows_with_the_outer_iterations() -> None:
    def gains(num_outer_iters: int) -> list[float]:
        etas = [Bmuf(8.0).coefficients(info(t, num_jobs=8, num_outer_iters=num_outer_iters), {})["eta"] for t in range(12)]
        return [round(1.0 / (1.0 - eta), 9) for eta in etas]
    assert gains(39) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    assert gains(40) == [8] * 12


# -------------------------------------------------------------------------- moves, as jobs see them
@EVERY_RULE
def test_moves_say_the_same_as_parameters(rule: OuterRule) -> None:
    random, outers = np.random.default_rng(0), [OuterOptimizer(rule, some_model()) for _ in range(2)]
    for t in range(10):
        moves = list(random.normal(size=(3, DIM)))
        starts = [outer.broadcast() for outer in outers]
        outers[0].step([starts[0] + move for move in moves], [1, 2, 3], info(t))
        outers[1].step(moves, [1, 2, 3], info(t), returns="move")
    # float64, 10 outer iterations
    np.testing.assert_allclose(outers[0].eval_model(), outers[1].eval_model(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("rule", [Bmuf(4.0), BlockMomentum(0.9, 0.7)], ids=["bmuf", "nbm"])
def test_rounding_of_the_broadcast_is_no_delta_of_the_jobs(rule: OuterRule) -> None:
    outer = after_a_few_steps(rule, 100)
    momentum, eta = outer.arrays["block_momentum"].astype(np.float64), outer.numbers["eta"]
    outer.step([outer.broadcast()], [1.0], info(3, num_jobs=9))
    assert bits(outer.arrays["block_momentum"]) == bits((eta * momentum).astype(np.float32))


@EVERY_RULE
@settings(deadline=None)
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=64),
       values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=20))
def test_frozen_parameters_stay_bit_equal(rule: OuterRule, weights: list[float], values: list[float]) -> None:
    frozen = np.array(values, np.float32)
    outer = OuterOptimizer(rule, frozen, ema_decay=0.9)
    for t in range(4):
        outer.step([frozen] * len(weights), weights, info(t, num_jobs=len(weights)))
        for vector in (outer.eval_model(), outer.broadcast(), outer.final_model()):
            # array_equal: a value frozen at -0.0 may become 0.0
            assert np.array_equal(vector, frozen)


@EVERY_RULE
def test_statistics_take_the_mean_and_forget_momentum(rule: OuterRule) -> None:
    variance = [slice(0, 3), slice(20, 31)]
    outer = after_a_few_steps(rule, 40, chunk_size=8)
    random = np.random.default_rng(5)
    # falling variances
    vectors = [random.uniform(0.0, 1e-3, 40).astype(np.float32) for _ in range(3)]
    untouched = after_a_few_steps(rule, 40, chunk_size=8)
    untouched.step(vectors, [1, 2, 3], info(3, num_jobs=9))
    outer.step(vectors, [1, 2, 3], info(3, num_jobs=9), statistics=variance)
    mean = reference.float32_mean(vectors, [1, 2, 3])
    for part in variance:
        assert bits(outer.eval_model()[part]) == bits(outer.broadcast()[part]) == bits(mean[part])
        for name, value in rule.buffers.items():
            assert (outer.arrays[name][part] == np.float32(value)).all()
    for part in (slice(3, 20), slice(31, 40)):  # the rest does not notice
        assert bits(outer.eval_model()[part]) == bits(untouched.eval_model()[part])


# ----------------------------------------------------------------------- fragments, chunks, threads
@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[tuple[slice, slice]]]:
    """(size, pieces that cover a model of that size once, in any order, some of them empty)."""
    size = draw(st.integers(1, 200))
    edges = sorted([*draw(st.lists(st.integers(0, size), max_size=12)), 0, size])
    parts = draw(st.permutations([slice(first, stop) for first, stop in itertools.pairwise(edges)]))
    ends = list(itertools.accumulate(part.stop - part.start for part in parts))
    return size, [(part, slice(end - (part.stop - part.start), end)) for part, end in zip(parts, ends, strict=True)]


def gathered(vector: Any, pieces: list[tuple[slice, slice]]) -> Any:
    return np.concatenate([vector[part] for part, _ in pieces]) if pieces else vector[:0]


@EVERY_RULE
@settings(max_examples=40, deadline=None)
@given(cut=cuts(), chunk_size=st.integers(1, 250), num_threads=st.integers(1, 3), seed=st.integers(0, 1000))
def test_pieces_chunks_and_threads_change_no_bit_and_drop_no_element(
        rule: OuterRule, cut: tuple[int, list[tuple[slice, slice]]], chunk_size: int, num_threads: int, seed: int) -> None:
    size, pieces = cut
    whole = after_a_few_steps(rule, size, seed=seed, ema_decay=0.9)
    cut_up = after_a_few_steps(rule, size, seed=seed, ema_decay=0.9, chunk_size=chunk_size, num_threads=num_threads)
    vectors = [some_model(size, np.float32, seed=job) for job in range(3)]
    whole.step(vectors, [1, 2, 3], info(3, num_jobs=9))
    cut_up.step([gathered(vector, pieces) for vector in vectors], [1, 2, 3], info(3, num_jobs=9), pieces=pieces)
    assert bits(whole.broadcast()) == bits(cut_up.broadcast())
    for name, vector in whole.arrays.items():
        assert bits(vector) == bits(cut_up.arrays[name])


@settings(max_examples=40, deadline=None)
@given(cut=cuts(), num_fragments=st.integers(1, 4))
def test_streaming_all_fragments_in_turn_is_one_step_of_diloco(cut: tuple[int, list[tuple[slice, slice]]],
                                                              num_fragments: int) -> None:
    size, pieces = cut
    whole, streaming = (after_a_few_steps(make_rule(OuterConfig(kind=kind)), size) for kind in ("diloco", "streaming"))
    vectors = [some_model(size, np.float32, seed=job) for job in range(3)]
    whole.step(vectors, [1, 2, 3], info(3))
    for fragment in range(num_fragments):
        before = streaming.eval_model().copy()
        parts = [part for part, _ in pieces[fragment::num_fragments]]
        ends = list(itertools.accumulate(part.stop - part.start for part in parts))
        own = [(part, slice(end - (part.stop - part.start), end)) for part, end in zip(parts, ends, strict=True)]
        streaming.step([gathered(vector, own) for vector in vectors], [1, 2, 3], info(3 + fragment), pieces=own)
        elsewhere = np.ones(size, bool)
        for part in parts:
            elsewhere[part] = False
        assert bits(streaming.eval_model()[elsewhere]) == bits(before[elsewhere])
    for name, vector in whole.arrays.items():
        assert bits(vector) == bits(streaming.arrays[name])


def test_a_fragment_takes_only_the_statistics_that_it_holds() -> None:
    outer = after_a_few_steps(DiLoCo(), 10)
    before = outer.eval_model().copy()
    outer.step([np.arange(4, dtype=np.float32)], [1.0], info(), statistics=[slice(0, 4)], pieces=[(slice(2, 6), slice(0, 4))])
    after = outer.eval_model()
    assert after[2:4].tolist() == [0.0, 1.0]
    assert bits(after[:2]) == bits(before[:2])
    assert (after[4:6] != np.array([2.0, 3.0])).all()  # momentum


@pytest.mark.parametrize("lengths", [(9, 9), (11, 11), (10, 9), (1, 1)])
def test_vectors_of_another_length_are_refused(lengths: tuple[int, int]) -> None:
    outer = after_a_few_steps(DiLoCo(), 10)
    before = outer.eval_model().copy()
    with pytest.raises(ValueError, match="model 10"):
        outer.step([np.zeros(length, np.float32) for length in lengths], [1, 1], info())
    assert bits(outer.eval_model()) == bits(before)


@pytest.mark.parametrize("pieces", [
    [(slice(0, 5), slice(0, 4))], [(slice(0, 1), slice(0, 4))], [(slice(8, 12), slice(0, 4))], [(slice(0, 4), slice(1, 5))],
    [(slice(0, 3), slice(0, 3)), (slice(2, 3), slice(3, 4))], [(slice(-4, 0), slice(0, 4))], [(slice(4, 0), slice(4, 0))],
], ids=["shorter", "longer", "past_model", "past_vector", "overlap", "negative", "backwards"])
def test_pieces_that_do_not_fit_are_refused(pieces: list[tuple[slice, slice]]) -> None:
    outer = after_a_few_steps(DiLoCo(), 10)
    before = outer.eval_model().copy()
    with pytest.raises(ValueError, match="model of 10"):
        outer.step([np.zeros(4, np.float32)], [1.0], info(), pieces=pieces)
    assert bits(outer.eval_model()) == bits(before)


@pytest.mark.parametrize("rule", [Average(), Bmuf(8.0), DiLoCo()], ids=["average", "bmuf", "diloco"])
def test_a_step_needs_a_tenth_of_a_model_however_many_jobs(rule: OuterRule) -> None:
    size = 1_000_000
    outer = OuterOptimizer(rule, some_model(size, np.float32))
    vectors = [some_model(size, np.float32, seed=job) for job in range(4)] * 16
    outer.step(vectors, [1.0] * 64, info(0, num_jobs=64))  # momentum is there
    tracemalloc.start()
    try:
        outer.step(vectors, [1.0] * 64, info(1, num_jobs=64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 0.1 * vectors[0].nbytes


# -------------------------------------------------------------------------------------------- state
@EVERY_RULE
def test_resume_from_a_saved_state_is_bitwise_equal(rule: OuterRule) -> None:
    outer = after_a_few_steps(rule, 30, ema_decay=0.9)
    state = outer.state_dict()
    saved = {"arrays": {name: np.array(vector, np.float32) for name, vector in state["arrays"].items()},
             "numbers": dict(state["numbers"])}
    resumed = OuterOptimizer(rule, np.zeros(30, np.float32), ema_decay=0.9)
    resumed.load_state_dict(saved)
    assert bits(resumed.broadcast()) == bits(outer.broadcast())
    vectors = [some_model(30, np.float32, seed=job) for job in range(3)]
    for which in (outer, resumed):
        which.step(vectors, [1, 2, 3], info(3, num_jobs=9))
    for name, vector in outer.arrays.items():
        assert bits(vector) == bits(resumed.arrays[name])
        assert vector is not saved["arrays"][name]


@pytest.mark.parametrize("other", [
    OuterOptimizer(DiLoCo(), np.zeros(31, np.float32)), OuterOptimizer(DiLoCo(), np.zeros(30)),
    OuterOptimizer(DiLoCo(), np.zeros(30, np.float32), ema_decay=0.9), OuterOptimizer(Average(), np.zeros(30, np.float32)),
    OuterOptimizer(Bmuf(), np.zeros(30, np.float32)),
], ids=["size", "dtype", "moving_average", "no_momentum", "block_momentum"])
def test_the_state_of_another_optimizer_is_refused(other: OuterOptimizer) -> None:
    outer = after_a_few_steps(DiLoCo(), 30)
    before = outer.eval_model().copy()
    with pytest.raises(ValueError, match="another outer"):
        outer.load_state_dict(other.state_dict())
    assert bits(outer.eval_model()) == bits(before)


def test_the_broadcast_is_written_where_it_is_wanted() -> None:
    outer = after_a_few_steps(Bmuf(4.0), 30)
    found = np.empty(30, np.float32)
    assert outer.broadcast(found) is found
    assert bits(found) == bits(outer.broadcast())
    with pytest.raises(ValueError, match="30 elements"):
        outer.broadcast(np.empty(31, np.float32))
