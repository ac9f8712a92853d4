"""nnet3 raw text: the same bits back, the form that Kaldi reads, and what cannot be exchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.models.build import build_model
from ngsgd.models.inputs import DataStatistics, Window
from ngsgd.models.nnet3.network import describe, rebuild
from ngsgd.models.nnet3.text import from_text, to_text, vector_from_text, vector_to_text

WINDOW, BESIDE = Window(2, 1, 5), Window(2, 1, 5, side_dim=3)
SHAPES: dict[str, dict[str, Any]] = {
    "relu": {}, "pnorm": {"pnorm_group": 4}, "relu-batchnorm": {"normalize": "batchnorm"},
    "tdnn": {"tdnn_offsets": "-1,0,1 -1,0"}, "tdnn-batchnorm": {"tdnn_offsets": "-1,0,1 -1,0", "normalize": "batchnorm"},
    "relu-lda": {"input_transform": "lda"}, "tdnn-lda": {"tdnn_offsets": "-1,0,1 -1,0", "input_transform": "lda"},
}


def trained(name: str, window: Window = WINDOW) -> tuple[nn.Module, ModelConfig]:
    """A model with numbers in every place, as after training."""
    settings = SHAPES[name]
    config = ModelConfig(kind=name.partition("-")[0], num_layers=2, hidden_dim=8, **settings)
    seen = 3 if config.kind == "tdnn" else 4
    drawn = torch.randn(6, 5 * seen + window.side_dim + 1, generator=torch.Generator().manual_seed(1))
    transform = drawn if config.input_transform == "lda" else None
    model = build_model(config, window.num_inputs, 3, seed=0, window=window, statistics=DataStatistics(input_transform=transform))
    generator = torch.Generator().manual_seed(2)
    for entry in model.state_dict().values():
        if entry.is_floating_point():
            entry.normal_(0.0, 1.0, generator=generator).abs_()
        else:
            entry.fill_(7)
    return model.eval(), config


@pytest.mark.parametrize("window", [WINDOW, BESIDE])
@pytest.mark.parametrize("name", SHAPES)
def test_models_come_back_with_the_same_bits(name: str, window: Window) -> None:
    model, config = trained(name, window)
    text = to_text(describe(model, config, window))
    made = rebuild(from_text(text))
    assert made.window == window and made.num_classes == 3
    before, after = model.state_dict(), made.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    x_ND = torch.randn(4, window.num_inputs, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model(x_ND), made.model(x_ND))
    assert to_text(describe(made.model, made.config, made.window)) == text


def test_numbers_that_need_all_digits_come_back() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([0.0, -0.0, 1e-45, 3.4028235e38], np.float32)])
    assert np.array_equal(vector_from_text(vector_to_text(values)).view(np.uint32), values.view(np.uint32))


SAMPLE = """<Nnet3>\x20
input-node name=input dim=2
component-node name=tdnn1.affine component=tdnn1.affine input=Append(Offset(input, -1), input)
component-node name=tdnn1.relu component=tdnn1.relu input=tdnn1.affine
component-node name=tdnn1.batchnorm component=tdnn1.batchnorm input=tdnn1.relu
component-node name=output.affine component=output.affine input=tdnn1.batchnorm
component-node name=output.log-softmax component=output.log-softmax input=output.affine
output-node name=output input=output.log-softmax objective=linear

<NumComponents> 5\x20
<ComponentName> tdnn1.affine <NaturalGradientAffineComponent> <MaxChange> 0.75 <LearningRate> 0.001 <LinearParams>  [
  1 0 0.5 -1
  0 2 0 0.25 ]
<BiasParams>  [ 0.125 -0.25 ]
<RankIn> 20 <RankOut> 80 <UpdatePeriod> 4 <NumSamplesHistory> 2000 <Alpha> 4 </NaturalGradientAffineComponent>\x20
<ComponentName> tdnn1.relu <RectifiedLinearComponent> <Dim> 2 <ValueAvg>  [ ]
<DerivAvg>  [ ]
<Count> 0 <OderivRms>  [ ]
<OderivCount> 0 <NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 </RectifiedLinearComponent>\x20
<ComponentName> tdnn1.batchnorm <BatchNormComponent> <Dim> 2 <BlockDim> 2 <Epsilon> 0.001 <TargetRms> 1 <TestMode> T <Count> 5 \
<StatsMean>  [ 0.5 0.25 ]
<StatsVar>  [ 1 2 ]
</BatchNormComponent>\x20
<ComponentName> output.affine <NaturalGradientAffineComponent> <MaxChange> 0.75 <LearningRate> 0.001 <LinearParams>  [
  1 -1
  0.5 3 ]
