"""Options of data augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of the training data; validation and test data stay unchanged.

    Audio is changed before features are computed, in the order speed, voice, reverberation, noise
    and volume. SpecAugment masks windows at training time. Everything is off by default.
    """

    num_copies: int = option(1, "number of copies of each training utterance, each augmented independently", low=1, high=100)
    speed: Literal["none", "all"] = option("none", "speed perturbation; all: copies at 0.9, 1 and 1.1 times the speed (Kaldi)")
    voice: bool = option(False, "perturbation of pitch, vocal-tract length and rate: 16 new voices of each speaker")
    voice_fraction: float = option(0.5, "fraction of the utterances with another voice", low=0.0, high=1.0, used="voice")
    voice_tilt_db: float = option(0.0, "standard deviation of the spectral tilt of the new voices",
                                  unit="dB per octave", low=0.0, high=12.0, used="voice")
    clean_fraction: float = option(
        0.0, "fraction of the training utterances without noise and reverberation, including the "
        "noise of corpus=digits|fsdd", low=0.0, high=1.0)
    reverb: bool = option(False, "convolution of half of the utterances with a room impulse response")
    rir_dir: str = option("", "folder of wav files with one impulse response each; empty: "
                          "simulated rooms", used="reverb")
    noise: bool = option(False, "additive noise in half of the utterances")
    noise_dir: str = option("", "folder of wav files with noise; empty: white and pink noise", used="noise")
    noise_snr_db_low: float = option(5.0, "lowest signal-to-noise ratio of the added noise",
                                     unit="dB", low=-20.0, high=60.0, used="noise")
    noise_snr_db_high: float = option(20.0, "highest signal-to-noise ratio of the added noise",
                                      unit="dB", low=-20.0, high=60.0, used="noise")
    volume: bool = option(False, "random scaling of the signal by a factor of 0.125 to 2 (Kaldi)")
    spec: bool = option(False, "SpecAugment: a time mask and a frequency mask on half of the windows")

    @property
    def changes_audio(self) -> bool:
        """Whether the prepared data differs from that without augmentation."""
        return (self.num_copies > 1 or self.speed != "none" or self.voice or self.clean_fraction > 0
                or self.reverb or self.noise or self.volume)
