"""What of a model is in use when, what a new stage makes, and sub-classes of the output layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError
from ngsgd.models import DataStatistics, Window, build_model, growing
from ngsgd.models.growing import Stage, StagedModel, Stages, SumSubclasses, network_at
from tests.conftest import Golden
from tests.reference import models as reference

GOLDEN = Golden("blocks.npz")
COUNTS = DataStatistics((500.0, 40.0, 3000.0))


def stages(num_outer_iters: int = 40, **model: Any) -> Stages:
    return Stages.of(ModelConfig(**model), num_outer_iters)


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_layers_are_added_in_kaldis_iterations(num_layers: int, period: int) -> None:
    ours = stages(num_layers=num_layers, add_layers_period=period)
    assert [ours.at(o).num_layers for o in range(40)] == [reference.layers_of_kaldi(o, num_layers, period) for o in range(40)]


def test_the_split_comes_halfway_between_the_last_layer_and_the_end() -> None:
    # (40 + 4 * 2) / 2 = 24, and after that iteration
    ours = stages(num_layers=4, add_layers_period=2, num_subclasses=10)
    assert [o for o in range(40) if ours.at(o).is_split] == list(range(25, 40))
    assert not any(stages(num_layers=4, add_layers_period=2).at(o).is_split for o in range(40))


@pytest.mark.parametrize(("num_outer_iters", "model", "said"), [
    (5, {"num_layers": 4, "add_layers_period": 2}, "4 layers after 5.*5"),
    (9, {"num_layers": 4, "add_layers_period": 2, "num_subclasses": 9}, "after 9")])
def test_a_run_that_is_too_short_is_reported(num_outer_iters: int, model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stages(num_outer_iters, **model)
    stages(num_outer_iters + 3, **model)


def staged(kind: Any = "relu", **changes: Any) -> StagedModel:
    config = ModelConfig(kind=kind, num_layers=3, hidden_dim=20, tdnn_offsets="-1,0,1 -1,0 0,1", num_subclasses=9,
                         add_layers_period=1, **changes)
    model = build_model(config, 5 * 4, 3, 0, window=Window(2, 2, 4), statistics=COUNTS)
    assert isinstance(model, StagedModel)
    return model


@pytest.mark.parametrize("kind", ["relu", "pnorm", "tdnn", "tdnnf"])
def test_every_stage_is_a_network_of_its_own_layers(kind: Any) -> None:
    model, x_NI = staged(kind), torch.randn(6, 20)
    for num_layers in (1, 2, 3):
        for is_split in (False, True):
            network = network_at(model, Stage(num_layers, is_split))
            assert network(x_NI).shape == (6, 3)
            names = {name.rpartition(".")[0].partition(".")[0] for name, _ in network.named_parameters()}
            assert len(names) == num_layers + 1 and ("subclass_output" in names) == is_split
            assert all(parameter is model.get_parameter(name) for name, parameter in network.named_parameters())
    assert torch.equal(model(x_NI), network_at(model, Stage(3, True))(x_NI))
    assert growing.utterance_logits(model, x_NI).shape == (6, 3)


def test_fewer_subclasses_than_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_subclasses is 3.* 3 "):
        build_model(ModelConfig(num_subclasses=3), 20, 3, 0, statistics=COUNTS)


def test_a_new_layer_gets_its_start_and_the_output_layer_small_random_values() -> None:
    model = staged()
    state = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    made = model.remade(state, Stage(1), Stage(2), seed=5)
    assert set(made) == {"affine2.weight", "affine2.bias", "output.weight", "output.bias"}
    # 400 samples: 3.5 % a standard deviation
    assert float(made["affine2.weight"].std()) == pytest.approx(20**-0.5, rel=0.15)
    # 60 samples: 9 %
    assert float(made["output.weight"].std()) == pytest.approx(0.1 * 20**-0.5, rel=0.4)
    assert all(bool((value == 7.0).all()) for value in state.values())
    again, other = (model.remade(state, Stage(1), Stage(2), seed=seed) for seed in (5, 6))
    assert all(torch.equal(made[name], again[name]) for name in made)
    assert not torch.equal(made["affine2.weight"], other["affine2.weight"])
    third = model.remade(state, Stage(2), Stage(3), seed=5)
    assert not torch.equal(made["affine2.weight"], third["affine3.weight"])
    assert set(model.remade(state, Stage(1), Stage(3), seed=5)) == set(made) | set(third)


def test_a_new_layer_has_the_statistics_of_no_data() -> None:
    model = staged(normalize="batchnorm")
    state = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items() if value.is_floating_point()}
    made = model.remade(state, Stage(2), Stage(3), seed=0)
    assert made["batchnorm3.running_mean"].tolist() == [0.0] * 20 and made["batchnorm3.running_var"].tolist() == [1.0] * 20


@pytest.mark.parametrize("power", [0.0, -0.25])
def test_the_split_hardly_changes_a_posterior(power: float) -> None:
    model, x_NI = staged(prior_scale_power=power), torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.get_submodule("output").parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    before = model.at(Stage(3))(x_NI).softmax(dim=1)
    made = model.remade(model.state_dict(), Stage(3), Stage(3, True), seed=0)
    assert set(made) == {"subclass_output.weight", "subclass_output.bias"} and sum(model.targets) == 9
    model.load_state_dict(made, strict=False)
    after = model(x_NI).exp()
    # +-0.01 randn of 20 inputs of unit size
    assert 0.0 < float((after - before).detach().abs().max()) < 0.05


@pytest.mark.parametrize("case", GOLDEN.cases("mix"))
def test_the_numbers_of_subclasses_are_kaldis(case: str) -> None:
    config = GOLDEN.config(case)
    ours = growing.split_targets(GOLDEN(case, "counts").tolist(), config["num_mixtures"],
                                 config["power"], config["min_count"])
    assert ours == GOLDEN(case, "targets").tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_numbers_of_subclasses_are_those_of_the_slow_search(seed: int) -> None:
    counts = np.random.default_rng(seed).lognormal(5.0, 2.0, 20).tolist()
    for total, min_count in ((5, 10.0), (40, 10.0), (1000, 10.0), (60, 0.0)):
        expected = reference.split_targets(counts, total, 0.3, min_count)
        assert growing.split_targets(counts, total, 0.3, min_count) == expected


def test_the_sum_is_the_reference_and_exponentials_sum_to_one() -> None:
    targets = [1, 4, 2]
    z_NS = 5.0 * torch.randn(30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y_NP = SumSubclasses(targets)(z_NS)
    expected = reference.log_sum_of_softmax(z_NS.numpy(), targets)
    np.testing.assert_allclose(y_NP.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(y_NP.exp().sum(dim=1), 1.0, rtol=1e-12, atol=0.0)
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
    weight_PH, bias_P, x_NH = (torch.randn(shape, dtype=torch.float64, generator=generator)
                               for shape in ((3, 5), (3,), (20, 5)))
    targets = [1, 3, 4]
    weight_SH, bias_S = growing.split_rows(weight_PH, bias_P, targets, generator, perturbation=0.0)
    assert growing.classes_of_subclasses(targets) == [0, 1, 1, 1, 2, 2, 2, 2]
    before = torch.nn.functional.linear(x_NH, weight_PH, bias_P).log_softmax(dim=1)
    after = SumSubclasses(targets)(torch.nn.functional.linear(x_NH, weight_SH, bias_S))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_a_split_moves_two_copies_apart_by_the_same_noise_and_halves_them() -> None:
    weight_PH, bias_P = torch.zeros(1, 4000), torch.zeros(1)
    weight_SH, bias_S = growing.split_rows(weight_PH, bias_P, [2], torch.Generator().manual_seed(0))
    assert torch.equal(weight_SH[0], -weight_SH[1])
    # 4000 samples: 1.1 % is one standard deviation
    assert float(weight_SH[0].std()) == pytest.approx(0.01, rel=0.05)
    assert bias_S.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_prior_scales_have_mean_one_and_rare_classes_the_larger() -> None:
    counts = [900.0, 90.0, 10.0, 0.0]
    scale = growing.prior_scale(counts, -0.25)
    expected = np.array([(count + 0.01 * 250.0) ** -0.25 for count in counts])
    np.testing.assert_allclose(scale.numpy(), expected / expected.mean(), rtol=1e-12)
    assert float(scale.mean()) == pytest.approx(1.0)