<BiasParams>  [ 0 0.75 ]
<RankIn> 20 <RankOut> 80 <UpdatePeriod> 4 <NumSamplesHistory> 2000 <Alpha> 4 </NaturalGradientAffineComponent>\x20
<ComponentName> output.log-softmax <LogSoftmaxComponent> <Dim> 2 <ValueAvg>  [ ]
<DerivAvg>  [ ]
<Count> 0 <OderivRms>  [ ]
<OderivCount> 0 <NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 </LogSoftmaxComponent>\x20
</Nnet3> """


def test_a_sample_in_the_form_that_kaldi_reads_is_computed_and_written_as_it_stands() -> None:
    """Tokens and their order are those of a file that nnet3-copy, nnet3-compute and nnet3-train have taken; numbers by hand."""
    network = from_text(SAMPLE)
    assert to_text(network) == SAMPLE
    made = rebuild(network)
    x = np.array([[1.0, 2.0], [3.0, -1.0]])           # frames -1 and 0
    affine = np.array([1 * 1 + 0.5 * 3 - 1 * -1 + 0.125, 2 * 2 + 0.25 * -1 - 0.25])
    y = (np.maximum(affine, 0.0) - [0.5, 0.25]) / np.sqrt(np.array([1.0, 2.0]) + 1e-3)
    logits = np.array([y[0] - y[1], 0.5 * y[0] + 3 * y[1] + 0.75])
    found = made.model(torch.from_numpy(x.reshape(1, -1)).float())
    torch.testing.assert_close(found, torch.from_numpy(logits[None]).float(), rtol=1e-5, atol=1e-5)  # float32, a dozen operations


def test_statistics_of_kaldi_and_other_settings_are_passed_over() -> None:
    text = SAMPLE.replace("<Count> 0 <OderivRms>", "<Count> 12.5 <OderivRms>").replace("<MaxChange> 0.75 ", "<L2Regularize> 0.01 ")
    text = text.replace("<ValueAvg>  [ ]", "<ValueAvg>  [ 0.5 0.5 ]").replace("NaturalGradientAffineComponent", "AffineComponent")
    assert torch.equal(rebuild(from_text(text)).model.state_dict()["output.weight"], torch.tensor([[1.0, -1.0], [0.5, 3.0]]))


@pytest.mark.parametrize(("settings", "reason"), [
    ({"num_subclasses": 30}, "sums sub-classes"), ({"kind": "tdnnf"}, "bypass"), ({"prior_scale_power": -0.25}, "scales"),
    ({"_target_": "my:Net"}, "your own")])
def test_what_nnet3_has_no_component_for_is_refused_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    model, config = trained("relu")
    with pytest.raises(ConfigError, match=reason):
        describe(model, replace(config, **settings), WINDOW)


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("Append(Offset(input, -1), input)", "Append(input, ReplaceIndex(ivector, t, 0))", "takes an i-vector at tdnn1"),
    ("Append(Offset(input, -1), input)", "Append(ReplaceIndex(ivector, t, 0), input)", "ReplaceIndex"),
    ("RectifiedLinearComponent", "SigmoidComponent", "SigmoidComponent"), ("<TargetRms> 1", "<TargetRms> 0.5", "target-rms"),
    ("<Nnet3>", "<Nnet>", "raw model"), ("  0.5 3 ]", "  0.5 ]", "LinearParams"),
    ("name=output.affine component=output.affine", "name=output.affine component=missing", "missing")])
def test_what_cannot_be_read_is_told_in_a_sentence(old: str, new: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        rebuild(from_text(SAMPLE.replace(old, new)))


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "1e39", "NaN"])
@pytest.mark.parametrize("old", ["  1 0 0.5 -1", "[ 0.125 -0.25 ]", "[ 0.5 0.25 ]", "[ 1 2 ]", "  0.5 3 ]", "<Count> 5"])
def test_parameters_that_are_not_finite_are_refused_with_component_and_line(old: str, bad: str) -> None:
    text = SAMPLE.replace(old, old.replace(old.split()[1], bad, 1))
    assert text != SAMPLE
    component = "output" if "3 ]" in old else "batchnorm" if old in ("[ 0.5 0.25 ]", "[ 1 2 ]", "<Count> 5") else "tdnn1.affine"
    name = "tdnn1.batchnorm" if component == "batchnorm" else component
    line = 1 + SAMPLE[:SAMPLE.index(f"<ComponentName> {name}")].count("\n")
    with pytest.raises(DataError, match=rf"{component}.*line {line}\b"):
        rebuild(from_text(text))


@pytest.mark.parametrize("dim", ["1000000000", "-1", "0", "nan", "2.5", "", "3", "99999"])
def test_implausible_input_dims_are_refused(dim: str) -> None:
    with pytest.raises(DataError):
        rebuild(from_text(SAMPLE.replace("name=input dim=2", f"name=input dim={dim}")))


@pytest.mark.parametrize("token", [f"<OutputDim> {value}" for value in ("4", "0", "-1", "nan", "3", "x", "1e9")])
def test_implausible_pnorm_dims_are_refused(token: str) -> None:
    model, config = trained("pnorm")
    text = to_text(describe(model, config, WINDOW))
    changed = text.replace("<OutputDim> 2 ", f"{token} ")
    assert changed != text
    with pytest.raises(DataError):
        rebuild(from_text(changed))


WORDS = ["nan", "inf", "-1", "0", "1e9", "99999999999", "", "]", "[", "<Dim>", "Append(", "input", "\n", "name=", "1 2", "x" * 50,
         "\0", "é"]


def test_mutated_models_are_refused_or_finite() -> None:
    """Each of 400 files has one word replaced; nothing but DataError is raised."""
    random = np.random.default_rng(0)
    model, config = trained("pnorm")
    for text in (SAMPLE, to_text(describe(model, config, BESIDE))):
        words = text.split(" ")
        for _ in range(200):
            at = int(random.integers(len(words)))
            changed = " ".join([*words[:at], str(random.choice(WORDS)), *words[at + 1:]])
            try:
                made = rebuild(from_text(changed))
            except DataError:
                continue
            assert all(bool(value.isfinite().all()) for value in made.model.state_dict().values())
