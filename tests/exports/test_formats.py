"""Exported models of every kind, run by other programs over the test set of a small corpus."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ngsgd.asr.decode import scoring
from ngsgd.asr.decode.evaluation import decode_set
from ngsgd.asr.lang import graphs
from ngsgd.asr.recognizer import Recognizer
from ngsgd.launcher.cli import main
from ngsgd.launcher.commands.train import open_run
from ngsgd.pipeline import build_run, recipe, score
from ngsgd.pipeline.run import Run
from ngsgd.runs.final_model import open_final
from ngsgd.word_errors import WordErrors
from tests.asr.made_up_speech import write_data

pytestmark = pytest.mark.slow

for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign", "onnxruntime", "onnxscript"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SMALL = {"hidden_dim": 32, "num_layers": 3}
OFFSETS = {"tdnn_offsets": "-1,0,1 -1,1 -2,2"}
MFCC = {"kind": "mfcc", "num_mel_bins": 23, "num_ceps": 13, "cmvn": "utterance"}


def custom(target: str, **args: int) -> dict[str, Any]:
    return {"_target_": target, "search_path": str(EXAMPLES), "args": args}


SETTINGS: dict[str, dict[str, Any]] = {
    "relu": {"model": {**SMALL, "kind": "relu", "dropout_schedule": "0.1,0"}},
    "pnorm": {"model": {**SMALL, "kind": "pnorm", "hidden_dim": 40, "normalize": "batchnorm", "input_transform": "lda"}},
    "tdnn": {"model": {**SMALL, **OFFSETS, "kind": "tdnn", "normalize": "batchnorm", "input_transform": "lda"}},
    "tdnnf": {"model": {**SMALL, **OFFSETS, "kind": "tdnnf", "bottleneck_dim": 8}},
    "subclasses": {"model": {**SMALL, "kind": "relu", "num_subclasses": 30, "prior_scale_power": -0.25, "add_layers_period": 1}},
    "mfcc": {"model": {**SMALL, "kind": "relu"}, "features": MFCC},
    "cnn": {"model": custom("small_cnn:SmallCnn", channels=4, hidden_dim=16), "schedule": {"num_epochs": 1.0}},
    "conformer": {"model": custom("small_conformer:SmallConformer", dim=16, num_blocks=1), "schedule": {"num_epochs": 1.0}},
    "ivectors": {"model": {**SMALL, **OFFSETS, "kind": "tdnn"}, "features": {"cmvn": "online"},
                 "ivectors": {"dim": 4, "num_gaussians": 8}}}
Trained = Callable[[str], Run]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs by name of their settings, each trained when it is first needed."""
    folder = tmp_path_factory.mktemp("exports")
    source = write_data(folder / "speech", num_utterances=24)
    runs: dict[str, Run] = {}

    def run_of(name: str) -> Run:
        if name not in runs:
            settings = {"data": {"source": str(source), "alignment": "flat", "labels": "one_step"},
                        "egs": {"samples_per_iter": 2000}, "schedule": {"num_epochs": 1.5},
                        "features": {"cmvn": "utterance"}, "decode": {"lattices": True},
                        "cluster": {"kind": "in_process"}, "output_dir": str(folder / "runs"),
                        **SETTINGS[name]}
            run = build_run(recipe("kaldi", **settings))
            with pytest.MonkeyPatch.context() as patched:
                # a network that has learned little has large lattices
                patched.setattr(score, "LATTICE_BEAM", 0.5)
                run.train()
            runs[name] = open_run(run.folder.path, quiet=True)
        return runs[name]
    return run_of


