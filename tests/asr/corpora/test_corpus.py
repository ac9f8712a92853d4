import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr import speech_set
from ngsgd.asr.corpora import cache, corpus, digits
from ngsgd.asr.corpora.corpus import check_source, prepare
from ngsgd.asr.corpora.fsdd import load_catalog
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError
from tests.asr.fake_fsdd import FakeFsdd
from tests.data.test_index_digests import changed_leaves
from tests.reported import Reported, silent

pytest.importorskip("kaldi_native_fbank")

FEATURES = FeatureConfig(num_mel_bins=12)
TINY = DataConfig(train_minutes=0.3, valid_minutes=0.1, test_minutes=0.1)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A tiny fsdd corpus from made-up recordings."""
    fake = FakeFsdd(tmp_path)
    monkeypatch.setattr(corpus, "load_catalog", lambda: load_catalog(fake.shipped))
    return replace(TINY, corpus="fsdd", source=str(fake.source))


def test_digits_prepared_twice_from_nothing_are_bit_identical_and_then_come_from_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    first, again = (prepare(TINY, FEATURES, tmp_path / name, silent) for name in ("one", "two"))
    assert first.digest == again.digest
    reports = Reported()
    cached = prepare(TINY, FEATURES, tmp_path / "one", reports.append)
    assert cached.digest == first.digest and reports == []
    assert first.num_pdfs == 73 and not set(first.train.speakers) & set(first.test.speakers)


@pytest.mark.parametrize("clean_fraction", [0.0, 1.0])
def test_digits_in_other_voices_have_noise_unless_they_are_clean(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_fraction: float) -> None:
    pytest.importorskip("espeakng_loader")
    made: list[list[Utterance]] = []
    build = speech_set.build

    def record(said: Iterable[Utterance], features: FeatureConfig) -> speech_set.SpeechSet:
        made.append(list(said))
        return build(made[-1], features)
    monkeypatch.setattr(speech_set, "build", record)
    data = replace(TINY, train_minutes=0.1, valid_minutes=0.05, test_minutes=0.05)
    augment = AugmentConfig(voice=True, clean_fraction=clean_fraction)
    prepare(data, FEATURES, tmp_path, silent, augment_config=augment)
    train, valid, test = made
    for one in train:
        # an utterance starts with silence
        assert (np.abs(one.samples[:400]).max() == 0) == (clean_fraction == 1.0)
    assert all(one.samples[:400].any() for one in (*valid, *test))


def test_loaded_corpus_is_the_stored_one(data: DataConfig, tmp_path: Path) -> None:
    made, loaded = (prepare(data, FEATURES, tmp_path / "cache", silent) for _ in range(2))
    for name in ("train", "valid", "test"):
        left, right = getattr(made, name), getattr(loaded, name)
        assert (left.texts, left.speakers, left.frames.utt_ids) == (right.texts, right.speakers, right.frames.utt_ids)
        assert np.array_equal(left.frames.features_TD, right.frames.features_TD)
        assert left.frames.features_TD.shape == (left.frames.num_frames, 12)
        assert len(left.texts[0]) >= 3
    assert (made.language, made.digest) == (loaded.language, loaded.digest)


def test_features_are_normalized_over_each_utterance(data: DataConfig, tmp_path: Path) -> None:
    frames = prepare(data, FEATURES, tmp_path / "cache", silent).test.frames
    for start, end in zip(frames.offsets[:-1], frames.offsets[1:], strict=True):
        np.testing.assert_allclose(frames.features_TD[start:end].mean(axis=0), 0, atol=1e-4)


@pytest.mark.parametrize("change", [{"snr_db_low": -3.0}, {"train_minutes": 0.4}, {"split": "official"}])
def test_every_setting_that_changes_the_data_has_its_own_folder(data: DataConfig, tmp_path: Path, change: dict[str, Any]) -> None:
    one = prepare(data, FEATURES, tmp_path / "cache", silent)
    other = prepare(replace(data, **change), FEATURES, tmp_path / "cache", silent)
    assert one.digest != other.digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_place_the_recordings_came_from_does_not_change_the_data(data: DataConfig, tmp_path: Path) -> None:
    prepare(data, FEATURES, tmp_path / "cache", silent)
    reports = Reported()
    prepare(replace(data, source=data.source + "/recordings"), FEATURES, tmp_path / "cache", reports.append)
    assert reports == []


@pytest.mark.parametrize("name", ["train.features_TD.npy", "valid.pdf_T.npy", "test.json", "manifest.json"])
@pytest.mark.parametrize("deleted", [True, False])
def test_damaged_cache_is_named_and_made_again(data: DataConfig, tmp_path: Path, name: str, deleted: bool) -> None:
    whole = prepare(data, FEATURES, tmp_path / "cache", silent)
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    path.unlink() if deleted else path.write_bytes(path.read_bytes()[:-1])
    reports = Reported()
    mended = prepare(data, FEATURES, tmp_path / "cache", reports.append)
    assert str(path) in reports[0] and "preparing it again" in reports[0]
    assert mended.digest == whole.digest


def test_every_changed_leaf_of_a_manifest_is_refused_or_harmless(data: DataConfig, tmp_path: Path) -> None:
    """Two words of the lexicon swapped included: their pronunciations decide the decoded words."""
    prepare(data, FEATURES, tmp_path / "cache", silent)
    (path,) = (tmp_path / "cache").glob("fsdd-*/manifest.json")
    expected = cache.load(path.parent)[1:]
    manifest = json.loads(path.read_text())
    language = manifest["language"]
    topology, lexicon = language["topology"], language["topology"]["lexicon"]
    one, two = list(lexicon)[:2]
    other = {**topology, "lexicon": {**lexicon, one: lexicon[two], two: lexicon[one]}}
    swapped = {**manifest, "language": {**language, "topology": other}}
    damaged = [swapped, *changed_leaves(manifest)]
    random = np.random.default_rng(0)
    for at in [0, *random.choice(range(1, len(damaged)), 150, replace=False)]:
        path.write_text(json.dumps(damaged[at]))
        try:
            assert cache.load(path.parent)[1:] == expected
        except cache.DamagedError:
            continue
        assert at > 0


def test_files_that_the_manifest_does_not_list_are_not_read(data: DataConfig, tmp_path: Path) -> None:
    prepare(data, FEATURES, tmp_path / "cache", silent)
    (path,) = (tmp_path / "cache").glob("fsdd-*/train.features_TD.npy")
    path.with_name("train.raw_TD.npy").write_bytes(path.read_bytes())
    assert prepare(data, FEATURES, tmp_path / "cache", silent).train.raw_TD is None


def test_interrupted_preparation_leaves_no_file(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []

    def save_then_interrupt(path: Path, array: np.ndarray) -> None:
        saved.append(path)
        if len(saved) == 4:
            raise KeyboardInterrupt
        path.write_bytes(array.tobytes())
    monkeypatch.setattr(np, "save", save_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, FEATURES, tmp_path / "cache", silent)
    assert saved[0].parent.parent == tmp_path / "cache"
    assert list((tmp_path / "cache").iterdir()) == []


def test_manifest_names_the_sources_of_the_data(data: DataConfig, tmp_path: Path) -> None:
    prepare(data, FEATURES, tmp_path / "cache", silent)
    (path,) = (tmp_path / "cache").glob("fsdd-*/manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["made_from"]["data"]["train_minutes"] == 0.3
    assert manifest["made_from"]["features"]["num_mel_bins"] == 12
    assert "kaldi-native-fbank" in manifest["made_from"]["packages"]
    assert set(manifest["sha256"]) == {file.name for file in path.parent.iterdir()} - {"manifest.json"}


def test_wrong_source_is_found_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source"):
        check_source(DataConfig(corpus="fsdd", source=str(tmp_path / "nowhere")))


def test_labels_of_other_audio_are_refused() -> None:
    utterance = Utterance(utt_id="u", speaker="s", words=("one",), samples=np.zeros(8000, np.int16), pdf_T=np.zeros(99, np.int32))
    with pytest.raises(DataError, match=r"99 labels.*100 frames"):
        speech_set.build([utterance], FEATURES)


def test_shards_that_wait_are_not_spoken_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def fail(_shard: object, seed: int) -> list[Utterance]:
        started.append(seed)
        # speaking takes time, in which the caller sees the error of the shard before
        time.sleep(0.1)
        raise DataError("no voice")
    monkeypatch.setattr(digits, "make_shard", fail)
    with pytest.raises(DataError, match="no voice"):
        list(digits.utterances("train", DataConfig(), minutes=100, num_at_once=1))
    assert len(started) < 5  # of about 75
