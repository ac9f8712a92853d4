"""Models of a user: errors are one message, and correct models train in every process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ngsgd import NGSGD
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ModelConfig, RunConfig, check
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import compose
from ngsgd.models import Window, build_model
from ngsgd.runs import config_file
from ngsgd.training.worker import make_optimizer
from tests import toy

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_inputs, num_classes, width=8, **sizes):
        super().__init__(nn.Linear(num_inputs, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes))
        self.sizes = sizes

class Factored(Net):
    layer_options = {"0": {"orthonormal_constraint": -1.0}}

class WrongOptions(Net):
    layer_options = {"no_such_layer": {"max_change": 1.0}}

def double(**sizes):
    return Net(**sizes).double()

def frozen(**sizes):
    return Net(**sizes).requires_grad_(False)

def wide(num_classes, **sizes):
    return Net(num_classes=num_classes + 1, **sizes)

def number(**sizes):
    return 3

def needs_more(num_inputs, num_classes, left_context, right_context, feature_dim, seed, depth):
    return None

def narrow(num_inputs, **sizes):
    return Net(num_inputs=num_inputs - 1, **sizes)

def infinite(**sizes):
    model = Net(**sizes)
    nn.init.constant_(model[0].weight, float("inf"))
    return model

constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / f"{module_of(tmp_path)}.py").write_text(MODULE)
    (tmp_path / "broken_net.py").write_text("def Net(:\n")
    return tmp_path


def module_of(folder: Path) -> str:
    """A name that no other test has imported."""
    return "net_" + folder.name.replace("[", "_").replace("]", "_").replace("-", "_")


def built(config: ModelConfig) -> Any:
    return build_model(config, 20, 6, 7, window=Window(2, 1, 5))


@pytest.mark.parametrize("separator", [":", "."])
def test_the_factory_receives_the_sizes_the_seed_and_the_arguments(folder: Path, separator: str) -> None:
    config = ModelConfig(_target_=f"{module_of(folder)}{separator}Net", search_path=str(folder), args={"width": 5})
    state = torch.random.get_rng_state()
    model = built(config)
    assert model.sizes == {"left_context": 2, "right_context": 1, "feature_dim": 5, "seed": 7}
    assert (model[0].in_features, model[0].out_features, model[3].out_features) == (20, 5, 6)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), built(config).parameters(), strict=True))


@pytest.mark.parametrize(("target", "said"), [
    ("nothing_here:Net", r"nothing_here\).*model\.search_path"),
    ("Net", "write package.module:Name"), ("broken_net:Net", r"\(SyntaxError"),
    ("MODULE:Nett", "Nett"), ("MODULE:constant", "constant"), ("MODULE:number", "torch.nn.Module"),
    ("MODULE:needs_more", "'depth'"), ("MODULE:frozen", "parameter"),
    ("MODULE:double", r"0\.weight \(float64\).*float32"), ("MODULE:wide", r"\(3, 7\).*\(3, 6\)"),
    ("MODULE:narrow", "20 spliced"), ("MODULE:infinite", "logits"),
    ("MODULE:WrongOptions", "layer_options.*no_such_layer")])
def test_errors_are_reported(folder: Path, target: str, said: str) -> None:
    config = ModelConfig(_target_=target.replace("MODULE", module_of(folder)), search_path=str(folder))
    with pytest.raises(ConfigError, match=said) as caught:
        built(config)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_settings_of_our_own_models_do_not_go_with_it_and_arguments_are_a_mapping() -> None:
    model = ModelConfig(_target_="a:B", num_subclasses=3, add_layers_period=1, prior_scale_power=-0.25, input_transform="lda")
    assert [sentence.split()[0] for sentence in check(RunConfig(model=model))] == [
        "model.num_subclasses", "model.add_layers_period", "model.prior_scale_power", "model.input_transform"]
    with pytest.raises(ConfigError, match=r"model.args.*model._target_=''"):
        compose.compose(["model.args={width: 3}"])
    with pytest.raises(ConfigError) as caught:
        compose.compose(["model._target_=a.b:C", "model.args=3"])
    assert caught.value.problems == ["model.args is 3; it must be a mapping, such as {width: 64}."]


@pytest.mark.parametrize("overrides", [["model.args={width:64,name:x}"], ["+model.args.width=64", "+model.args.name=x"]])
def test_the_command_line_gives_arguments(overrides: list[str], tmp_path: Path) -> None:
    config = compose.compose(["model._target_=a.b:C", *overrides])
    assert (config.model._target_, config.model.args) == ("a.b:C", {"width": 64, "name": "x"})
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(config))
    assert config_file.read_config(tmp_path / "config.yaml") == config


def test_options_of_a_layer_reach_the_optimizer(folder: Path) -> None:
    model = built(ModelConfig(_target_=f"{module_of(folder)}:Factored", search_path=str(folder)))
    optimizer = make_optimizer(model, toy.config().optimizer, 0.01, 1.0)
    assert [group["orthonormal_constraint"] for group in optimizer.param_groups] == [-1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "args", "fallbacks"), [
    ("small_cnn:SmallCnn", {"channels": 8, "hidden_dim": 32}, None),
    ("small_conformer:SmallConformer",
     {"dim": 16, "num_blocks": 1, "num_heads": 2, "kernel_size": 3}, ["position_WC"])])
def test_the_examples_train_with_a_natural_gradient_for_all_but_positions(
        tmp_path: Path, name: str, args: dict[str, Any], fallbacks: list[str] | None) -> None:
    model = ModelConfig(_target_=name, search_path=str(EXAMPLES), args=args)
    config = toy.config(model=model, schedule=replace(toy.config().schedule, num_epochs=2.0))
    run = toy.Run(tmp_path, config)
    run.train()
    assert run.recorder.records[-1].valid.accuracy > 0.8  # six classes; chance is 0.17
    optimizer = make_optimizer(run.model, run.config.optimizer, 0.01, 1.0)
    assert fallbacks is None or (isinstance(optimizer, NGSGD) and optimizer.fallbacks == fallbacks)


def test_worker_processes_import_it_and_draw_its_dropout_by_the_job(folder: Path) -> None:
    model = ModelConfig(_target_=f"{module_of(folder)}:Net", search_path=str(folder), args={"width": 16})
    whole = toy.Run(folder / "in_process", toy.config(model=model)).train()
    sys.path.remove(str(folder))  # the processes must find it by themselves
    run = toy.Run(folder / "processes", toy.config(model=model))
    pool = ProcessPool(run.spec, 2, 1, run.store.layout.size, log_directory=run.folder / "workers")
    assert run.train(pool).model_sha256 == whole.model_sha256
