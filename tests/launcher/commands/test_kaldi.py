"""`ngsgd export` and `ngsgd import`: what Kaldi finds in the files, by a second reader of its
formats.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.asr import speech_set
from ngsgd.asr.align.forced_alignment import equal_parts
from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora.corpus import Corpus, prepare
from ngsgd.asr.features import cmvn
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import DataConfig, FeatureConfig, OptimizerConfig, RunConfig, ScheduleConfig
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import DataError
from ngsgd.exports.kaldi import export_language, export_set, updates_of
from ngsgd.launcher.cli import main
from ngsgd.launcher.config import compose
from ngsgd.models.layers import Window
from ngsgd.models.nnet3.network import describe
from ngsgd.models.nnet3.raw_models import to_text
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.runs import config_file
from ngsgd.runs.final_model import write_final
from ngsgd.training.worker import make_optimizer
from tests.models.test_nnet3 import BESIDE, SHAPES, WINDOW, trained
from tests.reference import ivectors, nnet3_text

AFFINE = {"output": "output.affine"}   # module -> component, where they differ
UNLIKE_DEFAULTS = OptimizerConfig(rank_in=3, rank_out=2, update_period=1, num_samples_history=1500.5, alpha=2.25, max_change=1.5,
                                  weight_decay=1e-4, layer_options={"output": {"lr_factor": 0.5, "max_change": 0.25, "rank_out": 1,
                                                                               "weight_decay": 0.0}})


def exported(name: str, optimizer: OptimizerConfig, window: Window = WINDOW,
             has_softmax: bool = True) -> tuple[torch.nn.Module, nnet3_text.Model]:
    model, config = trained(name, window)
    run = RunConfig(model=config, optimizer=optimizer, schedule=ScheduleConfig(lr_final=0.00025))
    text = to_text(describe(model, config, window, has_softmax=has_softmax), updates_of(model, run))
    return model, nnet3_text.read(text)


@pytest.mark.entry("K2", "you train on with `nnet3-train` from an exported model", "works",
                   "each affine component has the ranks that the run had: `optimizer.rank_in` and `rank_out`, lowered to "
                   "(dim + 1) / 2 of the layer, as Kaldi's configurations lower them.")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("optimizer", [OptimizerConfig(), UNLIKE_DEFAULTS], ids=["defaults", "others"])
def test_ranks_are_those_of_the_runs_own_fisher_estimates(name: str, optimizer: OptimizerConfig) -> None:
    model, read = exported(name, optimizer)
    ngsgd = make_optimizer(model, optimizer, 0.001, 1.0)
    assert isinstance(ngsgd, NGSGD)
    ranks = {estimate: preconditioner.rank for estimate, preconditioner in ngsgd.preconditioners()}
    ngsgd.detach()
    layers = {key.rpartition(".")[0] for key in ranks}
    found = {f"{layer}.{side}": read.components[AFFINE.get(layer, layer)][token] for layer in layers
             for side, token in (("input", "RankIn"), ("output", "RankOut"))}
    assert found == ranks and len(ranks) == 6


@pytest.mark.entry("K3", "you set `optimizer.*` or `optimizer.layer_options` and export", "works",
                   "the text has the run's update period, history, alpha, max-change, l2 (`weight_decay` as `<L2Regularize>`, the "
                   "same scale), learning-rate factor and final effective learning rate, layer by layer.")
@pytest.mark.parametrize("name", ["relu", "tdnn-batchnorm", "pnorm"])
def test_settings_are_those_of_the_run_layer_by_layer(name: str) -> None:
    _, read = exported(name, UNLIKE_DEFAULTS)
    affine = {key: c for key, c in read.components.items() if "LinearParams" in c}
    common = {"UpdatePeriod": 1, "NumSamplesHistory": 1500.5, "Alpha": 2.25, "kind": "NaturalGradientAffineComponent"}
    hidden = common | {"LearningRateFactor": 1.0, "MaxChange": 1.5, "L2Regularize": 1e-4, "LearningRate": 0.00025}
    output = common | {"LearningRateFactor": 0.5, "MaxChange": 0.25, "L2Regularize": 0.0, "LearningRate": 0.000125}
    assert len(affine) == 3
    for key, component in affine.items():
        expected = output if key == "output.affine" else hidden
        assert {token: component[token] for token in expected} == expected


@pytest.mark.entry("K3")
def test_a_run_of_plain_sgd_is_exported_without_natural_gradient() -> None:
    _, read = exported("relu", OptimizerConfig(kind="sgd", max_change=0.0))
    kinds = [c["kind"] for c in read.components.values() if "LinearParams" in c]
    assert kinds == ["AffineComponent"] * 3
    assert read.components["affine1"]["MaxChange"] == 0.0


@pytest.mark.entry("K4", "you train on with `nnet3-train` from a batch-normalized model", "works",
                   "`<TestMode>` is F, so that nnet3-train normalizes by the minibatch; outputs in test mode are the same.")
@pytest.mark.parametrize("name", [name for name in SHAPES if "batchnorm" in name])
def test_batch_normalization_is_not_in_test_mode(name: str) -> None:
    _, read = exported(name, OptimizerConfig())
    norms = [c for c in read.components.values() if c["kind"] == "BatchNormComponent"]
    assert len(norms) == 2 and not any(norm["TestMode"] for norm in norms)


@pytest.mark.parametrize("has_softmax", [True, False], ids=["ce", "lfmmi"])
@pytest.mark.parametrize("window", [WINDOW, BESIDE], ids=["frames", "ivector"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_model_is_read_by_another_reader_with_the_same_outputs(name: str, window: Window, has_softmax: bool) -> None:
    model, read = exported(name, UNLIKE_DEFAULTS, window, has_softmax)
    assert read.input_dims == {"input": 5} | ({"ivector": 3} if window.side_dim else {})
    x_NI = torch.randn(7, window.num_inputs, generator=torch.Generator().manual_seed(5))
    frames_NWD = x_NI[:, :20].reshape(7, 4, 5).double().numpy()
    found = nnet3_text.outputs(read, frames_NWD, 2, x_NI[:, 20:].double().numpy())
    with torch.no_grad():
        expected = model(x_NI).double()
    expected = expected.log_softmax(dim=1) if has_softmax else expected
    # float32 against float64, three layers; TDNN outputs go up to about 1e3
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


def write_run(folder: Path, overrides: list[str], name: str = "relu", window: Window = WINDOW) -> Path:
    """The folder of a run that has ended, as far as its model goes."""
    model, config = trained(name, window)
    folder.mkdir()
    (folder / "config.yaml").write_text(config_file.to_yaml(compose.compose(overrides)))
    about: dict[str, Any] = {"model": asdict(config), "num_inputs": window.num_inputs, "num_classes": 3, **window._asdict(),
                             "priors": [0.5, 0.3, 0.2], "stage": None, "class_counts": [], "objective": "ce"}
    write_final(folder / "final", model, about, None)
    return folder


@pytest.mark.entry("K3")
def test_export_takes_the_settings_from_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["optimizer.rank_in=4", "optimizer.alpha=2", "optimizer.weight_decay=1e-3",
                                       "schedule.lr_final=0.0002"])
    assert main(["export", str(run), "--output", str(tmp_path / "kaldi")]) == 0
    component = nnet3_text.read((tmp_path / "kaldi/final.raw").read_text()).components["affine2"]
    found = [component[token] for token in ("RankIn", "RankOut", "Alpha", "L2Regularize", "LearningRate")]
    assert found == [4, 4, 2.0, 1e-3, 0.0002]   # 8 outputs: rank_out 80 becomes 4


@pytest.mark.entry("K5")
def test_import_takes_binary_models_and_priors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kaldi_native_io = pytest.importorskip("kaldi_native_io")
    run = write_run(tmp_path / "run", [], "tdnn-batchnorm")
    assert main(["export", str(run), "--output", str(tmp_path / "kaldi")]) == 0
    text = (tmp_path / "kaldi/final.raw").read_text()
    binary = nnet3_text.to_binary(nnet3_text.read(text), text)
    (tmp_path / "binary.raw").write_bytes(binary)
    (tmp_path / "damaged.raw").write_bytes(binary[:-40])
    kaldi_native_io.FloatVector.read(str(tmp_path / "kaldi/priors.vec")).write(str(tmp_path / "binary.vec"), True)
    priors = ["--priors", str(tmp_path / "binary.vec")]
    assert main(["import", str(tmp_path / "binary.raw"), *priors, "--output", str(tmp_path / "back")]) == 0
    model = "final/model.safetensors"
    assert (tmp_path / "back" / model).read_bytes() == (run / model).read_bytes()
    found = json.loads((tmp_path / "back/final/model.json").read_text())["priors"]
    assert found == np.array([0.5, 0.3, 0.2], np.float32).tolist()
    assert main(["import", str(tmp_path / "damaged.raw"), *priors, "--output", str(tmp_path / "other")]) == 3
    assert "nnet3" in capsys.readouterr().err and not (tmp_path / "other").exists()


# Data


TEXTS = (("a", "b"), ("b",), ("b", "a"))
# not in alphabetical order
TOPOLOGY = Topology(("b", "a"), {"b": (("b",),), "a": (("a",), ("a", "b"))}, 2)


def speech(prefix: str, side: Side | None = None) -> SpeechSet:
    """Three utterances of 12 frames, labeled in equal parts."""
    rng = np.random.default_rng(sum(map(ord, prefix)))
    parts = [equal_parts(TOPOLOGY, words, 12) for words in TEXTS]
    labels = np.concatenate([one for one in parts if one is not None])
    frames = FrameSet(rng.normal(3.0, 2.0, size=(36, 3)).astype(np.float32), labels,
                      np.array([0, 12, 24, 36]), tuple(f"{prefix}-{number}" for number in range(3)), side=side)
    return SpeechSet(frames, TEXTS, ("s0", "s1", "s0"), CmvnStats({}, ()))


def export_all(output: Path, language: Language, *, of_graph: bool = False) -> dict[str, SpeechSet]:
    sets = {name: speech(name) for name in ("train", "valid", "test")}
    output.mkdir(exist_ok=True)
    for name, one in sets.items():
        export_set(one, output / name, ivector_period=10)
    export_language(language, sets, output, of_graph=of_graph)
    return sets


def read_back(output: Path, reports: list[str], **settings: Any) -> Corpus:
    data = DataConfig(**{"corpus": "kaldi", "source": str(output), "alignment": str(output), "num_silence_states": 2, **settings})
    return prepare(data, FeatureConfig(kind="given", cmvn="none"), output.parent / "cache", reports.append)


@pytest.mark.entry("K9", "you export with a relative `--output` and read the scripts from another folder", "works",
                   "feats.scp, cmvn.scp and ivector_online.scp hold absolute paths.")
def test_scripts_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    monkeypatch.chdir(tmp_path)
    side = Side(np.ones((6, 2), np.float32), np.repeat(np.arange(6), 6).astype(np.int32))
    one = replace(speech("train", side), cmvn=CmvnStats({"s0": np.ones((2, 4)), "s1": np.ones((2, 4))}, ("s0", "s1", "s0")))
    export_set(one, Path("relative"), ivector_period=6)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name, num in (("feats", 3), ("cmvn", 2), ("ivector_online", 3)):
        assert len([np.shape(matrix) for matrix in kaldiio.load_scp(str(tmp_path / "relative" / f"{name}.scp")).values()]) == num


@pytest.mark.entry("K11", "you take an exported alignment into a run whose lexicon numbers the states in another order", "works",
                   "`export --include-data` writes `lexicon.txt` and the table `pdfs.txt`; the states are renumbered by name, "
                   "which is reported, and an alignment with other states is a `DataError`.")
def test_an_exported_alignment_keeps_its_states_in_another_numbering(tmp_path: Path) -> None:
    sets = export_all(tmp_path / "out", Language(TOPOLOGY))
    assert (tmp_path / "out/pdfs.txt").read_text().splitlines()[:4] == ["0 SIL 0", "1 SIL 1", "2 b 0", "3 b 1"]
    reports: list[str] = []
    back = read_back(tmp_path / "out", reports)
    assert back.language.topology.phones == ("a", "b") and back.language.topology.lexicon == {
        word: TOPOLOGY.lexicon[word] for word in back.language.topology.lexicon}
    # SIL SIL b b b a a a in the order SIL SIL a a a b b b
    of_b_a = np.array([0, 1, 5, 6, 7, 2, 3, 4])
    for name, one in sets.items():
        assert np.array_equal(getattr(back, name).frames.pdf_T, of_b_a[one.frames.pdf_T])
    assert any("renumbered" in line for line in reports)
    alone = alignments.read(tmp_path / "out/train/ali.ark").numbered_as(back.language.pdf_names(of_graph=False))
    assert np.array_equal(np.concatenate(list(alone.pdf_T.values())), of_b_a[sets["train"].frames.pdf_T])


@pytest.mark.entry("K11")
@pytest.mark.parametrize("settings", [{"num_silence_states": 3}, {"lexicon": "other"}])
def test_an_alignment_with_other_states_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    export_all(tmp_path / "out", Language(TOPOLOGY))
    (tmp_path / "lexicon.txt").write_text("b b\na a\na c b\n")
    if "lexicon" in settings:
        settings = {"lexicon": str(tmp_path / "lexicon.txt")}
    with pytest.raises(DataError, match=r"out .*8 HMM.*pdfs\.txt"):
        read_back(tmp_path / "out", [], **settings)


@pytest.mark.entry("K11")
def test_an_alignment_of_a_tree_is_not_taken_for_states_of_the_lexicon(tmp_path: Path) -> None:
    """As many tied states as the lexicon has: without their names nothing would distinguish them.
    """
    tree = Language(TOPOLOGY, given=GivenGraph(b"", ("b", "a"), tuple(range(8))))
    export_all(tmp_path / "out", tree, of_graph=True)
    with pytest.raises(DataError, match=r"'SIL 0'|'a 0'"):
        read_back(tmp_path / "out", [])


@pytest.mark.parametrize("damage", ["0 SIL 0\n2 SIL 1\n", "0 SIL 0\n1 SIL 0\n", "0\n", "", "x y z\n"])
def test_a_damaged_table_of_pdfs_is_named(tmp_path: Path, damage: str) -> None:
    export_all(tmp_path / "out", Language(TOPOLOGY))
    (tmp_path / "out/pdfs.txt").write_text(damage)
    with pytest.raises(DataError, match=r"pdfs\.txt"):
        read_back(tmp_path / "out", [])


@pytest.mark.entry("K12", "you export a run with `features.cmvn=online`", "works",
                   "besides `global_cmvn.stats` there are `spk2utt` and `scale.mat`: `apply-cmvn-online`, then "
                   "`transform-feats scale.mat`, gives the network's input.")
def test_online_means_and_the_scale_give_the_input_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaldi_native_io = pytest.importorskip("kaldi_native_io")
    # smaller than the utterances are
    for name, value in {"WINDOW": 10, "SPEAKER_FRAMES": 8, "GLOBAL_FRAMES": 5}.items():
        monkeypatch.setattr(cmvn, name, value)
    raw = speech("train")
    all_speech = cmvn.statistics(raw.frames.features_TD)
    one = speech_set.normalized_online(raw, all_speech)
    export_set(one, tmp_path / "train", ivector_period=10)
    scale_DD = kaldi_native_io.FloatMatrix.read(str(tmp_path / "train/scale.mat")).numpy().astype(np.float64)
    stats = kaldi_native_io.DoubleMatrix.read(str(tmp_path / "train/global_cmvn.stats")).numpy()
    mean_D = stats[0, :-1] / stats[0, -1]
    assert (tmp_path / "train/spk2utt").read_text() == "s0 train-0 train-2\ns1 train-1\n"
    spoken: dict[str, list[Any]] = {"s0": [], "s1": []}
    for raw_TD, found_TD, speaker in zip(raw.split_features(), one.split_features(), raw.speakers, strict=True):
        means_TD = ivectors.running_means(raw_TD.astype(np.float64), window=10, before=spoken[speaker], most_before=8,
                                          global_mean_D=mean_D, most_global=5)
        # Kaldi: transform-feats multiplies from the left; the matrix is float32
        np.testing.assert_allclose((raw_TD - means_TD) @ scale_DD.T, found_TD, rtol=1e-5, atol=1e-6)
        spoken[speaker].append(raw_TD.astype(np.float64))


def of_chunks(num_frames: int, frames_per_chunk: int, period: int) -> list[int]:
    """The row of ivector_online that nnet3-compute takes for each frame: that of the middle of the
    frame's chunk.
    """
    rows = []
    for begin in range(0, num_frames, frames_per_chunk):
        length = min(frames_per_chunk, num_frames - begin)
        rows += [min((begin + length // 2) // period, (num_frames - 1) // period)] * length
    return rows


@pytest.mark.entry("K7", "you compute an exported i-vector model with `nnet3-compute`", "works",
                   "nnet3-compute takes the i-vector of the middle of each chunk: outputs are the same with `--frames-per-chunk` "
                   "equal to the i-vector period or a divisor of it, not with the default of 50.")
def test_chunks_of_the_period_take_the_ivector_of_each_frame() -> None:
    period, num_frames = 10, 47
    model, read = exported("relu", OptimizerConfig(), BESIDE)
    rng = np.random.default_rng(0)
    frames_TD, rows_RS = rng.normal(size=(num_frames, 5)), rng.normal(size=(5, 3))
    windows_TWD = np.stack([frames_TD[np.clip(np.arange(t - 2, t + 2), 0, num_frames - 1)] for t in range(num_frames)])
    own_T = np.arange(num_frames) // period
    x_TI = np.concatenate([windows_TWD.reshape(num_frames, -1), rows_RS[own_T]], axis=1)
    with torch.no_grad():
        here_TP = model(torch.from_numpy(x_TI).float()).log_softmax(dim=1).double().numpy()

    def error(frames_per_chunk: int) -> float:
        there_TP = nnet3_text.outputs(read, windows_TWD, 2, rows_RS[of_chunks(num_frames, frames_per_chunk, period)])
        return float(np.abs(there_TP - here_TP).max())
    for equal in (10, 5, 2, 1):
        assert error(equal) < 1e-3      # float32
    for other in (50, 20, 7):
        assert error(other) > 0.1
    page = (Path(__file__).parents[3] / "docs" / "kaldi.md").read_text()
    assert "--frames-per-chunk" in page and "ivector_period" in page
