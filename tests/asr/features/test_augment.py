"""Changed audio: the same in every run, and its labels where they belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.corpora import corpus
from ngsgd.asr.corpora.fsdd import load_catalog
from ngsgd.asr.features import augment
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Utterance, num_frames
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig, RunConfig, check
from ngsgd.errors import DataError
from tests.asr.fake_fsdd import FakeFsdd, write_wav

SILENCE, TONE = 0, 3
EVERYTHING = AugmentConfig(reverb=True, noise=True, volume=True)


def beep(utt_id: str = "u1", begin: int = 30, end: int = 60, length: int = 100) -> Utterance:
    """Silence with a tone of 1 kHz from frame `begin` to frame `end`, and labels of both."""
    time_s = np.arange(80 * length) / SAMPLE_RATE_HZ
    pdf_T = np.full(length, SILENCE, np.int32)
    pdf_T[begin:end] = TONE
    samples = 8000 * np.sin(2 * np.pi * 1000 * time_s) * np.repeat(pdf_T == TONE, 80)
    return Utterance(utt_id, "anna", ("one",), samples.astype(np.int16), pdf_T)


def sounding(utterance: Utterance) -> Any:
    """Which frames are loud."""
    power_T = np.array([np.mean(part.astype(float) ** 2) for part in np.array_split(utterance.samples, len(utterance.pdf_T))])
    return power_T > 0.1 * power_T.max()


def changed(config: AugmentConfig, utterances: Iterable[Utterance] = (beep(),)) -> list[Utterance]:
    return list(augment.augmented(utterances, config, silence_pdfs=[SILENCE]))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every utterance is in a room and has noise, instead of half of them."""
    for name in ("REVERB_PROBABILITY", "NOISE_PROBABILITY"):
        monkeypatch.setattr(augment, name, 1.0)


@pytest.mark.parametrize("factor", [0.9, 1.1, 0.5, 2.0])
def test_labels_follow_audio_of_another_speed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "SPEEDS", (factor,))
    (fast,) = changed(AugmentConfig(speed="all"))
    assert len(fast.samples) == pytest.approx(8000 / factor, abs=2)
    assert len(fast.pdf_T) == num_frames(len(fast.samples))
    assert (fast.utt_id, fast.speaker) == (f"sp{factor:g}-u1", f"sp{factor:g}-anna")
    # at most the frame at either edge of the tone
    assert ((fast.pdf_T == TONE) != sounding(fast)).sum() <= 2
    spectrum = np.abs(np.fft.rfft(fast.samples))
    assert spectrum.argmax() * SAMPLE_RATE_HZ / len(fast.samples) == pytest.approx(1000 * factor, abs=5)


