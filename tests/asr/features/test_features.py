import numpy as np
import pytest

from ngsgd.asr.features import augment, filterbank
from ngsgd.asr.utterance import frame_centers, num_frames, spread_to_samples
from ngsgd.config import FeatureConfig

pytest.importorskip("kaldi_native_fbank")


@pytest.mark.parametrize("num_samples", [400, 439, 440, 441, 519, 520, 521, 8000])
def test_one_row_per_frame_whatever_the_length(num_samples: int) -> None:
    samples = np.random.default_rng(0).integers(-1000, 1000, num_samples).astype(np.int16)
    for config in (FeatureConfig(), FeatureConfig(kind="mfcc")):
        assert len(filterbank.extract(samples, config)) == num_frames(num_samples) == len(frame_centers(num_samples))


def test_a_tone_lights_the_same_frames_and_bins_it_sounds_in() -> None:
    samples = np.random.default_rng(0).normal(scale=5.0, size=8000)
    samples[3200:4800] += 5000 * np.sin(2 * np.pi * 1000 / 8000 * np.arange(1600))
    fbank_TD = filterbank.extract(samples.astype(np.int16), FeatureConfig())
    loud_T = fbank_TD.max(axis=1) > fbank_TD.max() - 5
    assert np.flatnonzero(loud_T).tolist() == pytest.approx(list(range(39, 61)), abs=2)
    loudest_bin = int(fbank_TD[50].argmax())
    mel_of = [1127 * np.log(1 + hz / 700) for hz in (20, 1000, 4000)]
    expected_bin = (mel_of[1] - mel_of[0]) / (mel_of[2] - mel_of[0]) * 41 - 1
    assert loudest_bin == pytest.approx(expected_bin, abs=1)


def test_mfcc_has_the_number_of_coefficients_asked_for() -> None:
    samples = np.random.default_rng(0).integers(-1000, 1000, 4000).astype(np.int16)
    assert filterbank.extract(samples, FeatureConfig(kind="mfcc", num_ceps=20)).shape == (50, 20)


def test_normalisation_is_over_the_unit_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    raw = [rng.normal(loc, 2.0, size=(200, 3)).astype(np.float32) for loc in (0.0, 10.0, 20.0)]
    speakers = ["a", "a", "b"]
    by_utterance = filterbank.normalize(raw, speakers, FeatureConfig(cmvn="utterance"))
    for features_TD in by_utterance:
        np.testing.assert_allclose(features_TD.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(features_TD.std(0), 1, atol=1e-5)
    by_speaker = filterbank.normalize(raw, speakers, FeatureConfig(cmvn="speaker"))
    np.testing.assert_allclose(np.concatenate(by_speaker[:2]).mean(0), 0, atol=1e-5)
    assert abs(by_speaker[0].mean()) > 0.5  # the speaker's two utterances keep their distance
    np.testing.assert_allclose(by_speaker[2], by_utterance[2], atol=1e-6)
    np.testing.assert_array_equal(filterbank.normalize(raw, speakers, FeatureConfig(cmvn="none"))[1], raw[1])


def test_bins_without_an_fft_point_become_zero_not_nan() -> None:
    samples = np.random.default_rng(0).integers(-1000, 1000, 4000).astype(np.int16)
    config = FeatureConfig(num_mel_bins=256)  # at 8 kHz many of them are narrower than an FFT bin
    (features_TD,) = filterbank.normalize([filterbank.extract(samples, config)], ["s"], config)
    assert np.isfinite(features_TD).all()


def test_loud_mixtures_are_turned_down_instead_of_clipped() -> None:
    speech = 32767 * np.sin(np.arange(8000) / 5)
    mixture = augment.mix(speech, augment.white(8000, np.random.default_rng(0)), snr_db=0.0, is_speech=np.ones(8000, bool))
    assert np.abs(mixture.astype(int)).max() == pytest.approx(augment.LOUDEST_MIX, abs=1)


def test_pink_noise_falls_three_decibels_per_octave() -> None:
    power = np.abs(np.fft.rfft(augment.pink(1 << 17, np.random.default_rng(0)))) ** 2
    low, high = power[1000:2000].mean(), power[16000:32000].mean()
    assert 10 * np.log10(low / high) == pytest.approx(12.0, abs=0.5)  # four octaves apart


@pytest.mark.parametrize("num_samples", [40, 119, 120, 121, 160])
def test_flags_of_frames_cover_every_sample(num_samples: int) -> None:
    flags = spread_to_samples(np.ones(num_frames(num_samples), bool), num_samples)
    assert flags.tolist() == [True] * num_samples
