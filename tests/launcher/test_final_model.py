"""The final model as it is written down and read again, and which models are combined into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.final_model import load_final, save_final, wanted_for_combination
from launcher.run_folder import RunFolder
from ngsgd.config import CombinationConfig, ModelConfig, RunConfig
from ngsgd.models.staged import set_stage, utterance_logits
from ngsgd.models.stages import Stage
from ngsgd.training.planning import stages_of
from tests import toy

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TDNN = ModelConfig(kind="tdnn", num_layers=2, hidden_dim=16, normalize="batchnorm", tdnn_offsets="-1,0,1 -1,0")
MODELS = {
    "relu": ModelConfig(num_layers=2, hidden_dim=16),
    "tdnn with all there is": replace(TDNN, input_transform="lda", num_subclasses=20, add_layers_period=1, prior_scale_power=-0.25),
    "tdnnf": replace(TDNN, kind="tdnnf", bottleneck_dim=4),
    "the user's own": ModelConfig(_target_="small_cnn:SmallCnn", search_path=str(EXAMPLES), args={"channels": 2, "hidden_dim": 8}),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_final_model_is_read_as_it_was_written_without_the_examples(tmp_path: Path, model: ModelConfig) -> None:
    run = toy.Run(tmp_path, toy.config(model=model))
    run.train()
    folder = RunFolder(tmp_path)
    save_final(folder, run.config, run.model.eval(), run.reader)
    x_NI = run.reader.diagnostic("valid").x_ND
    for file in run.egs.iterdir():  # the folder is all that is needed
        file.unlink()
    read, prior_P = load_final(folder, trust=True)
    assert torch.equal(read(x_NI), run.model(x_NI))
    assert torch.equal(utterance_logits(read, x_NI), utterance_logits(run.model, x_NI))
    assert prior_P.sum() == pytest.approx(1.0)


def test_a_run_that_ended_before_its_model_was_whole_leaves_what_it_was(tmp_path: Path) -> None:
    run = toy.Run(tmp_path, toy.config(model=MODELS["tdnn with all there is"]))
    with torch.no_grad():  # so that every stage has an output of its own
        for parameter in run.model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    set_stage(run.model, Stage(1, False))
    x_NI = run.reader.diagnostic("valid").x_ND
    save_final(RunFolder(tmp_path), run.config, run.model.eval(), run.reader)
    read, _ = load_final(RunFolder(tmp_path))
    assert torch.equal(read(x_NI), run.model(x_NI))
    set_stage(run.model, Stage(2, True))
    assert not torch.equal(read(x_NI), run.model(x_NI))


def test_only_models_of_the_last_stage_are_combined(tmp_path: Path) -> None:
    config: RunConfig = toy.config(combination=CombinationConfig("mean"), model=ModelConfig(
        num_layers=2, hidden_dim=16, add_layers_period=1, num_subclasses=20))
    run = toy.Run(tmp_path, config)
    assert run.schedule.num_outer_iters == 6
    assert wanted_for_combination(config, run.schedule, stages_of(config, run.reader)) == (5,)  # split before the last
    plain = replace(config, model=ModelConfig())
    assert wanted_for_combination(plain, run.schedule, stages_of(plain, run.reader)) == (5, 4, 3)