def test_each_new_label_is_that_of_its_time() -> None:
    """Against the definition, frame by frame, at two sample rates."""
    pdf_T = np.arange(100, dtype=np.int32)
    for rate_hz, factor in ((8000, 0.9), (16000, 1.1)):
        shift = rate_hz // 100
        num_samples = round(100 * shift / factor)
        expected = [min(int((t * shift + shift // 2) * factor) // shift, 99) for t in range((num_samples + shift // 2) // shift)]
        assert augment.retime(pdf_T, num_frames(num_samples, rate_hz), factor).tolist() == expected


def test_all_speeds_make_three_fold_data_and_copies_lead_to_their_originals() -> None:
    made = changed(AugmentConfig(speed="all", num_copies=2))
    assert [one.utt_id for one in made] == ["sp0.9-u1", "u1", "sp1.1-u1", "cp1-sp0.9-u1", "cp1-u1", "cp1-sp1.1-u1"]
    assert np.array_equal(made[1].samples, beep().samples)
    assert {one.words for one in made} == {("one",)}
    originals = [augment.original(one.utt_id) for one in made]
    assert originals == [("u1", 0.9), ("u1", 1.0), ("u1", 1.1)] * 2
    assert augment.original("spot-1") == ("spot-1", 1.0)


def test_reverberation_leaves_the_direct_sound_where_it_was() -> None:
    click = 10_000.0 * (np.arange(4000) == 1000)
    random = np.random.default_rng(0)
    for rt60_ms in (100.0, 600.0):
        response = np.concatenate([np.zeros(37), augment.simulated_room(rt60_ms, SAMPLE_RATE_HZ, random)])
        heard = augment.reverberate(click, response)
        assert np.abs(heard).argmax() == 1000 and len(heard) == 4000
        assert np.sqrt(np.mean(heard ** 2)) == pytest.approx(np.sqrt(np.mean(click ** 2)))
        assert np.abs(heard[:1000]).max() < 1e-6  # no sound before its start


def test_convolution_is_that_of_the_definition() -> None:
    random = np.random.default_rng(1)
    samples, response = random.standard_normal(50), random.standard_normal(9)
    peak = int(np.abs(response).argmax())
    full = [sum(response[k] * samples[n - k] for k in range(9) if 0 <= n - k < 50) for n in range(58)][peak:peak + 50]
    expected = np.array(full) * np.sqrt(np.mean(samples ** 2) / np.mean(np.square(full)))
    # float64 FFT
    assert np.allclose(augment.reverberate(samples, response), expected, rtol=1e-10, atol=1e-12)


def test_a_simulated_room_decays_as_it_should() -> None:
    response = augment.simulated_room(400.0, SAMPLE_RATE_HZ, np.random.default_rng(0))
    energy_left = np.cumsum(response[1:][::-1] ** 2)[::-1]  # Schroeder's integral of the tail
    at = [int(np.argmax(energy_left < energy_left[0] * 10 ** (-db / 10))) for db in (5, 35)]
    # 30 dB, so half of the time of 60
    assert (at[1] - at[0]) / SAMPLE_RATE_HZ * 2 == pytest.approx(0.4, rel=0.1)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("snr_db", [0.0, 15.0])
def test_noise_has_the_ratio_asked_for_to_the_frames_of_speech(snr_db: float) -> None:
    (noisy,) = changed(AugmentConfig(noise=True, noise_snr_db_low=snr_db, noise_snr_db_high=snr_db))
    clean, is_speech = beep().samples.astype(float), np.repeat(beep().pdf_T == TONE, 80)
    added = noisy.samples - clean
    assert 10 * np.log10(np.mean(clean[is_speech] ** 2) / np.mean(added ** 2)) == pytest.approx(snr_db, abs=0.05)
    assert np.array_equal(noisy.pdf_T, beep().pdf_T)


def test_volume_scales_and_never_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AugmentConfig(volume=True)
    monkeypatch.setattr(augment, "VOLUMES", (0.5, 0.5))
    assert np.allclose(changed(config)[0].samples, beep().samples * 0.5, atol=0.51)
    monkeypatch.setattr(augment, "VOLUMES", (100.0, 100.0))
    (loud,) = changed(config)
    assert np.abs(loud.samples).max() == round(augment.LOUDEST_MIX)
    assert np.corrcoef(loud.samples, beep().samples)[0, 1] > 0.9999


@pytest.mark.usefixtures("always")
def test_changes_are_a_function_of_utterance_and_copy_and_not_of_the_order() -> None:
    utterances = [beep(f"u{index}") for index in range(6)]
    forward, backward = changed(EVERYTHING, utterances), changed(EVERYTHING, utterances[::-1])
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(forward, backward[::-1], strict=True))
    assert len({one.samples.tobytes() for one in forward}) == 6
    copies = changed(dataclasses.replace(EVERYTHING, num_copies=2), utterances)[1::2]
    assert not any(np.array_equal(a.samples, b.samples) for a, b in zip(forward, copies, strict=True))


def test_enabling_one_augmentation_does_not_change_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "NOISE_PROBABILITY", 0.0)
    loud = AugmentConfig(volume=True)
    (alone,), (with_noise,) = changed(loud), changed(dataclasses.replace(loud, noise=True))
    assert np.array_equal(alone.samples, with_noise.samples)


def test_half_of_the_utterances_have_noise() -> None:
    """400 samples at 0.5: between 160 and 240 but for one run in 10 000; the samples are fixed."""
    utterances = [beep(f"u{index}", 3, 6, 10) for index in range(400)]
    pairs = zip(changed(AugmentConfig(noise=True), utterances), utterances, strict=True)
    assert 160 < sum(not np.array_equal(a.samples, b.samples) for a, b in pairs) < 240


@pytest.mark.parametrize("name", ["valid", "test"])
def test_only_training_sets_are_changed(name: str) -> None:
    utterances = [beep()]
    assert augment.for_set(name, utterances, EVERYTHING) is utterances
    assert augment.for_set("train", utterances, AugmentConfig(spec=True)) is utterances
    (one,) = augment.for_set("train", utterances, EVERYTHING, silence_pdfs=[SILENCE])
    assert not np.array_equal(one.samples, beep().samples)


@pytest.mark.usefixtures("always")
def test_noises_and_rooms_come_from_the_users_folders(tmp_path: Path) -> None:
    hum = 1000 * np.sin(2 * np.pi * 50 * np.arange(8000) / 16000)
    # resampled to 8 kHz: half a second, repeated
    write_wav(tmp_path / "noises" / "hum.wav", hum, rate_hz=16000)
    write_wav(tmp_path / "rooms" / "echo.wav", [20000, *[0] * 799, 10000])
    config = AugmentConfig(noise=True, noise_dir=str(tmp_path / "noises"), noise_snr_db_low=0.0,
                           noise_snr_db_high=0.0)
    added = changed(config)[0].samples - beep().samples.astype(float)
    assert np.abs(np.fft.rfft(added)).argmax() * SAMPLE_RATE_HZ / 8000 == pytest.approx(50, abs=1)
    (echoed,) = changed(AugmentConfig(reverb=True, rir_dir=str(tmp_path / "rooms")))
    # 100 ms after the tone
    assert np.flatnonzero(np.abs(echoed.samples) > 50)[-1] == pytest.approx(60 * 80 + 800, abs=10)


@pytest.mark.parametrize(("prepare", "says"), [
    (lambda folder: None, "folder"), (lambda folder: folder.mkdir(), "wav"),
    (lambda folder: write_wav(folder / "a.wav", [0] * 100), r"a\.wav"),
    (lambda folder: write_wav(folder / "a.wav", [1] * 100, channels=2), r"a\.wav.*2 channels"),
    (lambda folder: write_wav(folder / "a.wav", [1] * 100).write_bytes(b"RIFF"), r"a\.wav.*audio"),
])
def test_folders_that_cannot_be_used_are_named_before_anything_is_made(tmp_path: Path, prepare: Any, says: str) -> None:
    prepare(tmp_path / "noises")
    with pytest.raises(DataError, match=says):
        changed(AugmentConfig(noise=True, noise_dir=str(tmp_path / "noises")), [])


def test_prepared_data_is_named_by_its_settings(tmp_path: Path) -> None:
    assert augment.what_decides(AugmentConfig(spec=True)) == {}  # masks change nothing on disk
    config = AugmentConfig(noise=True, noise_dir=str(tmp_path))
    before = augment.what_decides(config)
    write_wav(tmp_path / "a.wav", [1, 2])
    assert augment.what_decides(config) != before
    assert augment.what_decides(config) != augment.what_decides(dataclasses.replace(config, num_copies=2))


def test_a_range_the_wrong_way_round_is_refused() -> None:
    (problem,) = check(RunConfig(augment=AugmentConfig(noise_snr_db_low=30.0)))
    assert "augment.noise_snr_db_low is 30.0" in problem


def test_a_corpus_is_augmented_in_its_training_set_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFsdd(tmp_path)
    monkeypatch.setattr(corpus, "load_catalog", lambda: load_catalog(fake.shipped))
    data = DataConfig(corpus="fsdd", source=str(fake.source), train_minutes=0.3, valid_minutes=0.1, test_minutes=0.1)
    plain, changed_speech = (corpus.prepare(data, FeatureConfig(), tmp_path / "cache", lambda _: None, augment_config=config)
                             for config in (None, AugmentConfig(speed="all", noise=True)))
    assert plain.digest != changed_speech.digest
    assert len(changed_speech.train.texts) == 3 * len(plain.train.texts)
    expected = plain.train.frames.num_frames * (1 / 0.9 + 1 + 1 / 1.1)
    assert changed_speech.train.frames.num_frames == pytest.approx(expected, rel=0.01)
    for name in ("valid", "test"):
        assert np.array_equal(getattr(plain, name).frames.features_TD, getattr(changed_speech, name).frames.features_TD)
