"""Sub-classes of the output layer: number, allocation and sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ngsgd.models.subclasses import SumSubclasses, classes_of_subclasses, prior_scale, split_rows, split_targets
from tests.conftest import Golden
from tests.reference import models as reference

GOLDEN = Golden("blocks.npz")


@pytest.mark.parametrize("case", GOLDEN.cases("mix"))
def test_the_numbers_of_subclasses_are_kaldis(case: str) -> None:
    config = GOLDEN.config(case)
    ours = split_targets(GOLDEN(case, "counts").tolist(), config["num_mixtures"], config["power"], config["min_count"])
    assert ours == GOLDEN(case, "targets").tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_numbers_of_subclasses_are_those_of_the_slow_search(seed: int) -> None:
    counts = np.random.default_rng(seed).lognormal(5.0, 2.0, 20).tolist()
    for total, min_count in ((5, 10.0), (40, 10.0), (1000, 10.0), (60, 0.0)):
        assert split_targets(counts, total, 0.3, min_count) == reference.split_targets(counts, total, 0.3, min_count)


def test_the_sum_is_the_reference_and_exponentials_sum_to_one() -> None:
    targets = [1, 4, 2]
    z_NS = 5.0 * torch.randn(30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y_NP = SumSubclasses(targets)(z_NS)
    np.testing.assert_allclose(y_NP.numpy(), reference.log_sum_of_softmax(z_NS.numpy(), targets), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y_NP.exp().sum(dim=1), torch.ones(30, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert torch.autograd.gradcheck(SumSubclasses(targets), (z_NS[:4].requires_grad_(),))


@pytest.mark.parametrize("distance", [60.0, 1000.0])
def test_a_distant_class_has_the_floor_as_value_and_a_useful_gradient(distance: float) -> None:
    z_NS = torch.tensor([[distance, 0.0, 0.0]], requires_grad=True)
    y_NP = SumSubclasses([1, 2])(z_NS)
    assert float(y_NP[0, 1].detach()) == pytest.approx(math.log(1e-20))
    (gradient,) = torch.autograd.grad(y_NP[0, 1], z_NS)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.5, 0.5]]))


def test_splitting_without_perturbation_changes_no_posterior() -> None:
    generator = torch.Generator().manual_seed(1)
    weight_PH, bias_P, x_NH = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 5), (3,), (20, 5)))
    targets = [1, 3, 4]
    weight_SH, bias_S = split_rows(weight_PH, bias_P, targets, generator, perturbation=0.0)
    assert classes_of_subclasses(targets) == [0, 1, 1, 1, 2, 2, 2, 2]
    before = torch.nn.functional.linear(x_NH, weight_PH, bias_P).log_softmax(dim=1)
    after = SumSubclasses(targets)(torch.nn.functional.linear(x_NH, weight_SH, bias_S))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_a_split_moves_two_copies_apart_by_the_same_noise_and_halves_them() -> None:
    weight_PH, bias_P = torch.zeros(1, 4000), torch.zeros(1)
    weight_SH, bias_S = split_rows(weight_PH, bias_P, [2], torch.Generator().manual_seed(0))
    assert torch.equal(weight_SH[0], -weight_SH[1])
    # 4000 samples: 1.1 % is one standard deviation
    assert float(weight_SH[0].std()) == pytest.approx(0.01, rel=0.05)
    assert bias_S.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_prior_scales_have_mean_one_and_rare_classes_the_larger() -> None:
    counts = [900.0, 90.0, 10.0, 0.0]
    scale = prior_scale(counts, -0.25)
    expected = np.array([(count + 0.01 * 250.0) ** -0.25 for count in counts])
    np.testing.assert_allclose(scale.numpy(), expected / expected.mean(), rtol=1e-12)
    assert float(scale.mean()) == pytest.approx(1.0)
