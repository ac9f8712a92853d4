"""Kaldi data directories that are added to the training set of a corpus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora import corpus
from ngsgd.asr.corpora.corpus import Corpus, prepare
from ngsgd.asr.corpora.fsdd import load_catalog
from ngsgd.asr.utterance import UNALIGNED
from ngsgd.config import AlignConfig, AugmentConfig, DataConfig, FeatureConfig, RunConfig, build, check
from ngsgd.config.build import defaults
from ngsgd.errors import DataError
from ngsgd.pipeline import align
from tests.asr.fake_fsdd import FakeFsdd, write_wav
from tests.asr.made_up_speech import say, write_data
from tests.reported import silent

pytest.importorskip("soundfile")
pytest.importorskip("kaldi_native_fbank")

FEATURES = FeatureConfig(num_mel_bins=10)
SPEAKER, NUM_ADDED = "own-anna", 3


def write_added(folder: Path, *, name: str = SPEAKER, words: str = "zero one", rate_hz: int = 8000) -> Path:
    rng = np.random.default_rng(1)
    folder.mkdir()
    names = [f"{name}-{number}" for number in range(NUM_ADDED)]
    for utt_id in names:
        write_wav(folder / f"{utt_id}.wav", say(["NO", "YES"], rng, rate_hz), rate_hz=rate_hz)
    for table, value in (("text", lambda _: words), ("utt2spk", lambda _: SPEAKER), ("wav.scp", "{}.wav".format)):
        (folder / table).write_text("".join(f"{utt_id} {value(utt_id)}\n" for utt_id in names))
    return folder


@pytest.fixture
def fsdd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A tiny fsdd corpus from made-up recordings, and an added folder."""
    fake = FakeFsdd(tmp_path)
    # the synthesizer's pronunciations have phones that the stand-in lacks
    monkeypatch.setattr("ngsgd.asr.corpora.fsdd.with_pronunciations", lambda topology: topology)
    monkeypatch.setattr(corpus, "load_catalog", lambda: load_catalog(fake.shipped))
    return DataConfig(corpus="fsdd", source=str(fake.source), train_minutes=0.3, valid_minutes=0.1,
                      test_minutes=0.1, added_dirs=(str(write_added(tmp_path / "own")),))


@pytest.fixture
def kaldi(tmp_path: Path) -> DataConfig:
    added = write_added(tmp_path / "own", words="NO YES")
    return DataConfig(corpus="kaldi", source=str(write_data(tmp_path / "mine", rate_hz=8000)),
                      added_dirs=(str(added),))


def added_to(speech: Corpus) -> list[str]:
    sets = {name: [utt_id for utt_id in getattr(speech, name).frames.utt_ids if SPEAKER in utt_id]
            for name in ("train", "valid", "test")}
    assert not sets["valid"] and not sets["test"]
    return sets["train"]


def test_added_speech_is_in_the_training_set_alone_as_often_as_set(kaldi: DataConfig, tmp_path: Path) -> None:
    plain = prepare(replace(kaldi, added_dirs=()), FEATURES, tmp_path / "cache", silent)
    for copies in (1, 3):
        speech = prepare(replace(kaldi, added_copies=copies), FEATURES, tmp_path / "cache", silent)
        assert len(added_to(speech)) == copies * NUM_ADDED
        assert speech.digest != plain.digest
        for name in ("valid", "test"):
            assert getattr(speech, name).frames.utt_ids == getattr(plain, name).frames.utt_ids


def test_another_recording_gives_other_prepared_data(kaldi: DataConfig, tmp_path: Path) -> None:
    before = prepare(kaldi, FEATURES, tmp_path / "cache", silent)
    write_wav(tmp_path / "own" / f"{SPEAKER}-0.wav", say(["YES", "NO", "NO"], np.random.default_rng(2)), rate_hz=8000)
    assert prepare(kaldi, FEATURES, tmp_path / "cache", silent).digest != before.digest


def test_added_speech_gets_the_states_of_its_words_in_order(fsdd: DataConfig, tmp_path: Path) -> None:
    config = RunConfig(data=fsdd, features=FEATURES, align=AlignConfig(num_gaussians=100))
    data = align.with_alignment(config, tmp_path / "cache", silent)
    speech = prepare(data, FEATURES, tmp_path / "cache", silent)
    assert len(added_to(speech)) == NUM_ADDED
    topology = speech.language.topology
    expected = [pdf for word in ("zero", "one") for pdf in topology.pdfs_of(topology.lexicon[word][0])]
    for utt_id, pdf_T in zip(speech.train.frames.utt_ids, speech.train.split_pdfs(), strict=True):
        if SPEAKER in utt_id:
            spoken_T = pdf_T[~np.isin(pdf_T, topology.silence_pdfs)]
            assert spoken_T[np.diff(spoken_T, prepend=-1) != 0].tolist() == expected
    # an alignment of other speech
    other = replace(data, added_dirs=(str(write_added(tmp_path / "other", name=f"{SPEAKER}-2")),))
    with pytest.raises(DataError, match=Path(data.alignment).name):
        prepare(other, FEATURES, tmp_path / "cache", silent)
    # the recordings keep the labels of the corpus
    plain = prepare(replace(fsdd, added_dirs=()), FEATURES, tmp_path / "cache", silent)
    assert np.array_equal(speech.train.frames.pdf_T[:plain.train.frames.num_frames], plain.train.frames.pdf_T)


def test_before_alignment_added_speech_has_no_labels(fsdd: DataConfig, tmp_path: Path) -> None:
    speech = corpus.prepare_unaligned(replace(fsdd, added_copies=5), FEATURES, tmp_path / "cache", silent)
    assert len(added_to(speech)) == NUM_ADDED
    assert (speech.train.frames.pdf_T == UNALIGNED).any() and speech.valid.is_aligned


@pytest.mark.parametrize(("wrong", "place"), [
    ({"words": "zero ten"}, "text:1"), ({"words": ""}, "text:1"),
    ({"rate_hz": 16000}, "wav.scp:1")])
def test_wrong_added_speech_is_an_error(fsdd: DataConfig, tmp_path: Path, wrong: dict[str, object], place: str) -> None:
    folder = write_added(tmp_path / "wrong", **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=place):
        corpus.prepare_unaligned(replace(fsdd, added_dirs=(str(folder),)), FEATURES, tmp_path / "cache", silent)


def test_a_missing_folder_and_a_name_that_occurs_twice_are_errors(kaldi: DataConfig, tmp_path: Path) -> None:
    for folders in ((str(tmp_path / "none"),), kaldi.added_dirs * 2,
                    (str(write_added(tmp_path / "same", name="train-s0", words="NO YES")),)):
        with pytest.raises(DataError, match=folders[-1]):
            prepare(replace(kaldi, added_dirs=folders), FEATURES, tmp_path / "cache", silent)


def test_given_features_and_added_audio_do_not_mix() -> None:
    data = DataConfig(corpus="kaldi", source="mine", added_dirs=("own",))
    config = RunConfig(data=data, features=FeatureConfig(kind="given"), augment=AugmentConfig())
    assert any("data.added_dirs" in problem for problem in check(config))


def test_no_added_folder_is_a_value_that_a_file_of_settings_can_hold() -> None:
    values = defaults()
    values["data"]["added_dirs"] = []
    config, problems = build(values)
    assert not problems and config.data.added_dirs == ()
    values["tune"]["space"] = []
    assert build(values)[1]
