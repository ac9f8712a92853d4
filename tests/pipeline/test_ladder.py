"""The ladder: which rungs a configuration has, what a small corpus skips, and continuing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr import test_set
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import AdaptationConfig, RunConfig
from ngsgd.data.frames import FrameSet
from ngsgd.errors import RunInterrupted
from ngsgd.pipeline import adaptation, align, score
from ngsgd.pipeline.decoding.decode_data import DecodeRequest, decode_data
from ngsgd.pipeline.ladder import with_rungs
from ngsgd.pipeline.recipes import recipe
from ngsgd.pipeline.run import Run, build_run, refined_corpus
from ngsgd.pipeline.score import log_likelihoods
from ngsgd.pipeline.services import Services
from ngsgd.runs import rungs
from ngsgd.runs.final_model import load_final
from ngsgd.word_errors import WordErrors
from tests.asr.made_up_speech import write_data
from tests.toy import StopAfter


def climbing(**settings: Any) -> RunConfig:
    return recipe("kaldi", data={"source": "nowhere", **settings.pop("data", {})}, **settings)


def test_the_ladder_fills_in_the_settings_that_are_not_given() -> None:
    found = with_rungs(climbing(data={"num_leaves": 70}))
    assert found.data.num_leaves == 70
    assert found.adaptation.lda_dim > 0 and found.adaptation.fmllr
    assert found.align.num_full_passes == 1 and found.augment.speed == "all"
    assert with_rungs(climbing(features={"kind": "given"})).augment.speed == "none"
    assert with_rungs(found) == found


@pytest.mark.parametrize("settings", [
    {"data": {"labels": "one_step"}}, {"data": {"graph": "graph"}}, {"ivectors": {"dim": 30}},
    {"data": {"alignment": "ali.npz"}}])
def test_other_labels_states_and_inputs_exclude_the_ladder(settings: dict[str, Any]) -> None:
    config = climbing(**settings)
    assert with_rungs(config) == config


def corpus(num_frames: int, num_speakers: int, num_features: int = 2) -> Corpus:
    """Speech in one utterance per speaker; a third of the frames is silence."""
    offsets = np.linspace(0, num_frames, num_speakers + 1).astype(np.int64)
    names = tuple(f"s{number}" for number in range(num_speakers))
    frames = FrameSet(np.zeros((num_frames, num_features), np.float32),
                      (np.arange(num_frames) % 3).astype(np.int32), offsets, names)
    speech = SpeechSet(frames, ((),) * num_speakers, names)
    return Corpus("kaldi", speech, speech, speech, Language(Topology(("a",), {"A": (("a",),)})), "")


WANTED = AdaptationConfig(lda_dim=4, fmllr=True)


@pytest.mark.parametrize(("speech", "expected"),
                         [(corpus(2000, 3), WANTED),
                          (corpus(2000, 1), replace(WANTED, fmllr=False)),
                          (corpus(2000, 20), replace(WANTED, fmllr=False)),
                          (corpus(59, 2), replace(WANTED, lda_dim=0, fmllr=False)),
                          (corpus(2000, 3, num_features=1), replace(WANTED, lda_dim=3))],
                         ids=["enough", "one speaker", "short speakers", "few frames",
                              "few features"])
def test_what_a_corpus_is_too_small_for_is_left_out_with_a_line(
        speech: Corpus, expected: AdaptationConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptation, "CONTEXT", 1)
    lines: list[str] = []
    assert adaptation.possible(WANTED, speech, lines.append) == expected
    assert bool(lines) == (expected != WANTED)


def test_the_number_of_leaves_grows_with_the_root_of_the_speech_frames() -> None:
    automatic = climbing(data={"num_leaves": -1})
    assert adaptation.num_leaves_of(automatic, corpus(1350, 1)) == 30
    assert adaptation.num_leaves_of(climbing(data={"num_leaves": 7}), corpus(1350, 1)) == 7


@pytest.mark.parametrize("damaged", ["", "[]", '{"name": "a"}', '{"name": "a", "seconds": "x"}'])
def test_rungs_are_read_back_and_damaged_ones_are_none(tmp_path: Path, damaged: str) -> None:
    made = rungs.Stopwatch("flat start").stored(tmp_path / "ali.npz", WordErrors(4, 0, 1, 1))
    assert rungs.stored(tmp_path / "ali.npz") == [made]
    (tmp_path / "ali.rung.json").write_text(damaged)
    assert rungs.stored(tmp_path / "ali.npz") == []


@pytest.mark.slow
def test_a_stopped_ladder_continues_at_its_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[str]()

    def word_errors(speech: Corpus, *others: Any) -> WordErrors:
        decoded.append(speech.language.arpa)
        return score.word_errors(speech, *others)
    # of the flat start and the rung of tied states
    monkeypatch.setattr(align, "word_errors", word_errors)
    for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign"):
        pytest.importorskip(module)
    config = recipe(
        "kaldi", output_dir=tmp_path / "runs", features={"kind": "mfcc", "num_mel_bins": 23},
        data={"source": write_data(tmp_path / "speech", num_utterances=16), "num_leaves": 12, "lm_order": 2},
        adaptation={"lda_dim": 12, "fmllr": True}, cluster={"kind": "in_process", "num_workers": 1},
        egs={"left_context": 3, "right_context": 3, "samples_per_iter": 4000},
        model={"hidden_dim": 32, "num_layers": 1}, schedule={"num_epochs": 1.5},
        decode={"acoustic_scales": [0.1], "word_penalties": [0.0]})
    with pytest.raises(RunInterrupted):
        build_run(config, Services(stop=StopAfter(3)))
    # each rung is decoded with the language model of the run
    assert len(decoded) == 2 and all("ngram 2=" in arpa for arpa in decoded)
    networks = tmp_path / "runs" / "data" / "networks"
    [stopped] = networks.iterdir()
    lines: list[str] = []
    run = build_run(config, Services(report=lines.append))
    assert isinstance(run, Run)
    assert [stopped] == list(networks.iterdir())
    assert any(line.startswith("continuing after outer iteration") for line in lines)
    run.train()
    found = json.loads((run.folder.path / "rungs.json").read_text())
    assert len(found) == 4
    # chords in little noise: none is wrong when it works
    for errors in (*(rung["valid"] for rung in found), run.metrics["valid"], run.metrics["test"]):
        assert WordErrors.of_json(errors).wer <= 20.0
    # `ngsgd decode --data` adapts the speakers of the test set as the run does
    result = decode_data(Bundle.load(run.folder.path), DecodeRequest(Path(config.data.source) / "test"))
    assert asdict(result.total) == run.metrics["test"]
    model, prior_P = load_final(run.folder)
    refined = refined_corpus(run, model, prior_P)
    again = test_set.read(Bundle.load(run.folder.path), Path(config.data.source) / "test")
    by_run = log_likelihoods(refined.test.frames, run.config.egs, model, prior_P)
    for found_TP, expected_TP in zip(again.logliks, by_run, strict=True):
        np.testing.assert_array_equal(found_TP, expected_TP)
    by_mixtures = log_likelihoods(run.data.corpus.test.frames, run.config.egs, model, prior_P)
    assert not np.array_equal(again.logliks[0], next(by_mixtures))
