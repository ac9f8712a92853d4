"""A weight for each model and layer, the search that finds them, and the rescaling of layers after
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.data.reader import Minibatch
from ngsgd.models import PNorm, Renormalize, build_model
from ngsgd.pipeline.combination import HeldOut, generalized, layer_weights, normalize_stddev
from ngsgd.pipeline.combination.layer_weights import (
    Function,
    WeightedLayers,
    direction,
    maximize,
    preconditioner,
)
from ngsgd.training.parameter_vector import FlatLayout, Vector
from tests.pipeline.combination.test_combination import frames, given
from tests.reference import combination as reference
from tests.toy import DIM, NUM_CLASSES

Array = npt.NDArray[np.float64]

NUM_HIDDEN, NUM_MODELS, NUM_FRAMES = 4, 3, 150  # two minibatches of 64 and one of 22


def mean_of(vectors: Sequence[Vector]) -> Array:
    return np.asarray(np.mean(vectors, axis=0, dtype=np.float64))


class Problem:
    """Random models of two layers in float64, and the same by the reference."""

    def __init__(self, seed: int = 0) -> None:
        x_ND, pdf_N, _ = frames(NUM_FRAMES, seed)
        model = nn.Sequential(nn.Linear(DIM, NUM_HIDDEN), nn.Tanh(), nn.Linear(NUM_HIDDEN, NUM_CLASSES)).double()
        self.held_out = HeldOut(model, Minibatch(x_ND.double(), pdf_N))
        random = np.random.default_rng(seed)
        self.vectors = [random.normal(size=self.held_out.layout.size).astype(np.float32) for _ in range(NUM_MODELS)]
        self.weighted = WeightedLayers(np.stack(self.vectors), self.held_out)
        self.weights_KL = random.normal(size=(NUM_MODELS, 2))
        first = DIM * NUM_HIDDEN + NUM_HIDDEN
        self.layer_of = [0] * first + [1] * (self.held_out.layout.size - first)

    def reference_objf(self, weights_KL: Array, part: slice = slice(None)) -> float:
        theta = reference.combined([v.astype(np.float64) for v in self.vectors], self.layer_of, weights_KL)
        x_ND, pdf_N, _ = self.held_out.minibatch
        return reference.two_layer_objf(theta, x_ND[part].numpy(), pdf_N[part].numpy(), NUM_HIDDEN, NUM_CLASSES)


def test_a_frame_that_weighs_two_counts_as_if_it_were_there_twice() -> None:
    problem = Problem()
    x_ND, pdf_N, _ = problem.held_out.minibatch
    weight_N = (torch.arange(len(pdf_N)) % 3).double()
    twice = torch.repeat_interleave(torch.arange(len(pdf_N)), weight_N.long())
    found = []
    for minibatch in (Minibatch(x_ND, pdf_N, weight_N), Minibatch(x_ND[twice], pdf_N[twice])):
        held_out = HeldOut(problem.held_out.model, minibatch)
        weighted = WeightedLayers(np.stack(problem.vectors), held_out)
        found.append((*weighted.objf_and_gradient(problem.weights_KL), held_out(problem.vectors[0])[0]))
    for one, other in zip(*found, strict=True):
        assert np.allclose(one, other, rtol=1e-9)  # float64 sums in another order


def test_objective_and_gradient_equal_finite_differences_of_the_definition() -> None:
    problem = Problem()
    objf, gradient_KL = problem.weighted.objf_and_gradient(problem.weights_KL)
    # float64 rounding
    assert abs(objf - problem.reference_objf(problem.weights_KL) / NUM_FRAMES) < 1e-12
    wanted_KL = reference.finite_difference_gradient(problem.reference_objf, problem.weights_KL) / NUM_FRAMES
    # differences err by about 1e-9
    np.testing.assert_allclose(gradient_KL, wanted_KL, atol=1e-6 * np.abs(wanted_KL).max())


def test_gradients_do_not_depend_on_how_many_rows_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    whole = problem.weighted.objf_and_gradient(problem.weights_KL)
    monkeypatch.setattr("ngsgd.pipeline.combination.layer_weights.ROWS_AT_ONCE", 7)
    monkeypatch.setattr("ngsgd.pipeline.combination.layer_weights.CHUNK_ELEMENTS", 5)
    parts = problem.weighted.objf_and_gradient(problem.weights_KL)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-12)   # the order of float64 sums
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-10)


def test_the_scatter_is_that_of_the_gradients_of_every_64_frames() -> None:
    problem = Problem(seed=1)
    gradients = [reference.finite_difference_gradient(partial(problem.reference_objf, part=slice(first, first + 64)),
                                                      problem.weights_KL) for first in range(0, NUM_FRAMES, 64)]
    wanted_MM = reference.scatter(gradients)
    scatter_MM = problem.weighted.scatter(problem.weights_KL, 64)
    # differences err by about 1e-9
    np.testing.assert_allclose(scatter_MM, wanted_MM, atol=1e-6 * np.abs(wanted_MM).max())


@pytest.mark.parametrize("rank", [1, 3, 10])
def test_the_factor_gives_the_smoothed_scatter(rank: int) -> None:
    random = np.random.default_rng(rank)
    gradients = [1000.0 * random.normal(size=6) for _ in range(rank)]
    for gradient in gradients:
        gradient[4] = 0.0  # a weight that changes nothing
    scatter_MM = reference.scatter(gradients)
    C_MM = preconditioner(scatter_MM)
    assert np.array_equal(C_MM, np.tril(C_MM))
    wanted_MM = reference.smoothed_scatter(scatter_MM)
    # one factorization's rounding
    np.testing.assert_allclose(C_MM @ C_MM.T, wanted_MM, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(C_MM[4, 4] ** 2, 1.01e-20, rtol=1e-9)
    # of zeros
    np.testing.assert_allclose(preconditioner(np.zeros((3, 3))), np.sqrt(1.01e-20) * np.eye(3), rtol=1e-12)


def test_a_layer_is_a_module_with_direct_trainable_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    model[3].weight = model[0].weight
    assert layer_weights.updatable_layers(model) == {"0": ["0.weight", "0.bias"],
                                                     "1.0": ["1.0.weight", "1.0.bias"],
                                                     "1.1": ["1.1.weight", "1.1.bias"],
                                                     "3": ["3.bias"]}


def test_the_parameters_are_the_weighted_models() -> None:
    problem = Problem(seed=2)
    combined = generalized(given(problem.vectors), problem.held_out)
    assert combined.chosen == "generalized" and combined.num_models == NUM_MODELS
    weights_KL = np.array(list(combined.weights.values())).T
    assert list(combined.weights) == ["0", "2"]
    wanted_P = reference.combined([v.astype(np.float64) for v in problem.vectors], problem.layer_of, weights_KL)
    # rounded to float32 once
    np.testing.assert_allclose(combined.parameters, wanted_P, rtol=1e-6, atol=1e-9)
    # the parameters it returns are float32, with float64 inside
    np.testing.assert_allclose(combined.objf, problem.reference_objf(weights_KL) / NUM_FRAMES, rtol=1e-6)
    mean_KL = np.full_like(weights_KL, 1.0 / NUM_MODELS)
    np.testing.assert_allclose(combined.mean_objf[NUM_MODELS], problem.reference_objf(mean_KL) / NUM_FRAMES, rtol=1e-6)


def test_the_optimum_of_a_concave_problem_is_found() -> None:
    x_ND, pdf_N, _ = frames(200, 7)
    held_out = HeldOut(nn.Linear(DIM, NUM_CLASSES, bias=False).double(), Minibatch(x_ND.double(), pdf_N))
    random = np.random.default_rng(7)
    vectors = [random.normal(size=held_out.layout.size).astype(np.float32) for _ in range(4)]
    matrices = [v.reshape(NUM_CLASSES, DIM).astype(np.float64) for v in vectors]
    wanted_K, wanted_objf = reference.newton_maximum(x_ND.double().numpy(), pdf_N.numpy(), matrices)
    combined = generalized(given(vectors), held_out)
    assert combined.mean_objf[4] < wanted_objf - 0.1  # there is something to find
    # a maximum is flat: errors of the weights enter squared
    assert abs(combined.objf - wanted_objf) < 1e-6
    np.testing.assert_allclose(combined.weights[""], wanted_K, atol=1e-3)


@pytest.mark.parametrize("max_evaluations", [1, 2, 5, 40])
def test_never_worse_than_the_mean_or_the_newest_model(max_evaluations: int) -> None:
    chosen = set()
    for seed in range(12):
        problem = Problem(seed)
        vectors = problem.vectors
        if seed % 3 == 0:  # the newest is good, the others are far off
            vectors = [generalized(given(vectors), problem.held_out).parameters, *(v * np.float32(9) for v in vectors[1:])]
        if seed % 3 == 1:  # their noise cancels in the mean, which only scales can better
            vectors = [vectors[0] + vectors[1], vectors[0] - vectors[1]]
        combined = generalized(given(vectors), problem.held_out, max_evaluations=max_evaluations)
        newest, mean = (problem.held_out(v)[0] for v in (vectors[0], mean_of(vectors).astype(np.float32)))
        assert combined.objf == problem.held_out(combined.parameters)[0] >= max(newest, mean)
        assert (combined.objf_newest, combined.mean_objf[len(vectors)]) == (newest, mean)
        if combined.chosen != "generalized":
            assert combined.objf == {"newest": newest, "mean": mean}[combined.chosen]
        chosen.add(combined.chosen)
    assert chosen >= {"newest", "mean" if max_evaluations == 1 else "generalized"}


def test_of_equals_the_simplest_is_chosen() -> None:
    problem = Problem()
    newest_P = problem.vectors[0]
    # random models shout
    assert problem.held_out(newest_P * np.float32(0.25))[0] > problem.held_out(newest_P)[0]
    for others, chosen in (([], "newest"), ([newest_P * np.float32(-0.5)], "mean")):
        # with one evaluation the search stays at the mean of all
        assert generalized(given([newest_P, *others]), problem.held_out, max_evaluations=1).chosen == chosen


def test_a_mean_that_is_not_finite_leaves_the_newest_model() -> None:
    problem = Problem()
    model = problem.held_out.model.float()  # float64 would not overflow
    held_out = HeldOut(model, frames(NUM_FRAMES, 0))
    combined = generalized(given([problem.vectors[0], problem.vectors[1] * np.float32(1e38)]), held_out)
    assert combined.chosen == "newest"
    assert np.array_equal(combined.parameters, problem.vectors[0])
    assert combined.mean_objf[2] == -np.inf


def test_minibatches_whose_gradient_is_not_finite_stay_out_of_the_scatter() -> None:
    problem = Problem()
    held_out = HeldOut(problem.held_out.model.float(), frames(NUM_FRAMES, 0))
    scatter_MM = WeightedLayers(np.stack(problem.vectors), held_out).scatter(np.full((NUM_MODELS, 2), 1e40), 64)
    assert np.array_equal(scatter_MM, np.zeros((6, 6)))


def test_a_layer_without_effect_is_no_obstacle() -> None:
    problem = Problem()
    model = nn.Sequential(*problem.held_out.model.children())
    model.register_module("unused", nn.Linear(2, 2))
    model.forward = problem.held_out.model.forward  # type: ignore[method-assign]
    with_unused = HeldOut(model.double(), problem.held_out.minibatch)
    vectors = [np.append(v, np.arange(6, dtype=np.float32)) for v in problem.vectors]
    combined, without = generalized(given(vectors), with_unused), generalized(given(problem.vectors), problem.held_out)
    # nothing moves them; one solve's rounding
    np.testing.assert_allclose(combined.weights["unused"], 1.0 / 3.0, rtol=1e-9)
    assert combined.objf > without.mean_objf[3] + 0.1


def test_the_order_of_the_models_permutes_their_weights() -> None:
    problem = Problem(seed=3)
    order = [2, 0, 1]
    # few evaluations: rounding errors grow from step to step
    first, second = (generalized(given([problem.vectors[k] for k in ks]), problem.held_out, max_evaluations=8)
                     for ks in ([0, 1, 2], order))
    assert first.chosen == second.chosen == "generalized"
    assert first.objf > first.mean_objf[3] + 0.1
    for layer, weights_K in first.weights.items():
        np.testing.assert_allclose(second.weights[layer], [weights_K[k] for k in order], rtol=1e-6, atol=1e-9)


def test_frozen_parameters_and_buffers_get_the_plain_mean() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 8), Renormalize(), nn.Linear(8, NUM_CLASSES))
    model[0].requires_grad_(False)
    model.register_buffer("seen", torch.zeros(2))
    layout, held_out = FlatLayout.of(model), HeldOut(model, frames(200, 1))
    vectors = [np.random.default_rng(k).normal(size=layout.size).astype(np.float32) for k in range(3)]
    for vector in vectors:
        # frozen: the same in all models
        vector[layout.part("0.weight")] = vectors[0][layout.part("0.weight")]
    combined = generalized(given(vectors), held_out)
    assert combined.chosen == "generalized" and list(combined.weights) == ["2"]
    assert np.array_equal(combined.parameters[layout.part("0.weight")], vectors[0][layout.part("0.weight")])
    mean_P = mean_of(vectors)
    for name in ("0.bias", "seen"):
        np.testing.assert_allclose(combined.parameters[layout.part(name)], mean_P[layout.part(name)], rtol=1e-6)


def test_a_shared_parameter_stays_shared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, NUM_CLASSES))
    model[2].weight = model[0].weight
    layout, held_out = FlatLayout.of(model), HeldOut(model, frames(200, 1))
    vectors = [np.random.default_rng(k).normal(size=layout.size).astype(np.float32) for k in range(3)]
    # the tied weight has one entry
    assert "2.weight" not in layout.names
    combined = generalized(given(vectors), held_out)
    assert combined.chosen == "generalized" and combined.parameters.shape == (layout.size,)
    assert model[2].weight is model[0].weight


def counted(function: Function) -> tuple[Function, list[Array]]:
    seen: list[Array] = []

    def watched(x: Array) -> tuple[float, Array]:
        seen.append(x.copy())
        return function(x)
    return watched, seen


def minus_rosenbrock(x: Array) -> tuple[float, Array]:
    a, b = 1.0 - x[0], x[1] - x[0] ** 2
    return float(-a**2 - 100.0 * b**2), np.array([2.0 * a + 400.0 * x[0] * b, -200.0 * b])


@pytest.mark.parametrize("num_pairs", [0, 1, 4])
def test_the_direction_is_that_of_dense_bfgs(num_pairs: int) -> None:
    random = np.random.default_rng(num_pairs)
    A = random.normal(size=(7, 7))
    pairs = [(s, (A @ A.T + np.eye(7)) @ s) for s in random.normal(size=(num_pairs, 7))]
    gradient = random.normal(size=7)
    wanted = reference.bfgs_direction(gradient, pairs, 0.3)
    # float64, D = 7
    np.testing.assert_allclose(direction(gradient, pairs, 0.3), wanted, rtol=1e-9, atol=1e-10)


def test_a_step_that_leaves_the_slope_is_doubled_until_it_does_not() -> None:
    function, seen = counted(lambda x: (-0.5 * float(x @ x), -x))
    maximize(function, np.array([1.0]), max_evaluations=6, first_improvement=1e-2)
    # the slope, x itself, must fall below 0.9 of that at the start; steps are 0.01, 0.02, 0.04,
    # 0.08 and 0.16
    np.testing.assert_allclose(np.concatenate(seen), [1.0, 0.99, 0.98, 0.96, 0.92, 0.84])


def test_a_quadratic_is_climbed_to_the_top_and_no_further() -> None:
    random = np.random.default_rng(0)
    A = random.normal(size=(6, 6))
    H, top = A @ A.T + np.eye(6), random.normal(size=6)
    function, seen = counted(lambda x: (1.0 - 0.5 * float((x - top) @ H @ (x - top)), -H @ (x - top)))
    found = maximize(function, np.zeros(6), max_evaluations=100)
    assert 1.0 - 1e-9 < found.value <= 1.0
    # the root of the value, over the least eigenvalue
    np.testing.assert_allclose(found.x_D, top, atol=1e-4)
    assert len(seen) < 30  # 24; without an end to precision 40


@pytest.mark.parametrize("max_evaluations", [1, 2, 3, 10, 40, 100])
def test_the_budget_holds_and_the_best_point_seen_is_returned(max_evaluations: int) -> None:
    function, seen = counted(minus_rosenbrock)
    found = maximize(function, np.array([-1.2, 1.0]), max_evaluations=max_evaluations)
    assert len(seen) <= max_evaluations
    assert found.value == max(minus_rosenbrock(x)[0] for x in seen)
    if max_evaluations == 40:
        assert len(seen) == 40 or found.value > -1e-9
    if max_evaluations == 100:
        np.testing.assert_allclose(found.x_D, [1.0, 1.0], atol=1e-4)  # a maximum is flat


def test_a_slope_without_end_is_climbed_while_the_budget_lasts() -> None:
    gradient = np.array([3.0, -4.0])
    function, seen = counted(lambda x: (float(gradient @ x), gradient))
    found = maximize(function, np.zeros(2), max_evaluations=10)
    assert len(seen) == 10 and np.array_equal(found.x_D, seen[-1])
    # the first step promises the improvement that was asked for, which is doubled eight times
    np.testing.assert_allclose(seen[1], 0.01 / 25.0 * gradient, rtol=1e-12)
    np.testing.assert_allclose(found.value, 0.01 * 2**8, rtol=1e-12)


@pytest.mark.parametrize(("function", "start_D", "value"),
                         [(lambda x: (1.0 - float(x @ x), -2.0 * x), np.zeros(3), 1.0),
                          (lambda x: (np.nan, x), np.ones(2), -np.inf)], ids=["top", "not finite"])
def test_a_start_that_cannot_be_left_takes_one_evaluation(function: Function, start_D: Array,
                                                          value: float) -> None:
    watched, seen = counted(function)
    assert maximize(watched, start_D).value == value
    assert len(seen) == 1


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_steps_to_non_finite_values_are_shortened(bad: float) -> None:
    """log(1 - x) + 2 x has its top at 1/2; the first step goes far beyond 1."""
    def function(x: Array) -> tuple[float, Array]:
        if x[0] >= 1.0:
            return bad, np.array([bad])
        return float(np.log(1.0 - x[0]) + 2.0 * x[0]), 2.0 - 1.0 / (1.0 - x)
    found = maximize(function, np.array([0.0]), first_improvement=100.0)
    np.testing.assert_allclose(found.x_D, [0.5], atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_lead_below_the_start(seed: int) -> None:
    random = np.random.default_rng(seed)
    values: list[float] = []

    def noise(x: Array) -> tuple[float, Array]:
        values.append(float(random.normal()))
        return values[-1], random.normal(size=4)
    assert maximize(noise, np.zeros(4)).value == max(values)
    assert len(values) <= 40


def stddev_of(vector: Vector, layout: FlatLayout, layer: str) -> float:
    return float(np.concatenate([vector[layout.part(f"{layer}.{name}")] for name in ("weight", "bias")]).std(dtype=np.float64))


@pytest.mark.parametrize("kind", ["relu", "pnorm"])
def test_normalising_changes_scales_and_no_output(kind: Any) -> None:
    model = build_model(ModelConfig(kind=kind, num_layers=3, hidden_dim=20, dropout_schedule="0,0.2,0"), DIM, NUM_CLASSES, 0).eval()
    layout, x_ND = FlatLayout.of(model), frames(500, 0).x_ND
    before = layout.flatten(model.state_dict())
    random = np.random.default_rng(0)
    output = layout.part("output.weight")  # zero at the start
    before[output] = random.normal(size=output.stop - output.start)
    for layer, scale in (("affine1", 7.0), ("affine2", 0.02), ("affine3", -1.0)):
        for name in ("weight", "bias"):
            before[layout.part(f"{layer}.{name}")] *= np.float32(scale)
    after = normalize_stddev(before, model)
    for layer in ("affine1", "affine2", "affine3"):
        assert abs(stddev_of(before, layout, layer) - 1.0) > 0.1
        assert abs(stddev_of(after, layout, layer) - 1.0) < 1e-6  # float32
    assert np.array_equal(after[output], before[output])
    layout.load(model, before)
    wanted = model(x_ND)
    layout.load(model, after)
    # float32 rounds every entry of three layers once more
    torch.testing.assert_close(model(x_ND), wanted, rtol=1e-5, atol=1e-5)


def test_another_standard_deviation_can_be_asked_for_and_equal_parameters_are_left_alone() -> None:
    model = build_model(ModelConfig(num_layers=1), DIM, NUM_CLASSES, 0)
    layout = FlatLayout.of(model)
    assert abs(stddev_of(normalize_stddev(layout.flatten(model.state_dict()), model, 0.25), layout, "affine1") - 0.25) < 1e-6
    ones = np.ones(12, np.float32)
    assert np.array_equal(normalize_stddev(ones,
                                           nn.Sequential(nn.Linear(2, 4), PNorm(2), Renormalize())),
                          ones)


class Skip(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return x + y


def test_only_layers_whose_scale_provably_does_not_matter_are_found() -> None:
    def found(*modules: nn.Module) -> list[str]:
        return layer_weights.scale_invariant_layers(nn.Sequential(*modules))

    assert found(nn.Linear(4, 4), PNorm(2), Renormalize()) == ["0"]
    assert found(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), Renormalize()), nn.Linear(4, 2)) == ["0.0"]
    # not homogeneous
    assert found(nn.Linear(4, 4), nn.Tanh(), Renormalize()) == []
    # a bias in between
    assert found(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Renormalize()) == []
    # its statistics would have to follow
    assert found(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)) == []
    assert found(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), Renormalize()) == []
    twice = nn.Linear(4, 4)
    assert found(twice, nn.ReLU(), Renormalize(), twice) == []
    assert layer_weights.scale_invariant_layers(Skip(nn.Linear(4, 4), nn.ReLU(),
                                                     Renormalize())) == []
