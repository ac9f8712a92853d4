"""Averages of parameters."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ngsgd import average_parameters
from ngsgd.errors import ConfigError, NgsgdError
from ngsgd.ops.averaging import DTYPES_WITH_MEAN
from ngsgd.optim.outer import Average, Bmuf, OuterInfo, OuterOptimizer


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_mean_of_vectors_equals_float64_and_hardly_depends_on_the_order(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    vectors = [random.normal(size=300).astype(np.float32) for _ in range(count)]
    models = [{"w": torch.from_numpy(vector)} for vector in vectors]
    weights = random.integers(1, 1000, count).tolist()
    exact = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=weights)
    mean = average_parameters(models, weights)["w"].numpy()
    np.testing.assert_allclose(mean, exact, rtol=1e-7, atol=1e-9)  # one rounding to float32
    turned = average_parameters(models[::-1], weights[::-1])["w"].numpy()
    np.testing.assert_allclose(turned, mean, rtol=2e-7, atol=1e-9)


def test_the_average_of_one_model_is_bitwise_identical() -> None:
    w = torch.from_numpy(np.random.default_rng(0).normal(size=1 << 19).astype(np.float32))
    assert torch.equal(average_parameters([{"w": w}], [123])["w"], w)


def test_state_dicts_keep_counters_and_dtypes() -> None:
    first = {"w": torch.tensor([1.0, 3.0], dtype=torch.bfloat16), "n": torch.tensor(7)}
    second = {"w": torch.tensor([3.0, 5.0], dtype=torch.bfloat16), "n": torch.tensor(9)}
    mean = average_parameters([first, second])
    assert mean["w"].tolist() == [2.0, 4.0] and mean["w"].dtype == torch.bfloat16
    assert mean["n"] == 7


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [float("nan"), 1.0]])
def test_weights_that_cannot_be_shares_are_refused(weights: list[float]) -> None:
    models = [{"w": torch.zeros(1)}] * 2
    with pytest.raises(ValueError, match="Invalid weights"):
        average_parameters(models, weights)


def test_models_of_other_layers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'v'"):
        average_parameters([{"w": torch.zeros(1)}, {"v": torch.zeros(1)}])


@pytest.mark.entry("A11", "you average models with `average_parameters`", "works",
                   "Running variances of batch normalization are pooled with the means, as the service pools them; complex entries "
                   "are averaged. Other keys, shapes or dtypes and NaN are refused: `AveragingError` (a `ValueError`) names the "
                   "entry and the model.")
def test_variances_are_pooled_in_float64_from_the_definition() -> None:
    random = torch.Generator().manual_seed(0)
    states = [{"b.running_mean": torch.randn(4, generator=random), "b.running_var": torch.rand(4, generator=random),
               "running_var": torch.rand(2, generator=random), "b.num_batches_tracked": torch.tensor(3)} for _ in range(3)]
    weights = [1.0, 2.0, 5.0]
    mean = average_parameters(states, weights)
    share = torch.tensor(weights, dtype=torch.float64) / 8.0
    m, v = (torch.stack([state[f"b.running_{what}"].double() for state in states]) for what in ("mean", "var"))
    center = (share[:, None] * m).sum(dim=0)
    wanted = (share[:, None] * (v + m.square())).sum(dim=0) - center.square()
    # rounded to float32
    torch.testing.assert_close(mean["b.running_var"].double(), wanted, rtol=1e-6, atol=1e-7)
    plain = (share[:, None] * torch.stack([state["running_var"].double() for state in states])).sum(dim=0)
    # without a mean: a parameter as any
    torch.testing.assert_close(mean["running_var"].double(), plain, rtol=1e-6, atol=0.0)


@pytest.mark.entry("A11")
@pytest.mark.parametrize(("second", "told"), [
    (torch.zeros(1), r"dict 1.*\[1\].*\[3\]"), (torch.zeros(3, dtype=torch.float64), "float64"),
    (torch.zeros(3, dtype=torch.int64), "int64"), (torch.tensor([0.0, float("nan"), 0.0]), "not finite"),
    (torch.tensor([0.0, float("inf"), 0.0]), "not finite"), ("text", "not a tensor")])
def test_models_that_have_no_mean_are_refused(second: Tensor, told: str) -> None:
    for models in ([{"w": torch.zeros(3)}, {"w": second}], [{"w": torch.zeros(3)}] * 2 + [{"w": second}]):
        with pytest.raises(ValueError, match=told.replace("dict 1", rf"dict {len(models) - 1}")) as error:
            average_parameters(models)
        assert isinstance(error.value, NgsgdError)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(DTYPES_WITH_MEAN, key=str))
def test_every_dtype_with_a_mean_is_averaged(dtype: torch.dtype) -> None:
    exact = torch.complex128 if dtype.is_complex else torch.float64
    models = [{"w": torch.randn(4, 3, dtype=exact).to(dtype)} for _ in range(3)]
    mean = average_parameters(models, [1, 2, 3])["w"]
    wanted = sum(weight * model["w"].to(exact) for weight, model in zip((1, 2, 3), models, strict=True)) / 6
    # one rounding: float8 has 2 or 3 bits behind the point
    eps = 0.25 if dtype.itemsize == 1 else torch.finfo(dtype).eps
    torch.testing.assert_close(mean.to(exact), wanted, rtol=eps, atol=eps)
    assert torch.equal(average_parameters([models[0]] * 2)["w"].to(exact), models[0]["w"].to(exact))
    assert mean.dtype is dtype and not torch.equal(mean.to(exact), models[0]["w"].to(exact))


def test_models_of_weight_zero_do_not_count_and_constants_stay() -> None:
    mask = torch.tensor([0.1, -torch.inf])
    models = [{"w": torch.ones(2) * value, "mask": mask} for value in (1.0, torch.nan, 4.0)]
    models[1]["mask"] = mask * torch.nan
    mean = average_parameters(models, [1, 0, 2])
    assert mean["w"].tolist() == [3.0, 3.0] and torch.equal(mean["mask"], mask)
    with pytest.raises(NgsgdError):
        average_parameters(models)


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_entries_without_dense_values_are_refused(tensor: Tensor) -> None:
    with pytest.raises(NgsgdError, match="layer"):
        average_parameters([{"layer": tensor}] * 2)


@pytest.mark.entry("B13", "you give modules to `average_parameters`, or a tensor to `OuterOptimizer`", "works",
                   "`average_parameters` takes modules as well as state dicts. `OuterOptimizer` takes flat NumPy vectors; anything "
                   "else is a `ConfigError` that explains how to get one.")
def test_modules_are_taken_for_their_state_dicts() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    mean = average_parameters(models)
    assert torch.equal(mean["weight"], average_parameters([model.state_dict() for model in models])["weight"])
    wrong: Any
    for wrong in (nn.Linear(2, 2).state_dict(), [torch.zeros(2)], [None]):
        with pytest.raises(NgsgdError, match="sequence"):
            average_parameters(wrong)
    with pytest.raises(NgsgdError, match="at least"):
        average_parameters([])


@pytest.mark.entry("B13")
def test_an_outer_optimizer_of_anything_but_a_flat_array_is_refused() -> None:
    wrong: Any
    for wrong in (torch.zeros(4), np.zeros((2, 2)), nn.Linear(2, 2), {"w": torch.zeros(4)}, [0.0]):
        with pytest.raises(ConfigError, match="parameters_to_vector"):
            OuterOptimizer(Bmuf(2.0), wrong)
    rule: Any
    for rule in (Bmuf, "bmuf", np.zeros(4)):
        with pytest.raises(ConfigError, match="rule"):
            OuterOptimizer(rule, np.zeros(4, np.float32))
    outer = OuterOptimizer(Average(), np.zeros(4, np.float32))
    vectors: list[Any] = [np.ones(4, np.float32), torch.ones(4)]
    with pytest.raises(ConfigError, match="vector 1"):
        outer.step(vectors, [1, 1], OuterInfo(0, 10, 2, 0.1))
    assert not outer.eval_model().any()
