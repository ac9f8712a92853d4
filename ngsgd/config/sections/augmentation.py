"""Options of data augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of the training data; validation and test data stay unchanged.

    Audio is changed before features are computed, in the order speed, reverberation, noise and
    volume. SpecAugment masks windows at training time. Everything is off by default.
    """

    seed: int = option(
        0, "seed of the changes of audio; SpecAugment uses the seed of the run", low=0)
    num_copies: int = option(1, "copies of each training utterance, each augmented independently",
                             low=1, high=100)
    speed: Literal["none", "all", "draw"] = option(
        "none", "speed perturbation; all: one copy at each factor (Kaldi), draw: a random factor")
    speed_factors: tuple[float, ...] = option(
        (0.9, 1.0, 1.1), "factors of speed perturbation; 1.1 is shorter and higher",
        used="speed=all|draw")
    speed_probability: float = option(1.0, "probability of a factor other than 1", low=0.0,
                                      high=1.0, used="speed=draw")
    reverb: bool = option(False, "convolution with the impulse response of a room")
    reverb_probability: float = option(0.5, "probability of reverberation", low=0.0, high=1.0,
                                       used="reverb")
    rir_dir: str = option(
        "", "folder of wav files with one impulse response each; empty: simulated rooms",
        used="reverb")
    rt60_ms_low: float = option(
        100.0, "shortest time in which the sound of a simulated room decays by 60 dB", unit="ms",
        above=0.0, high=5000.0, used="reverb & !rir_dir")
    rt60_ms_high: float = option(
        600.0, "longest time in which the sound of a simulated room decays by 60 dB", unit="ms",
        above=0.0, high=5000.0, used="reverb & !rir_dir")
    noise: bool = option(False, "additive noise")
    noise_probability: float = option(0.5, "probability of noise", low=0.0, high=1.0,
                                      used="noise")
    noise_dir: str = option("", "folder of wav files of noise; empty: white and pink noise",
                            used="noise")
    noise_snr_db_low: float = option(5.0, "lowest ratio of speech to noise", unit="dB", low=-20.0,
                                     high=60.0, used="noise")
    noise_snr_db_high: float = option(20.0, "highest ratio of speech to noise", unit="dB",
                                      low=-20.0, high=60.0, used="noise")
    volume: bool = option(False, "random scaling of the complete signal")
    volume_probability: float = option(1.0, "probability of scaling", low=0.0, high=1.0,
                                       used="volume")
    volume_low: float = option(0.125, "smallest factor on the amplitude (Kaldi: 0.125)", above=0.0,
                               high=100.0, used="volume")
    volume_high: float = option(2.0, "largest factor on the amplitude (Kaldi: 2)", above=0.0,
                                high=100.0, used="volume")
    spec: bool = option(False, "SpecAugment: masks on each window of spliced frames")
    spec_probability: float = option(0.5, "probability of masks on a window", low=0.0, high=1.0,
                                     used="spec")
    spec_num_time_masks: int = option(1, "number of masks over time", low=0, high=100, used="spec")
    spec_time_frames: int = option(
        3, "largest width of a mask over time; a window has left + 1 + right context frames",
        unit="frames", low=0, high=1000, used="spec & spec_num_time_masks")
    spec_num_freq_masks: int = option(1, "number of masks over frequency", low=0, high=100,
                                      used="spec")
    spec_freq_bins: int = option(8, "largest width of a mask over frequency", unit="mel bins",
                                 low=0, high=1000, used="spec & spec_num_freq_masks")

    @property
    def changes_audio(self) -> bool:
        """Whether the prepared data differs from that without augmentation."""
        return (self.num_copies > 1 or self.speed != "none" or self.reverb or self.noise
                or self.volume)
