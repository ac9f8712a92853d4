"""`ngsgd export` refuses in one message, and leaves nothing half written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import kaldi_native_fbank as knf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import FeatureConfig
from ngsgd.errors import ConfigError, MissingExtraError
from ngsgd.exports import onnx
from ngsgd.exports.sherpa import mfcc_matrix, require_support
from ngsgd.exports.source import StandaloneNetwork
from ngsgd.launcher.cli import main
from ngsgd.models import Window
from tests.launcher.commands.test_kaldi import write_run

FORMATS = ["onnx", "torch", "sherpa-onnx", "huggingface"]


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("format_name", [*FORMATS, "bundle", "nnet3"])
def test_existing_files_are_not_overwritten(format_name: str, is_folder: bool, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    run, output = write_run(tmp_path / "run", []), tmp_path / "model"
    file = output / "final.raw" if is_folder else output
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    assert main(["export", "--format", format_name, str(run), str(output)]) == 2
    assert file.read_text() == "mine" and f"{output} exists" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "format_name"), [(".ngsgd", "bundle"), (".onnx", "onnx"), (".pt2", "torch")])
def test_a_name_of_another_format_is_refused(ending: str, format_name: str, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    run, output = write_run(tmp_path / "run", []), tmp_path / f"model{ending}"
    for other in ([], ["--format", "huggingface"]):
        assert main(["export", *other, str(run), str(output)]) == 2
        assert f"--format {format_name}," in capsys.readouterr().err and not output.exists()


@pytest.mark.parametrize("has_network", [True, False])
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_run_that_has_not_ended_is_named(format_name: str, has_network: bool, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [])
    if not has_network:
        shutil.rmtree(run / "final")
    assert main(["export", "--format", format_name, str(run), str(tmp_path / "model")]) == 6
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(run) in error
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize("words", [
    ["RUN"], ["RUN", "OUT", "--output", "OUT"], ["RUN", "OUT", "--format", "tflite"], ["RUN", "OUT", "--format", "onnx", "--data"],
    ["RUN", "OUT", "--format", "torch", "--egs", "1"], ["RUN", "OUT", "--format", "onnx", "--license", "mit"],
    ["RUN", "OUT", "--license", "mit"]], ids=" ".join)
def test_options_that_do_not_go_together_are_refused(words: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    arguments = [{"RUN": str(run), "OUT": str(tmp_path / "out")}.get(word, word) for word in words]
    assert main(["export", *arguments]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("features", "ivector_dim"), [
    (FeatureConfig(kind="given"), 0), (FeatureConfig(cmvn="speaker"), 0), (FeatureConfig(cmvn="online"), 0), (FeatureConfig(), 4)],
    ids=["given", "speaker", "online", "ivectors"])
def test_sherpa_onnx_takes_no_model_whose_input_it_cannot_compute(features: FeatureConfig, ivector_dim: int) -> None:
    with pytest.raises(ConfigError, match=r"format.onnx"):
        require_support(features, ivector_dim)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"ngsgd\[onnx\]"):
        onnx.convert(nn.Linear(2, 2), (torch.zeros(1, 2),), ({},), input_names=["x"], output_names=["y"], facts={})


class Branching(nn.Linear):
    def forward(self, x_NI: Tensor) -> Tensor:
        return super().forward(x_NI if x_NI.sum() > 0.0 else -x_NI)


@pytest.mark.slow
def test_a_custom_model_that_torch_cannot_export_is_an_error() -> None:
    pytest.importorskip("onnxscript")
    network = StandaloneNetwork(Branching(9, 2), Window(1, 1, 3), np.array([0.5, 0.5])).eval()
    frames = torch.export.Dim("T", min=4, max=100)
    with pytest.raises(ConfigError, match="torch cannot export"):
        onnx.convert(network, (torch.ones(1, 9, 3),), ({1: frames},), input_names=["frames"], output_names=["loglik"], facts={})


@pytest.mark.slow
def test_a_model_that_changes_with_its_neighbours_is_an_error() -> None:
    """torch.export keeps the result of the example; onnxruntime shows that."""
    pytest.importorskip("onnxscript")

    class Frozen(nn.Module):
        def forward(self, x_NTD: Tensor) -> Tensor:
            return x_NTD * float(x_NTD.shape[0])
    frozen: Any = Frozen()
    proto = onnx.convert(frozen, (torch.ones(2, 3, 1),), ({1: torch.export.Dim("T", min=2, max=9)},), input_names=["frames"],
                         output_names=["loglik"], facts={})
    onnx.check(proto, frozen, [(torch.ones(2, 5, 1),)])
    with pytest.raises(ConfigError, match="differs from torch"):
        onnx.check(proto, nn.Identity(), [(torch.ones(2, 5, 1),)])


@pytest.mark.parametrize(("num_mel_bins", "num_ceps"), [(23, 13), (40, 40)])
def test_cepstra_of_filterbanks_are_those_of_the_features(num_mel_bins: int, num_ceps: int) -> None:
    samples = np.random.default_rng(0).normal(0.0, 1000.0, 1600).astype(np.float32)
    frames = {}
    for kind in ("Fbank", "Mfcc"):
        options = getattr(knf, f"{kind}Options")()
        options.frame_opts.samp_freq, options.frame_opts.dither, options.mel_opts.num_bins = 8000, 0.0, num_mel_bins
        if kind == "Mfcc":
            options.num_ceps, options.use_energy = num_ceps, False
        stream = getattr(knf, f"Online{kind}")(options)
        stream.accept_waveform(8000, samples)
        frames[kind] = np.stack([stream.get_frame(t) for t in range(stream.num_frames_ready)])
    # float32 there
    np.testing.assert_allclose(frames["Fbank"] @ mfcc_matrix(num_mel_bins, num_ceps).T, frames["Mfcc"], rtol=1e-4, atol=1e-3)
