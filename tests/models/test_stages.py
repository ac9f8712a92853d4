"""What of a model is in use when: Kaldi's iterations, and what a new stage makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ngsgd.config import ModelConfig, ScheduleConfig
from ngsgd.errors import ConfigError
from ngsgd.models import DataStatistics, Window, build_model
from ngsgd.models.growing import Stage, StagedModel, Stages, network_at, utterance_logits
from tests.reference import models as reference

COUNTS = DataStatistics((500.0, 40.0, 3000.0))


def stages(num_outer_iters: int = 40, early_rules: Any = "none", **model: Any) -> Stages:
    return Stages.of(ModelConfig(**model), ScheduleConfig(minibatch_size=129, early_rules=early_rules), num_outer_iters)


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


def test_early_are_the_first_iteration_and_those_with_a_new_layer() -> None:
    ours = stages(early_rules="kaldi", num_layers=3, add_layers_period=2)
    assert [o for o in range(40) if ours.is_early(o)] == [0, 1, 3]
    assert not any(stages(num_layers=3, add_layers_period=2).is_early(o) for o in range(40))


@pytest.mark.parametrize(("num_outer_iters", "model", "said"), [
    (5, {"num_layers": 4, "add_layers_period": 2}, "4 layers after 5.*5"),
    (9, {"num_layers": 4, "add_layers_period": 2, "num_subclasses": 9}, "after 9"),
])
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
    assert torch.equal(model(x_NI), network_at(model, Stage(3, True))(x_NI)) and utterance_logits(model, x_NI).shape == (6, 3)


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
