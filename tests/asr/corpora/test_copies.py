"""Augmented copies by their names: never split over sets, never perturbed again."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora import copies, kaldi_dirs
from ngsgd.asr.corpora.copies import hold_out
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.features.gaussians import Axes
from ngsgd.asr.kaldi_io.tables import Entry
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError
from tests.asr.fake_fsdd import write_wav
from tests.asr.made_up_speech import write_data

pytest.importorskip("kaldi_native_fbank")

FEATURES = FeatureConfig(kind="mfcc", num_mel_bins=23, cmvn="speaker", sample_rate_hz=16000)
FORMS = ["sp0.9-{}", "sp1.1-{}", "rvb1_{}", "rev2_{}", "cp1-{}", "cp1-sp0.9-{}", "vc3x0.9124-{}", "vc3x0.9124-cp1-sp1.1-{}",
         "{}_sp0.9", "{}_sp1.1_vp0.8", "{}_rvb", "{}-reverb", "{}-noise", "{}-music", "{}-babble", "vp0.8-{}", "tp0.9-{}"]


def entry(utt_id: str, speaker: str = "s") -> UtteranceEntry:
    return UtteranceEntry(utt_id, speaker, ("YES",), Entry("a.ark:1", "feats.scp:1"), f"text:{utt_id}")


@pytest.mark.parametrize(("name", "original"), [
    *((form.format("anna-001"), "anna-001") for form in FORMS),
    *((name, name) for name in ("anna-001", "sp1-001", "spot-1", "music", "noise-001", "0_1_0_1",
                                "rev-a", "s0-train003", "cp-x", "sp0.9-"))])
def test_the_original_of_a_copy_is_found_and_others_are_their_own(name: str, original: str) -> None:
    assert copies.original(name) == original


@pytest.mark.entry("Sp8", "train on a directory with copies (`sp0.9-`, `rvb1_`, `_sp1.1`, ...) without a validation set", "works",
                   "held-out utterances have no copy in training; copies in two sets, or changed again: `DataError`")
@pytest.mark.parametrize("num_speakers", [1, 6])
def test_no_held_out_utterance_has_a_twin_in_training(num_speakers: int) -> None:
    names = [f"s{number % num_speakers}-{number}" for number in range(24)]
    every = [entry(form.format(name), form.format(name.split("-")[0])) for form in ["{}", *FORMS] for name in names]
    train, valid = hold_out(every, share=0.2)
    plain_train, plain = hold_out([entry(name, name.split("-")[0]) for name in names], share=0.2)
    # the originals of the set without copies, and no copies
    assert [one.utt_id for one in valid] == [one.utt_id for one in plain] != []
    assert len(train) == len(plain_train) * (1 + len(FORMS))
    assert not {copies.original(one.utt_id) for one in valid} & {copies.original(one.utt_id) for one in train}


@pytest.mark.entry("Sp8")
def test_copies_without_their_originals_stay_together() -> None:
    every = [entry(form.format(f"u{number}")) for number in range(10) for form in FORMS[:3]]
    train, valid = hold_out(every, share=0.2)
    assert len(valid) == 6 and len(train) == 24
    assert not {copies.original(one.utt_id) for one in valid} & {copies.original(one.utt_id) for one in train}


@pytest.mark.entry("Sp8")
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_of_a_test_utterance_in_training_is_one_error(form: str) -> None:
    listed = {"train": [entry("a"), entry(form.format("b"))], "test": [entry("c"), entry("b")], "added": [entry("d")]}
    with pytest.raises(DataError, match=form.format("b")):
        copies.check_disjoint(listed)
    copies.check_disjoint({**listed, "test": [entry("c")]})
    # copies of one training set may be added
    copies.check_disjoint({"train": [entry("b")], "test": [entry("c")], "added": [entry(form.format("b"))]})
    with pytest.raises(DataError, match="b"):
        copies.check_disjoint({"train": [entry("b")], "test": [entry("c")], "added": [entry("b")]})


def test_names_that_only_look_like_copies_may_be_in_two_sets() -> None:
    copies.check_disjoint({"train": [entry("rev1-001"), entry("vol1-001")], "test": [entry("rev2-001"), entry("vol2-001")]})
    with pytest.raises(DataError):
        copies.check_disjoint({"train": [entry("sp0.9-001")], "test": [entry("sp1.1-001")]})


@pytest.mark.entry("Sp8")
@pytest.mark.parametrize(("form", "changes"), [
    *itertools.product(["sp0.9-{}", "sp1.1-{}", "cp1-sp0.9-{}", "vc3x0.9124-{}", "{}_sp0.9", "tp0.9-{}"],
                       [AugmentConfig(speed="all"), AugmentConfig(speed="all", volume=True)]),
    ("cp1-{}", AugmentConfig(num_copies=2)), ("vc3x0.9124-{}", AugmentConfig(voice=True))])
def test_copies_are_not_changed_again(form: str, changes: AugmentConfig) -> None:
    copies.check_unchanged([entry("a"), entry("spot-1")], changes)
    copies.check_unchanged([entry(form.format("a"))], AugmentConfig(volume=True))
    with pytest.raises(DataError, match=f"{form.format('a')}.*augment"):
        copies.check_unchanged([entry("a"), entry(form.format("a"))], changes)


def perturb(folder: Path) -> None:
    """Copies at two speeds, as perturb_data_dir_speed_3way.sh names them."""
    for table in ("text", "utt2spk", "wav.scp"):
        rows = [line.split(" ", 1) for line in (folder / table).read_text().splitlines()]
        (folder / table).write_text("".join(f"{speed}{name} {speed if table == 'utt2spk' else ''}{value}\n"
                                            for speed in ("", "sp0.9-", "sp1.1-") for name, value in rows))


@pytest.mark.entry("Sp8")
def test_a_perturbed_directory_is_refused_before_any_audio_is_read(tmp_path: Path) -> None:
    mine = write_data(tmp_path / "mine")
    perturb(mine / "train")
    for wav in mine.rglob("*.wav"):
        wav.write_bytes(b"no audio")
    with pytest.raises(DataError, match=r"train/text:7: sp0\.9-train-s0-0.*augment\.speed"):
        kaldi_dirs.make(DataConfig(corpus="kaldi", source=str(mine)), FEATURES, AugmentConfig(speed="all"))


@pytest.mark.entry("Sp8")
def test_the_number_of_omitted_copies_is_reported(tmp_path: Path) -> None:
    mine = write_data(tmp_path / "mine")
    perturb(mine / "train")
    shutil.rmtree(mine / "valid")
    said: list[str] = []
    data = DataConfig(corpus="kaldi", source=str(mine), valid_fraction=0.3)
    sets, _ = kaldi_dirs.make(data, FEATURES, AugmentConfig(), report=said.append)
    assert (len(sets["train"].texts), len(sets["valid"].texts)) == (12, 2)
    assert not [name for name in sets["valid"].frames.utt_ids if name.startswith("sp")]
    assert len([line for line in said if line.startswith("train: 4 ")]) == 1


@pytest.mark.entry("Sp6", "train on recordings that are all silent", "error", "`DataError`: all training audio is silent")
@pytest.mark.parametrize("value", [0, 1000])
@pytest.mark.parametrize("cmvn", ["speaker", "online"])
def test_silent_training_audio_is_one_error(tmp_path: Path, value: int, cmvn: str) -> None:
    mine = write_data(tmp_path / "mine")
    for wav in (mine / "train").glob("*.wav"):
        write_wav(wav, np.full(16000, value, "<i2"), rate_hz=16000)
    features = replace(FEATURES, cmvn=cmvn)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="silent"):
        prepare(DataConfig(corpus="kaldi", source=str(mine)), features, tmp_path / "cache",
                lambda _: None)
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


@pytest.mark.entry("Sp6")
def test_features_that_do_not_vary_are_one_error_in_the_flat_start() -> None:
    with pytest.raises(DataError, match="silent"):
        Axes.of(np.ones((50, 3), np.float32))
