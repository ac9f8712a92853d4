"""The final model as it is written down and read again, and which models are combined into it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ngsgd.config import CombinationConfig, ModelConfig, RunConfig
from ngsgd.errors import CheckpointError, ConfigError
from ngsgd.files import sealed, sha256, unsealed
from ngsgd.launcher import cli
from ngsgd.models.growing import Stage, set_stage, utterance_logits
from ngsgd.pipeline.run import wanted_for_combination
from ngsgd.runs import config_file
from ngsgd.runs.final_model import DIGESTS, load_final, save_final
from ngsgd.runs.run_folder import RunFolder, with_digest
from ngsgd.tasks.speech import stages_of
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


def test_a_run_that_ended_early_keeps_its_last_model(tmp_path: Path) -> None:
    run = toy.Run(tmp_path, toy.config(model=MODELS["tdnn with all there is"]))
    with torch.no_grad():  # so that every stage has a separate output
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
    # split before the last
    assert wanted_for_combination(config, run.schedule, stages_of(config, run.reader)) == (5,)
    plain = replace(config, model=ModelConfig())
    assert wanted_for_combination(plain, run.schedule, stages_of(plain, run.reader)) == (5, 4, 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run = toy.Run(folder, toy.config())
    save_final(RunFolder(folder), run.config, run.model.eval(), run.reader)
    return folder / "final"


@pytest.fixture
def final(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "final")
    (tmp_path / "config.yaml").write_text("{}")
    return tmp_path / "final"


def cut(data: bytes) -> bytes:
    return data[:len(data) // 2]


def flip(data: bytes) -> bytes:
    """The highest bit of the exponent of the last parameter."""
    return data[:-1] + bytes([data[-1] ^ 0x40])


@pytest.mark.parametrize("damage", [cut, flip, lambda data: b"", lambda data: data[:8] + b"\xff" * 8 + data[16:],
                                    lambda data: b"[" * 100_000, lambda data: b"\xff\xfe"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.json", DIGESTS])
def test_a_damaged_file_of_a_final_model_is_found(final: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    (final / name).write_bytes(damage((final / name).read_bytes()))
    with pytest.raises(CheckpointError, match="final"):
        load_final(RunFolder(final.parent))


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_a_missing_file_of_a_final_model_is_found(final: Path, name: str) -> None:
    (final / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_final(RunFolder(final.parent))


@pytest.mark.parametrize("damage", [cut, lambda data: b"", lambda data: b"[]", lambda data: b"{}", lambda data: b'{"model": {}}',
                                    lambda data: data.replace(b'"num_inputs": ', b'"num_inputs": 9'),
                                    lambda data: data.replace(b'"hidden_dim": 16', b'"hidden_dim": 1000000000'),
                                    lambda data: data.replace(b'"kind"', b'"kin"'),
                                    lambda data: data.replace(b'"priors": [', b'"priors": [NaN, '),
                                    lambda data: data.replace(b'"num_inputs": ', b'"num_inputs": -')])
def test_a_wrong_description_with_its_digest_is_found(final: Path, damage: Callable[[bytes], bytes]) -> None:
    (final / "model.json").write_bytes(damage((final / "model.json").read_bytes()))
    write_digests(final)
    with pytest.raises((CheckpointError, ConfigError)):
        load_final(RunFolder(final.parent))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_refused_with_its_digest_too(final: Path, value: float) -> None:
    state = load_file(final / "model.safetensors")
    load_final(RunFolder(final.parent))
    next(iter(state.values())).view(-1)[0] = value
    save_file(state, final / "model.safetensors")
    write_digests(final)
    with pytest.raises(CheckpointError, match="not finite"):
        load_final(RunFolder(final.parent))


def write_digests(final: Path) -> None:
    digests = {path.name: sha256(path) for path in final.iterdir() if path.name != DIGESTS}
    (final / DIGESTS).write_text(json.dumps(sealed("final model", digests)))


@pytest.mark.entry("C2", "use a final model without its `digests.json`, or a file of a run without its checksum", "error",
                   "`CheckpointError` names the file: a partial copy of a run does not look complete.")
def test_a_final_model_without_digests_is_refused(final: Path) -> None:
    state = load_file(final / "model.safetensors")
    load_final(RunFolder(final.parent))
    save_file({name: 1.5 * tensor for name, tensor in state.items()}, final / "model.safetensors")
    (final / DIGESTS).unlink()
    with pytest.raises(CheckpointError, match=DIGESTS):
        load_final(RunFolder(final.parent))


@pytest.mark.entry("C2")
@pytest.mark.parametrize("name", ["input_transform.safetensors", RunFolder.IVECTORS, RunFolder.ADAPTATION])
def test_a_file_of_a_model_that_no_digest_covers_is_refused(final: Path, name: str) -> None:
    digests = unsealed("final model", json.loads((final / DIGESTS).read_text()))
    (final / name).write_bytes(b"added")
    (final / DIGESTS).write_text(json.dumps(sealed("final model", {key: value for key, value in digests.items() if key != name})))
    with pytest.raises(CheckpointError, match=name):
        load_final(RunFolder(final.parent))


def test_digests_of_files_elsewhere_are_not_read(final: Path) -> None:
    digests = unsealed("final model", json.loads((final / DIGESTS).read_text()))
    (final / DIGESTS).write_text(json.dumps(sealed("final model", {"/dev/zero": "0", **digests})))
    with pytest.raises(CheckpointError, match="zero"):
        load_final(RunFolder(final.parent))


def test_digests_of_a_final_model_name_every_file(whole: Path) -> None:
    digests = unsealed("final model", json.loads((whole / DIGESTS).read_text()))
    assert digests == {path.name: sha256(path) for path in whole.iterdir() if path.name != DIGESTS}


@pytest.mark.parametrize("words", [["decode", "RUN"], ["evaluate", "RUN"], ["export", "RUN", "-o", "OUT"]], ids=" ".join)
def test_commands_end_with_the_exit_code_of_a_checkpoint(final: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (final.parent / "config.yaml").write_text(with_digest(config_file.to_yaml(toy.config())))
    (final / "model.safetensors").write_bytes(cut((final / "model.safetensors").read_bytes()))
    assert cli.main([word.replace("RUN", str(final.parent)).replace("OUT", str(final.parent / "out")) for word in words]) == 6
    said = capsys.readouterr().err
    assert "model.safetensors" in said and "--debug" not in said
