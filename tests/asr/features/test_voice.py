"""Voice perturbation: a slow reference, pitch, formants and rate of made sounds, and labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import soxr

from ngsgd.asr.features import augment, voice
from ngsgd.asr.features.voice import VoiceChange, change_voice, sample_change
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Utterance, num_frames
from ngsgd.config import AugmentConfig
from tests.reference.voice import moved_and_stretched

RATE = SAMPLE_RATE_HZ


def vowel(pitch_hz: float = 110.0, formant_hz: float = 900.0, num_samples: int = 4000) -> np.ndarray:
    """Harmonics of a pitch, the strongest near the formant."""
    time_s = np.arange(num_samples) / RATE
    harmonics = np.arange(pitch_hz, 3500.0, pitch_hz)
    gains = 1.0 / (1.0 + ((harmonics - formant_hz) / 120.0) ** 2)
    return np.asarray(3000.0 * sum(gain * np.sin(2 * np.pi * f * time_s + f)
                                   for f, gain in zip(harmonics, gains, strict=True)))


def middle(samples: np.ndarray) -> np.ndarray:
    return samples[len(samples) // 4:3 * len(samples) // 4]


def pitch_of(samples: np.ndarray, near_hz: float = 110.0) -> float:
    """The pitch near `near_hz`; the autocorrelation of two periods is as high as that of one."""
    part = middle(samples)
    correlation = np.correlate(part, part, "full")[len(part) - 1:]
    low, high = round(RATE / near_hz * 0.7), round(RATE / near_hz * 1.4)
    return RATE / (low + int(correlation[low:high].argmax()))


def formant_of(samples: np.ndarray) -> float:
    """The center of gravity of the power."""
    part = middle(samples)
    power = np.abs(np.fft.rfft(part * np.hanning(len(part)))) ** 2
    return float((power * np.fft.rfftfreq(len(part), 1 / RATE)).sum() / power.sum())


@pytest.mark.parametrize("rate_hz", [8000, 11025, 16000, 22050])
def test_no_change_returns_the_samples(rate_hz: int) -> None:
    samples = vowel()
    assert np.allclose(middle(change_voice(samples, VoiceChange(), rate_hz)), middle(samples), atol=1e-6)


@pytest.mark.parametrize("pitch", [0.8, 1.5, 2.0])
def test_pitch_changes_and_the_duration_stays(pitch: float) -> None:
    changed = change_voice(vowel(), VoiceChange(pitch=pitch), RATE)
    assert len(changed) == 4000
    assert pitch_of(changed, 110 * pitch) == pytest.approx(110 * pitch, rel=0.03)


@pytest.mark.parametrize("formants", [0.88, 1.25])
def test_formants_change_and_the_pitch_stays(formants: float) -> None:
    samples = vowel()
    changed = change_voice(samples, VoiceChange(formants=formants), RATE)
    assert formant_of(changed) / formant_of(samples) == pytest.approx(formants, rel=0.05)
    assert pitch_of(changed) == pytest.approx(110, rel=0.03)


def test_higher_pitch_leaves_the_formants() -> None:
    samples = vowel()
    higher = change_voice(samples, VoiceChange(pitch=1.5), RATE)
    assert formant_of(higher) == pytest.approx(formant_of(samples), rel=0.08)


@pytest.mark.parametrize("rate", [0.85, 1.2])
def test_rate_changes_the_duration_and_not_the_pitch(rate: float) -> None:
    changed = change_voice(vowel(), VoiceChange(rate=rate), RATE)
    assert len(changed) == round(4000 / rate)
    assert pitch_of(changed) == pytest.approx(110, rel=0.03)


def test_tilt_is_a_slope_of_the_spectrum_around_one_kilohertz() -> None:
    samples = np.random.default_rng(0).normal(size=40000)
    before, after = (np.abs(np.fft.rfft(one)) ** 2 for one in (samples, change_voice(samples, VoiceChange(tilt=-4.0), RATE)))
    hz = np.fft.rfftfreq(len(samples), 1 / RATE)
    for octave, expected_db in ((-1, 4.0), (0, 0.0), (1, -4.0)):
        near = np.abs(hz - 1000 * 2.0 ** octave) < 50
        assert 10 * np.log10(after[near].sum() / before[near].sum()) == pytest.approx(expected_db, abs=0.5)


@pytest.mark.parametrize("num_samples", [1, 100, 256])
def test_audio_shorter_than_a_window_has_the_length_asked_for(num_samples: int) -> None:
    changed = change_voice(np.ones(num_samples), VoiceChange(pitch=1.3, rate=0.9), RATE)
    assert len(changed) == round(num_samples / 0.9)
    assert np.isfinite(changed).all()


def test_silence_stays_silent() -> None:
    assert not change_voice(np.zeros(3000), VoiceChange(1.3, 1.1, 0.9), RATE).any()


def test_against_the_slow_reference() -> None:
    rate_hz, change = 2000, VoiceChange(pitch=1.4, formants=1.1, rate=0.9)
    samples = np.random.default_rng(0).normal(size=500).cumsum()
    higher = soxr.resample(samples, change.pitch, 1.0)
    size = 4 * round(voice.WINDOW_MS * rate_hz / 4000)
    expected = moved_and_stretched(higher, change.pitch / change.formants, round(500 / 0.9), size,
                                   round(voice.ENVELOPE_MS * rate_hz / 1000))
    # phases accumulate: rounding grows with the number of windows
    assert np.allclose(change_voice(samples, change, rate_hz), expected, rtol=1e-6, atol=1e-6)


def test_sampled_pitch_and_formants_rise_together_and_the_rate_is_within_its_bounds() -> None:
    random = np.random.default_rng(0)
    found = [sample_change(random) for _ in range(1000)]
    pitch, formants, rate = (np.log([getattr(change, name) for change in found]) for name in ("pitch", "formants", "rate"))
    for values, bounds in ((pitch, voice.PITCH), (formants, voice.FORMANTS)):
        assert values.mean() == pytest.approx(np.log(bounds).mean(), abs=0.03)
    assert np.corrcoef(pitch, formants)[0, 1] > 0.7
    assert abs(np.corrcoef(pitch, rate)[0, 1]) < 0.1
    assert np.log(voice.RATE[0]) <= rate.min() and rate.max() <= np.log(voice.RATE[1])


def same(one: Utterance, other: Utterance) -> bool:
    return np.array_equal(one.samples, other.samples)


def tone(utt_id: str, speaker: str = "anna") -> Utterance:
    """Silence, a vowel from frame 20 to 40, silence."""
    samples, pdf_T = np.zeros(4800), np.zeros(60, np.int32)
    samples[1600:3200] = vowel(num_samples=1600)
    pdf_T[20:40] = 3
    return Utterance(utt_id, speaker, ("one",), samples.astype(np.int16), pdf_T)


def changed(utterances: list[Utterance], config: AugmentConfig) -> list[Utterance]:
    return list(augment.augmented(utterances, config, silence_pdfs=[0]))


def test_labels_follow_the_audio() -> None:
    for one in changed([tone(f"u{n}") for n in range(30)], AugmentConfig(voice=True)):
        assert len(one.pdf_T) == num_frames(len(one.samples))
        power_T = np.array([np.mean(part.astype(float) ** 2) for part in np.array_split(one.samples, len(one.pdf_T))])
        assert ((power_T > 0.05 * power_T.max()) != (one.pdf_T == 3)).sum() <= 5


def test_half_of_the_utterances_have_another_voice_of_sixteen() -> None:
    utterances = [tone(f"u{n}") for n in range(200)]
    found = changed(utterances, AugmentConfig(voice=True))
    assert {one.speaker for one in found} == {"anna", *(f"vc{k}-anna" for k in range(augment.NUM_VOICES))}
    is_same = [one.speaker == "anna" for one in found]
    assert 0.4 < np.mean(is_same) < 0.6
    assert is_same == [same(one, other) for one, other in zip(found, utterances, strict=True)]
    again = changed(utterances[::-1], AugmentConfig(voice=True))[::-1]
    assert all(map(same, found, again))


def test_a_name_leads_to_the_labels_of_the_original() -> None:
    utterances = [tone(f"u{n}") for n in range(40)]
    for before, after in zip(utterances, changed(utterances, AugmentConfig(voice=True)), strict=True):
        name, factor = augment.original(after.utt_id)
        assert name == before.utt_id
        # the name has four digits of the rate
        again_T = augment.retime(before.pdf_T, len(after.pdf_T), factor)
        assert (again_T != after.pdf_T).sum() <= 1


def test_voices_of_two_speakers_differ() -> None:
    pairs = zip(changed([tone(f"u{n}") for n in range(20)], AugmentConfig(voice=True)),
                changed([tone(f"u{n}", "berta") for n in range(20)], AugmentConfig(voice=True)), strict=True)
    differ = [not same(one, other) for one, other in pairs if one.speaker.startswith("vc")]
    assert differ and all(differ)


def test_switching_voices_on_samples_the_same_noise() -> None:
    plain, both = (changed([tone(f"u{n}") for n in range(60)], AugmentConfig(noise=True, voice=on)) for on in (False, True))
    unchanged = [same(one, other) for one, other in zip(plain, both, strict=True)
                 if other.speaker == "anna"]
    assert unchanged and all(unchanged)


def test_the_clean_fraction_has_no_noise_and_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REVERB_PROBABILITY", "NOISE_PROBABILITY"):
        monkeypatch.setattr(augment, name, 1.0)
    utterances = [tone(f"u{n}") for n in range(200)]
    config = AugmentConfig(noise=True, reverb=True, clean_fraction=0.3)
    found = changed(utterances, config)
    is_same = [same(one, other) for one, other in zip(found, utterances, strict=True)]
    assert is_same == [augment.is_clean(one.utt_id, config) for one in utterances]
    assert 0.2 < np.mean(is_same) < 0.4
    # the others are as without the option
    without = changed(utterances, replace(config, clean_fraction=0.0))
    assert all(clean or same(*pair) for clean, *pair in zip(is_same, found, without, strict=True))


def test_noise_of_the_corpus_is_added_after_the_voice_changed_and_not_to_clean_speech() -> None:
    utterances, config = [tone(f"u{n}") for n in range(60)], AugmentConfig(voice=True, clean_fraction=0.3)

    def mix(samples: np.ndarray, is_speech: np.ndarray, _random: np.random.Generator) -> np.ndarray:
        assert is_speech.shape == samples.shape
        return np.asarray(samples + 100.0 * ~is_speech)
    without = changed(utterances, config)
    mixed = augment.augmented(utterances, config, silence_pdfs=[0], mix=mix)
    for before, one, other in zip(utterances, without, mixed, strict=True):
        assert one.utt_id == other.utt_id
        difference = other.samples.astype(int) - one.samples
        expected = 0 if augment.is_clean(before.utt_id, config) else 100
        # the ends are silence, and the middle of the tone is speech
        assert (difference[:100] == expected).all() and (difference[-100:] == expected).all()
        assert difference[len(difference) // 2] == 0
