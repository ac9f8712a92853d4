"""Noise with several spectra, mixed at a signal-to-noise ratio."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FisherSample = npt.NDArray[np.float64]

FULL_SCALE = 32767.0
# headroom: rounding to 16 bits must not clip
LOUDEST_MIX = 0.9 * FULL_SCALE


def white(num_samples: int, rng: np.random.Generator) -> FisherSample:
    return rng.standard_normal(num_samples)


def pink(num_samples: int, rng: np.random.Generator) -> FisherSample:
    """Noise whose power is proportional to 1 / frequency, as in rooms and machines."""
    spectrum = np.fft.rfft(rng.standard_normal(num_samples))
    bins = np.arange(len(spectrum))
    # the mean has no frequency to divide by; it is removed below
    bins[0] = 1
    noise: FisherSample = np.fft.irfft(spectrum / np.sqrt(bins), n=num_samples)
    return np.asarray(noise - noise.mean())


COLOURS = {"white": white, "pink": pink}


def mix(speech: FisherSample, noise: FisherSample, *, snr_db: float,
        is_speech: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    """Return speech plus noise as 16-bit samples.

    `snr_db` is the power of the samples where `is_speech` over that of the noise. Pauses are
    excluded, since otherwise a slow speaker would get less noise than a fast one.
    """
    speech_power = float(np.mean(speech[is_speech] ** 2))
    noise_power = float(np.mean(noise ** 2))
    gain = np.sqrt(speech_power / noise_power) * 10 ** (-snr_db / 20)
    mixture = speech + gain * noise
    peak = float(np.abs(mixture).max())
    mixture *= min(1.0, LOUDEST_MIX / peak)
    return np.asarray(np.round(mixture), dtype=np.int16)
