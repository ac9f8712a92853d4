"""nnet3 raw models: identical bits back, the form Kaldi reads, and what cannot be exchanged."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.models.build import build_model
from ngsgd.models.layers import DataStatistics, Window
from ngsgd.models.nnet3.network import describe, rebuild
from ngsgd.models.nnet3.raw_models import from_text, model_from_bytes, to_text, vector_from_bytes, vector_from_text, vector_to_text
from tests.reference import nnet3_text

WINDOW, BESIDE = Window(2, 1, 5), Window(2, 1, 5, side_dim=3)
SHAPES: dict[str, dict[str, Any]] = {
    "relu": {}, "pnorm": {"pnorm_group": 4}, "relu-batchnorm": {"normalize": "batchnorm"},
    "tdnn": {"tdnn_offsets": "-1,0,1 -1,0"}, "tdnn-batchnorm": {"tdnn_offsets": "-1,0,1 -1,0", "normalize": "batchnorm"},
    "pnorm-batchnorm": {"pnorm_group": 4, "normalize": "batchnorm"}, "relu-dropout": {"dropout_schedule": "0.2"},
    "relu-lda": {"input_transform": "lda"}, "tdnn-lda": {"tdnn_offsets": "-1,0,1 -1,0", "input_transform": "lda"},
}


def trained(name: str, window: Window = WINDOW) -> tuple[nn.Module, ModelConfig]:
    """A model with numbers in every place, as after training."""
    settings, kind = SHAPES[name], cast(Any, name.partition("-")[0])
    config = ModelConfig(kind=kind, num_layers=2, hidden_dim=8, **settings)
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
def test_models_come_back_with_identical_bits(name: str, window: Window) -> None:
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
<RankIn> 2 <RankOut> 1 <UpdatePeriod> 4 <NumSamplesHistory> 2000 <Alpha> 4 </NaturalGradientAffineComponent>\x20
<ComponentName> tdnn1.relu <RectifiedLinearComponent> <Dim> 2 <ValueAvg>  [ ]
<DerivAvg>  [ ]
<Count> 0 <OderivRms>  [ ]
<OderivCount> 0 <NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 </RectifiedLinearComponent>\x20
<ComponentName> tdnn1.batchnorm <BatchNormComponent> <Dim> 2 <BlockDim> 2 <Epsilon> 0.001 <TargetRms> 1 <TestMode> F <Count> 5 \
<StatsMean>  [ 0.5 0.25 ]
<StatsVar>  [ 1 2 ]
</BatchNormComponent>\x20
<ComponentName> output.affine <NaturalGradientAffineComponent> <MaxChange> 0.75 <LearningRate> 0.001 <LinearParams>  [
  1 -1
  0.5 3 ]
<BiasParams>  [ 0 0.75 ]
<RankIn> 1 <RankOut> 1 <UpdatePeriod> 4 <NumSamplesHistory> 2000 <Alpha> 4 </NaturalGradientAffineComponent>\x20
<ComponentName> output.log-softmax <LogSoftmaxComponent> <Dim> 2 <ValueAvg>  [ ]
<DerivAvg>  [ ]
<Count> 0 <OderivRms>  [ ]
<OderivCount> 0 <NumDimsSelfRepaired> 0 <NumDimsProcessed> 0 </LogSoftmaxComponent>\x20
</Nnet3> """


def test_a_sample_in_the_form_that_kaldi_reads_is_computed_and_written_as_it_stands() -> None:
    """Tokens and their order are those of a file that Kaldi took; numbers by hand."""
    network = from_text(SAMPLE)
    assert to_text(network) == SAMPLE
    made = rebuild(network)
    x = np.array([[1.0, 2.0], [3.0, -1.0]])           # frames -1 and 0
    affine = np.array([1 * 1 + 0.5 * 3 - 1 * -1 + 0.125, 2 * 2 + 0.25 * -1 - 0.25])
    y = (np.maximum(affine, 0.0) - [0.5, 0.25]) / np.sqrt(np.array([1.0, 2.0]) + 1e-3)
    logits = np.array([y[0] - y[1], 0.5 * y[0] + 3 * y[1] + 0.75])
    found = made.model(torch.from_numpy(x.reshape(1, -1)).float())
    # float32, a dozen operations
    torch.testing.assert_close(found, torch.from_numpy(logits[None]).float(), rtol=1e-5, atol=1e-5)


