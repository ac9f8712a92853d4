"""Voice conversion of recorded speech: independent pitch, vocal-tract length and rate.

Resampling scales pitch and formants; a phase vocoder (Flanagan and Golden 1966) restores the
duration, and a filter shifts the envelope. T windows, F frequency bins, L samples of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd import imports

# factors from a lower male voice to a change of a male voice to a woman or a child; pitch and
# formants rise together
PITCH = (0.85, 1.9)
FORMANTS = (0.92, 1.22)
RATE = (0.85, 1.2)
# standard deviation of the logarithm among speakers of equal height
_PITCH_SPREAD, _FORMANT_SPREAD = 0.1, 0.03
_TILT_CENTER_HZ = 1000.0  # the gain of a tilt is 0 dB here
_LARGEST_TILT_DB = 20.0
WINDOW_MS, HOPS_PER_WINDOW = 32, 4
# the envelope has no detail finer than this quefrency, which is below the pitch period of a high
# voice
ENVELOPE_MS = 1.75
# limits the filter where one of the two envelopes is nearly zero
_LARGEST_GAIN = 10.0
_TINY = 1e-5

Waveform = npt.NDArray[np.float64]
Spectra = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class VoiceChange:
    """Factors of a voice, 1 for no change, and an additional tilt."""

    pitch: float = 1.0
    # factor of the resonance frequencies: the inverse of the factor of the vocal-tract length
    formants: float = 1.0
    rate: float = 1.0  # factor of the speaking rate: the duration is divided by it
    tilt: float = 0.0  # added to the slope of the spectrum, dB per octave; not a factor


def sample_change(random: np.random.Generator, tilt_spread: float = 0.0) -> VoiceChange:
    """Sample factors around a common point of `PITCH` and `FORMANTS`, a rate in `RATE`, and a tilt
    with standard deviation `tilt_spread` (dB per octave).
    """
    def between(bounds: tuple[float, float], part: float) -> float:
        low, high = np.log(bounds)
        return float(np.exp(low + (high - low) * part))
    height, pitch, formants, rate = random.uniform(), random.normal(), random.normal(), random.uniform()
    return VoiceChange(
        pitch=between(PITCH, height) * float(np.exp(_PITCH_SPREAD * pitch)),
        formants=between(FORMANTS, height) * float(np.exp(_FORMANT_SPREAD * formants)),
        rate=between(RATE, rate), tilt=tilt_spread * float(random.normal()))


def change_voice(samples: Waveform, change: VoiceChange, sample_rate_hz: int) -> Waveform:
    """Return speech of another voice, with len(samples) / change.rate samples."""
    soxr = imports.load("soxr", extra="asr", purpose="Voice perturbation")
    length = round(len(samples) / change.rate)
    higher = np.asarray(soxr.resample(samples, change.pitch, 1.0))
    hop = round(WINDOW_MS * sample_rate_hz / (1000 * HOPS_PER_WINDOW))
    size = HOPS_PER_WINDOW * hop
    if len(higher) <= size:
        return np.resize(samples, length)
    padded = np.pad(higher, size // 2, mode="reflect")
    windows_TL = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    spectra_TF = np.asarray(np.fft.rfft(windows_TL * np.hanning(size + 1)[:-1], axis=1))
    # the resampled voice has its formants at `pitch` times their frequencies
    ratio = change.pitch / change.formants
    spectra_TF = spectra_TF * _envelope_gain(spectra_TF, ratio, round(ENVELOPE_MS * sample_rate_hz / 1000))
    if change.tilt:
        octave_F = np.log2(np.maximum(np.fft.rfftfreq(size, 1 / sample_rate_hz), 1.0) / _TILT_CENTER_HZ)
        tilt_db_F = np.clip(change.tilt * octave_F, -_LARGEST_TILT_DB, _LARGEST_TILT_DB)
        spectra_TF = spectra_TF * 10 ** (tilt_db_F / 20)
    stretched_TF = _stretch(spectra_TF, len(higher) / length, hop, length // hop + 1)
    return _synthesize(stretched_TF, size, hop, length)


def _envelope_gain(spectra_TF: Spectra, ratio: float, num_ceps: int) -> Waveform:
    """Gain that shifts the envelope from frequency ratio * f to f."""
    log_TF = np.log(np.abs(spectra_TF) + _TINY * np.abs(spectra_TF).max(initial=1e-9))
    cepstra_TL = np.fft.irfft(log_TF, axis=1)
    cepstra_TL[:, num_ceps + 1:-num_ceps] = 0.0
    envelope_TF = np.fft.rfft(cepstra_TL, axis=1).real
    bin_F = np.minimum(np.arange(log_TF.shape[1]) * ratio, log_TF.shape[1] - 1.0)
    low_F = np.minimum(bin_F.astype(np.int64), log_TF.shape[1] - 2)
    part_F = bin_F - low_F
    moved_TF = (1 - part_F) * envelope_TF[:, low_F] + part_F * envelope_TF[:, low_F + 1]
    limit = np.log(_LARGEST_GAIN)
    return np.asarray(np.exp(np.clip(moved_TF - envelope_TF, -limit, limit)))


def _stretch(spectra_TF: Spectra, speed: float, hop: int, num_windows: int) -> Spectra:
    """Change the speed of windows by `speed`; phases advance as between neighboring windows."""
    at_T = np.minimum(np.arange(num_windows) * speed, len(spectra_TF) - 1.0)
    low_T = np.minimum(at_T.astype(np.int64), len(spectra_TF) - 2)
    part_T1 = (at_T - low_T)[:, None]
    magnitude_TF = np.abs(spectra_TF)
    between_TF = (1 - part_T1) * magnitude_TF[low_T] + part_T1 * magnitude_TF[low_T + 1]
    phase_TF = np.angle(spectra_TF)
    step_TF = phase_TF[low_T + 1] - phase_TF[low_T]
    advance_F = 2 * np.pi * hop * np.arange(spectra_TF.shape[1]) / (2 * (spectra_TF.shape[1] - 1))
    step_TF = advance_F + np.angle(np.exp(1j * (step_TF - advance_F)))
    total_TF = phase_TF[0] + np.concatenate([np.zeros_like(step_TF[:1]), np.cumsum(step_TF[:-1], axis=0)])
    return np.asarray(between_TF * np.exp(1j * total_TF))


def _synthesize(spectra_TF: Spectra, size: int, hop: int, length: int) -> Waveform:
    window_L = np.hanning(size + 1)[:-1]
    windows_TL = np.fft.irfft(spectra_TF, n=size, axis=1) * window_L
    total = np.zeros((len(spectra_TF) - 1) * hop + size)
    norm = np.zeros_like(total)
    # windows that are HOPS_PER_WINDOW apart do not overlap
    for first in range(HOPS_PER_WINDOW):
        part_TL = windows_TL[first::HOPS_PER_WINDOW]
        stop = first * hop + part_TL.size
        total[first * hop:stop] += part_TL.ravel()
        norm[first * hop:stop] += np.tile(window_L ** 2, len(part_TL))
    start = size // 2
    # the first and the last samples are at the edge of a single window
    samples = total / np.maximum(norm, 1e-3)
    return np.asarray(np.pad(samples[start:start + length], (0, max(0, start + length - len(samples)))))