@pytest.fixture(scope="module")
def in_onnx(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The exported model of a run, next to its graph."""
    @functools.cache
    def model_of(name: str) -> Path:
        model = tmp_path_factory.mktemp(name) / "model.onnx"
        assert main(["export", "--format", "onnx", str(trained(name).folder.path), str(model)]) == 0
        return model
    return model_of


def sequences(run: Run) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]]:
    """(frames with context, i-vectors) of each test utterance, or with i-vectors of each frame."""
    frames, left, right = run.data.corpus.test.frames, run.config.egs.left_context, run.config.egs.right_context
    for first, end in zip(frames.offsets[:-1], frames.offsets[1:], strict=True):
        x_TD = frames.features_TD[first:end]
        padded = np.concatenate([x_TD[:1]] * left + [x_TD] + [x_TD[-1:]] * right)
        if frames.side is None:
            yield padded[None], None
        else:
            windows = np.stack([padded[t:t + left + 1 + right] for t in range(end - first)])
            yield windows, frames.side.rows_RS[frames.side.row_T[first:end]]


def words_of(run: Run, logliks: list[npt.NDArray[np.float32]], graph: Path, scale: float) -> tuple[tuple[str, ...], ...]:
    """Of the test set, by the graph next to the exported model; they have the WER of the run."""
    import kaldifst

    language, test = run.data.corpus.language, run.data.corpus.test
    read = graphs.Graph(kaldifst.StdVectorFst.read(str(graph)), language.topology.words)
    found = decode_set(read, run.config.decode, scale, logliks, language.num_pdfs)
    assert asdict(scoring.score(test.texts, found, test.frames.utt_ids)[0]) == run.metrics["test"]
    return found


def wav_files(run: Run) -> list[Path]:
    folder = Path(run.config.data.source) / "test"
    return [folder / f"{utt_id}.wav" for utt_id in run.data.corpus.test.frames.utt_ids]


def words_of_the_run(run: Run) -> list[list[str]]:
    lines = (run.folder.decode / "test.recogs.txt").read_text().splitlines()
    return [json.loads(line.partition("hyp=")[2].replace("'", '"')) for line in lines if "hyp=" in line]


@pytest.mark.parametrize("name", SETTINGS)
def test_onnxruntime_gives_the_wer_of_the_run(name: str, trained: Trained, in_onnx: Callable[[str], Path]) -> None:
    import onnxruntime

    run, model = trained(name), in_onnx(name)
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    logliks = []
    for frames_NTD, beside_NS in sequences(run):
        feed = {"frames": frames_NTD} | ({} if beside_NS is None else {"ivectors": beside_NS})
        logliks.append(session.run(["loglik"], feed)[0].reshape(-1, len(json.loads(metadata["priors"]))))
    found = words_of(run, logliks, model.with_suffix(".fst"), json.loads(metadata["acoustic_scale"]))
    assert any(found) and [list(words) for words in found] == words_of_the_run(run)
    assert json.loads(metadata["provenance"])["wer"]["test"] == run.metrics["test"]
    assert json.loads(metadata["features"])["sample_rate_hz"] == 16000 and json.loads(metadata["words"]) == ["NO", "YES"]
    # stack traces of torch's exporter hold them
    assert str(ROOT).encode() not in model.read_bytes()


@pytest.mark.parametrize("name", ["tdnn", "cnn"])
def test_a_program_of_torch_export_gives_the_wer_of_the_run(name: str, trained: Trained, tmp_path: Path) -> None:
    run, model = trained(name), tmp_path / "model.pt2"
    assert main(["export", "--format", "torch", str(run.folder.path), "-o", str(model)]) == 0
    extra = {"about.json": ""}
    network = torch.export.load(model, extra_files=extra).module()
    with torch.no_grad():
        logliks = [network(torch.from_numpy(frames_NTD))[0].numpy() for frames_NTD, _ in sequences(run)]
    words_of(run, logliks, tmp_path / "model.fst",
             json.loads(extra["about.json"])["acoustic_scale"])


@pytest.mark.parametrize("name", ["tdnn", "mfcc"])
def test_the_example_recognizes_audio_in_chunks_without_ngsgd(name: str, trained: Trained, in_onnx: Callable[[str], Path],
                                                              tmp_path: Path) -> None:
    import soundfile
    import soxr

    run, model = trained(name), in_onnx(name)
    (tmp_path / "ngsgd.py").write_text("raise ImportError('not installed in this test')\n")
    # one of them at another sampling rate
    recordings = wav_files(run)
    samples, rate = soundfile.read(recordings[0], dtype="float32")
    soundfile.write(tmp_path / "22050.wav", soxr.resample(samples, rate, 22050), 22050)
    done = subprocess.run([sys.executable, str(ROOT / "examples/onnx_recognizer.py"), str(model), *map(str, recordings),
                           str(tmp_path / "22050.wav")],
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *found, resampled = [line.split()[1:] for line in done.stdout.splitlines()]
    assert found == words_of_the_run(run) and resampled == found[0]


@pytest.mark.parametrize("name", ["relu", "tdnn", "tdnnf", "mfcc", "cnn"])
def test_sherpa_onnx_recognizes_the_words_of_the_run(name: str, trained: Trained, tmp_path: Path) -> None:
    pytest.importorskip("sherpa_onnx")
    import soundfile
    from sherpa_onnx.lib import _sherpa_onnx as sherpa

    run, folder = trained(name), tmp_path / "sherpa"
    assert main(["export", "--format", "sherpa-onnx", str(run.folder.path), str(folder)]) == 0
    features = run.config.features
    recognizer = sherpa.OfflineRecognizer(sherpa.OfflineRecognizerConfig(
        feat_config=sherpa.FeatureExtractorConfig(sampling_rate=16000, feature_dim=features.num_mel_bins, high_freq=0.0),
        model_config=sherpa.OfflineModelConfig(wenet_ctc=sherpa.OfflineWenetCtcModelConfig(str(folder / "model.onnx")),
                                               tokens=str(folder / "tokens.txt")),
        ctc_fst_decoder_config=sherpa.OfflineCtcFstDecoderConfig(graph=str(folder / "HLG.fst"), max_active=7000)))
    words = [line.split()[0] for line in (folder / "words.txt").read_text().splitlines()]
    found = []
    for path in wav_files(run):
        samples, rate = soundfile.read(path, dtype="float32")
        stream = recognizer.create_stream()
        stream.accept_waveform(rate, samples)
        recognizer.decode_stream(stream)
        found.append([words[label] for label in stream.result.words])
        # of the audio, in seconds
        assert stream.result.timestamps[-1] <= len(samples) / rate
    assert found == words_of_the_run(run)


def test_a_hugging_face_folder_describes_the_model_and_loads(trained: Trained, tmp_path: Path) -> None:
    run, folder = trained("tdnn"), tmp_path / "model"
    assert main(["export", "--format", "huggingface", "--license", "cc-by-4.0", str(run.folder.path), str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_classes"], config["words"]) == (run.data.corpus.num_pdfs, ["NO", "YES"])
    assert json.loads((folder / "preprocessor_config.json").read_text())["sampling_rate"] == 16000
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and 'license: "cc-by-4.0"' in card and str(WordErrors.of_json(run.metrics["test"])) in card
    model, prior_P = open_final(folder)
    expected = run.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert config["priors"] == prior_P.tolist()
    assert Recognizer.load(folder).sample_rate_hz == 16000


def test_a_bundle_is_exported_as_its_run_is(trained: Trained, tmp_path: Path) -> None:
    run, path = trained("tdnn"), tmp_path / "model.ngsgd"
    assert main(["export", "--format", "bundle", str(run.folder.path), str(path)]) == 0
    for name, model in (("run", str(run.folder.path)), ("bundle", str(path))):
        assert main(["export", "--format", "huggingface", model, str(tmp_path / name)]) == 0
    of_run, of_bundle = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("run", "bundle"))
    assert of_run == of_bundle