def test_statistics_of_kaldi_and_other_settings_are_passed_over() -> None:
    text = SAMPLE.replace("<Count> 0 <OderivRms>", "<Count> 12.5 <OderivRms>").replace("<MaxChange> 0.75 ", "<L2Regularize> 0.01 ")
    text = text.replace("<ValueAvg>  [ ]", "<ValueAvg>  [ 0.5 0.5 ]").replace("NaturalGradientAffineComponent", "AffineComponent")
    assert torch.equal(rebuild(from_text(text)).model.state_dict()["output.weight"], torch.tensor([[1.0, -1.0], [0.5, 3.0]]))


@pytest.mark.parametrize(("settings", "reason"), [
    ({"num_subclasses": 30}, "sums sub-classes"), ({"kind": "tdnnf"}, "bypass"), ({"prior_scale_power": -0.25}, "scales"),
    ({"_target_": "my:Net"}, "custom module")])
def test_layers_without_an_nnet3_component_are_rejected_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    model, config = trained("relu")
    with pytest.raises(ConfigError, match=reason):
        describe(model, replace(config, **settings), WINDOW)


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("Append(Offset(input, -1), input)", "Append(input, ReplaceIndex(ivector, t, 0))", "i-vector.*tdnn1"),
    ("Append(Offset(input, -1), input)", "Append(ReplaceIndex(ivector, t, 0), input)", "ReplaceIndex"),
    ("RectifiedLinearComponent", "SigmoidComponent", "SigmoidComponent"), ("<TargetRms> 1", "<TargetRms> 0.5", "target-rms"),
    ("<Nnet3>", "<Nnet>", "raw model"), ("  0.5 3 ]", "  0.5 ]", "LinearParams"),
    ("name=output.affine component=output.affine", "name=output.affine component=missing", "missing")])
def test_unreadable_input_is_reported(old: str, new: str, reason: str) -> None:
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
    """Each of 400 files has one word replaced; only DataError is raised."""
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


# Binary files, and text that Kaldi's own programs wrote


def as_binary(name: str, window: Window = WINDOW) -> tuple[str, bytes]:
    text = to_text(describe(*trained(name, window), window))
    return text, nnet3_text.to_binary(nnet3_text.read(text), text)


@pytest.mark.entry("K5", "a model or priors go through Kaldi's programs and come back", "works",
                   "binary files (`nnet3-copy`, the default) are read as well as text and keep every bit of weights. "
                   "`--binary=false` prints 7 digits, so that weights change by up to 5e-7 of their size. Priors are "
                   "float32 in Kaldi.")
@pytest.mark.parametrize("window", [WINDOW, BESIDE])
@pytest.mark.parametrize("name", SHAPES)
def test_a_binary_model_has_the_bits_of_the_text(name: str, window: Window) -> None:
    text, binary = as_binary(name, window)
    expected, found = (rebuild(network) for network in (from_text(text), model_from_bytes(binary)))
    assert found.config == expected.config and found.window == window
    for key, tensor in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[key], tensor)
    assert to_text(model_from_bytes(text.encode())) == to_text(model_from_bytes(binary))


@pytest.mark.entry("K5")
def test_seven_digits_change_parameters_by_their_rounding_alone() -> None:
    model, config = trained("relu-batchnorm")
    text = to_text(describe(model, config, WINDOW))
    seven = re.sub(r"(?<=[ \n])-?\d+\.\d+(e-\d+)?", lambda match: f"{float(match[0]):.7g}", text)
    assert seven != text
    for key, tensor in rebuild(from_text(seven)).model.state_dict().items():
        # 5e-7, and float32's own 6e-8
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=6e-7, atol=0.0)


