"""Averages of parameters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ngsgd import average_parameters
from ngsgd.ops.averaging import weighted_mean


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_mean_of_vectors_equals_float64_and_hardly_depends_on_the_order(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    vectors = [random.normal(size=300).astype(np.float32) for _ in range(count)]
    weights = random.integers(1, 1000, count).tolist()
    exact = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=weights)
    mean = weighted_mean(vectors, weights)
    np.testing.assert_allclose(mean, exact, rtol=1e-7, atol=1e-9)  # one rounding to float32
    np.testing.assert_allclose(weighted_mean(vectors[::-1], weights[::-1]), mean, rtol=2e-7, atol=1e-9)


def test_one_model_averages_to_itself_bit_for_bit() -> None:
    vector = np.random.default_rng(0).normal(size=1 << 19).astype(np.float32)  # more than one chunk
    assert np.array_equal(weighted_mean([vector], [123]), vector)


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