@pytest.mark.entry("K5")
@pytest.mark.parametrize("kind", ["FloatVector", "DoubleVector"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_priors_that_kaldis_code_wrote_are_read(tmp_path: Path, kind: Any, is_binary: bool) -> None:
    kaldi_native_io = pytest.importorskip("kaldi_native_io")
    values = np.random.default_rng(0).dirichlet(np.ones(7))
    path = str(tmp_path / "priors.vec")
    getattr(kaldi_native_io, kind)(values).write(path, is_binary)
    found = vector_from_bytes(Path(path).read_bytes())
    # text has 6 or 7 digits
    np.testing.assert_allclose(found, values, rtol=1e-7 if is_binary else 1e-5)
    if is_binary:
        assert np.array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize("content", [b"\0B", b"\0BFM \4\1\0\0\0\4\1\0\0\0\0\0\0\0", b"\0BFV \4\xff\xff\xff\x7f",
                                     b"\0BFV \4\1\0\0\0\0\0\xc0\x7f",
                                     b"\0BFV \4\1\0\0\0\0\0\0\0x", b"\0B\4\1\0\0\0\4\1\0\0\0", b"\xff\xfe"])
def test_a_damaged_vector_is_a_data_error(content: bytes) -> None:
    with pytest.raises(DataError):
        vector_from_bytes(content)


@pytest.mark.entry("K5")
def test_a_damaged_binary_model_is_a_data_error_or_finite() -> None:
    """Cut at every place that is not in the middle of an array, and with single bytes replaced."""
    _, binary = as_binary("pnorm", BESIDE)
    for end in (*range(900), len(binary) - 1):
        with pytest.raises(DataError):
            model_from_bytes(binary[:end])
    random = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(binary)
        changed[int(random.integers(len(binary)))] = int(random.integers(256))
        try:
            made = rebuild(model_from_bytes(bytes(changed)))
        except DataError:
            continue
        assert all(bool(value.isfinite().all()) for value in made.model.state_dict().values())


@pytest.mark.parametrize(("content", "reason"), [
    (b"\0B<TransitionModel> <Topology> ", r"has transitions.*nnet3-am-copy --raw=true"), (b"\0B<Nnet2> \n", "begins with"),
    (b"\0B<Nnet3> \ninput-node name=input dim=2\n\n<NumComponents> \4\1\0\0\0"
     b"<ComponentName> a <SomeComponent> <Map> \4\2\0\0\0\7\7\7",
     "SomeComponent"), (b"\x80\4\x95", "nnet3")])
def test_binary_files_of_other_kinds_are_named(content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        model_from_bytes(content)


# Layers that Kaldi's configurations have and models here have not


def with_layer(text: str, name: str, component: str, before: str = "input", after: str = "") -> str:
    """The text with a component node between `before` and the nodes that take it (or `after`)."""
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if line.startswith(f"component-node name={after}"):
            head, _, descriptor = line.partition(" input=")
            lines[at] = f"{head} input=" + re.sub(rf"(?<![\w.-]){re.escape(before)}(?![\w.-])", name, descriptor)
    at = next(number for number, line in enumerate(lines) if line.startswith("component-node"))
    lines.insert(at, f"component-node name={name} component={name} input={before}")
    number = int(re.search(r"<NumComponents> (\d+)", text)[1])  # type: ignore[index]
    more = f"<NumComponents> {number + 1} \n<ComponentName> {name} {component}\n"
    return "\n".join(lines).replace(f"<NumComponents> {number} \n", more)


def idct(num_outputs: int = 5) -> str:
    """A FixedAffineComponent with 6 inputs."""
    rows = np.random.default_rng(3).normal(size=(num_outputs, 6)).astype(np.float32)
    numbers = "\n  ".join(" ".join(f"{value:.9g}" for value in row) for row in rows)
    biases = " ".join(["0.5", "-1", "2", "0", "0.25"][:num_outputs])
    return f"<FixedAffineComponent> <LinearParams>  [\n  {numbers} ]\n<BiasParams>  [ {biases} ]\n</FixedAffineComponent> "


@pytest.mark.entry("K6", "you import a model with an idct-layer (a fixed transform of one frame, spliced behind it)", "works",
                   "the transform is repeated for each spliced frame and becomes the model's fixed input transform.")
@pytest.mark.parametrize("window", [WINDOW, BESIDE], ids=["frames", "ivector"])
@pytest.mark.parametrize("name", ["relu", "tdnn", "relu-lda", "tdnn-lda"])
def test_an_idct_layer_is_read_with_the_same_outputs(name: str, window: Window) -> None:
    text = to_text(describe(*trained(name, window), window)).replace("name=input dim=5", "name=input dim=6")
    text = with_layer(text, "idct", idct())
    read = nnet3_text.read(text)
    made = rebuild(from_text(text))
    assert made.window == window._replace(feature_dim=6)
    x_NI = torch.randn(7, made.window.num_inputs, generator=torch.Generator().manual_seed(5))
    expected = nnet3_text.outputs(read, x_NI[:, :24].reshape(7, 4, 6).double().numpy(), 2, x_NI[:, 24:].double().numpy())
    with torch.no_grad():
        found = made.model(x_NI).double().log_softmax(dim=1)
    # float32 of outputs up to 1e3
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-3)
    again = rebuild(from_text(to_text(describe(made.model, made.config, made.window))))
    assert torch.equal(again.model(x_NI), made.model(x_NI))


@pytest.mark.parametrize(("dim", "num_outputs", "reason"), [(4, 5, "16 come"), (7, 5, "28 come"),
                                                            (6, 4, "affine1.*20 inputs.*16 come")])
def test_an_idct_layer_that_does_not_fit_is_named(dim: int, num_outputs: int, reason: str) -> None:
    text = to_text(describe(*trained("relu"), WINDOW)).replace("name=input dim=5", f"name=input dim={dim}")
    with pytest.raises(DataError, match=reason):
        rebuild(from_text(with_layer(text, "idct", idct(num_outputs))))


DROPOUTS = {
    "DropoutComponent": "<Dim> 8 <DropoutProportion> 0.5 <DropoutPerFrame> F <TestMode> F ",
    "GeneralDropoutComponent": "<Dim> 8 <BlockDim> 8 <TimePeriod> 0 <DropoutProportion> 0.2 <Continuous> ",
}


@pytest.mark.entry("K13", "you import a model with dropout layers (`relu-batchnorm-dropout-layer`)", "works",
                   "dropout components are passed over, as Kaldi passes over them outside of training; set "
                   "`model.dropout_schedule` to train on with dropout.")
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_between_layers_is_passed_over(kind: Any) -> None:
    model, config = trained("relu-batchnorm")
    text = to_text(describe(model, config, WINDOW))
    component = f"<{kind}> {DROPOUTS[kind]}</{kind}> "
    changed = with_layer(text, "dropout1", component, before="batchnorm1", after="affine2")
    changed = with_layer(changed, "dropout2", component, before="batchnorm2", after="output")
    assert changed.count(kind) == 4 and "input=dropout1" in changed and "input=dropout2" in changed
    made = rebuild(from_text(changed))
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in made.model.state_dict().items())
    assert to_text(from_text(changed)) == text


def test_dropout_in_a_binary_model_is_passed_over() -> None:
    text, binary = as_binary("relu-batchnorm")
    lines = text[len("<Nnet3> \n"):text.index("\n\n")]
    component = (b"<ComponentName> d <GeneralDropoutComponent> <Dim> \4\10\0\0\0<BlockDim> \4\10\0\0\0<TimePeriod> \4\0\0\0\0"
                 b"<DropoutProportion> \4\0\0\0\x3f<TestMode> <Continuous> </GeneralDropoutComponent> "
                 b"<ComponentName> e <DropoutComponent> <Dim> \4\10\0\0\0<DropoutProportion> \4\0\0\0\x3f<DropoutPerFrame> F"
                 b"<TestMode> T</DropoutComponent> ")
    changed = lines.replace("input=batchnorm1", "input=e").replace("component-node name=output.affine",
                                                                   "component-node name=d component=d input=batchnorm1\n"
                                                                   "component-node name=e component=e input=d\n"
                                                                   "component-node name=output.affine", 1)
    count = b"<NumComponents> \4" + bytes([8])
    assert count in binary
    binary = binary.replace(lines.encode(), changed.encode()).replace(count, b"<NumComponents> \4" + bytes([10]))
    assert to_text(model_from_bytes(binary.replace(b"</Nnet3> ", component + b"</Nnet3> "))) == text
