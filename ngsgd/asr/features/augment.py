"""Data augmentation by speed, voice, room, noise and volume of T frames; labels follow the audio.

All random numbers are functions of (utterance id, copy) alone, not of order or processes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import imports
from ngsgd.asr import recording
from ngsgd.asr.features import voice
from ngsgd.asr.features.voice import Waveform
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, PdfIds, Samples, Utterance, num_frames
from ngsgd.config import AugmentConfig
from ngsgd.errors import DataError
from ngsgd.files import open_regular

FULL_SCALE = 32767.0
LOUDEST_MIX = 0.9 * FULL_SCALE  # headroom: rounding to 16 bits must not clip


def white(num_samples: int, rng: np.random.Generator) -> Waveform:
    return rng.standard_normal(num_samples)


def pink(num_samples: int, rng: np.random.Generator) -> Waveform:
    """Noise whose power is proportional to 1 / frequency, as in rooms and machines."""
    spectrum = np.fft.rfft(rng.standard_normal(num_samples))
    bins = np.arange(len(spectrum))
    # the mean has no frequency to divide by; it is removed below
    bins[0] = 1
    noise: Waveform = np.fft.irfft(spectrum / np.sqrt(bins), n=num_samples)
    return np.asarray(noise - noise.mean())


COLORS = {"white": white, "pink": pink}


def mix(speech: Waveform, noise: Waveform, *, snr_db: float, is_speech: npt.NDArray[np.bool_]) -> npt.NDArray[np.int16]:
    """Return speech plus noise as 16-bit samples. `snr_db` is the power of the samples where
    `is_speech` over that of the noise: with pauses a slow speaker would get less noise.
    """
    mixture = add_noise(speech, noise, snr_db, is_speech)
    peak = float(np.abs(mixture).max())
    return np.asarray(np.round(mixture * min(1.0, LOUDEST_MIX / peak)), dtype=np.int16)


_COPY = re.compile(r"(?:vc\d+x(?P<rate>\d\.\d{4})-)?(?:cp\d+-)?(?:sp(?P<factor>\d+(?:\.\d+)?)-)?(?P<utt_id>.*)", re.DOTALL)
# values of recipes of Kaldi: three speeds (utils/data/perturb_data_dir_speed_3way.sh), half of the
# utterances in rooms and noise, and the factors of utils/data/perturb_data_dir_volume.sh
SPEEDS = (0.9, 1.0, 1.1)
REVERB_PROBABILITY = NOISE_PROBABILITY = 0.5
VOLUMES = (0.125, 2.0)
RT60_MS = (100.0, 600.0)  # from a small room with carpet to a lecture hall
# voices that a speaker is changed into: few enough for each to be a unit of normalization
NUM_VOICES = 16
# minimum delay of the tail of a simulated room after the direct sound
_DIRECT_PATH_MS = 1.0
# (samples, whether each is speech, random) to samples in the noise of a corpus
Mix = Callable[[Waveform, npt.NDArray[np.bool_], np.random.Generator], Waveform]


def for_set(set_name: str, utterances: Iterable[Utterance], config: AugmentConfig, *,
            sample_rate_hz: int = SAMPLE_RATE_HZ, silence_pdfs: Sequence[int] = (),
            mix: Mix | None = None, is_checked: bool = False) -> Iterable[Utterance]:
    """Return the utterances of a set, `augmented` if it is "train"."""
    if set_name != "train" or not config.changes_audio:
        return utterances
    return augmented(utterances, config, sample_rate_hz=sample_rate_hz, silence_pdfs=silence_pdfs, mix=mix,
                     is_checked=is_checked)


def check(config: AugmentConfig, sample_rate_hz: int) -> None:
    """Raise DataError if a folder of the settings, or a file in it, cannot be used."""
    _Sounds(config, sample_rate_hz).check()


def augmented(utterances: Iterable[Utterance], config: AugmentConfig, *,
              sample_rate_hz: int = SAMPLE_RATE_HZ, silence_pdfs: Sequence[int] = (),
              mix: Mix | None = None, is_checked: bool = False) -> Iterator[Utterance]:
    """Yield `augment.num_copies` copies of each utterance at each speed, in separate rooms.

    Another speed or voice is another speaker (sp0.9-NAME, vc3-NAME), with the rate of the voice in
    the names of utterances (vc3x0.9124-NAME). Copies after the first are cp1-NAME and so on.
    Frames of `silence_pdfs` are ignored when noise is scaled. `mix` adds the noise of a corpus to
    utterances that are not clean. DataError comes first, unless `check` was called (`is_checked`).
    """
    sounds = _Sounds(config, sample_rate_hz)
    if not is_checked:
        sounds.check()
    for utterance in utterances:
        for copy in range(config.num_copies):
            random = _random(utterance.utt_id, copy)
            for factor in SPEEDS if config.speed == "all" else (1.0,):
                mark = f"sp{factor:g}-" if factor != 1.0 else ""
                named = replace(utterance, utt_id=f"{f'cp{copy}-' if copy else ''}{mark}{utterance.utt_id}",
                                speaker=f"{mark}{utterance.speaker}")
                yield _changed(named, factor, sounds, config, random, silence_pdfs,
                               is_clean=is_clean(utterance.utt_id, config, copy), mix=mix)


def is_clean(utt_id: str, config: AugmentConfig, copy: int = 0) -> bool:
    """Whether a training utterance belongs to the fraction without noise and reverberation."""
    return bool(config.clean_fraction > 0 and _random(f"clean {utt_id}", copy).random() < config.clean_fraction)


def what_decides(config: AugmentConfig) -> dict[str, Any]:
    """Return all inputs of augmentation, for the name of the prepared data."""
    if not config.changes_audio:
        return {}
    settings = {name: value for name, value in asdict(config).items() if not name.startswith("spec")}
    folders = [folder for folder in (config.rir_dir, config.noise_dir) if folder]
    # names, sizes and times: collections of noises are too large to be hashed
    files = [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
             for folder in folders for path in sorted(Path(folder).rglob("*.wav"))]
    return {"augment": {**settings, "files": files,
                        "soxr": metadata.version("soxr") if config.speed != "none" or config.voice else ""}}


def retime(pdf_T: PdfIds, num_frames_now: int, factor: float) -> PdfIds:
    """Return the labels of audio at another speed: of the frame at `factor` times the time."""
    before_T = ((np.arange(num_frames_now) + 0.5) * factor).astype(np.int64)
    return pdf_T[np.minimum(before_T, len(pdf_T) - 1)]


def reverberate(samples: Waveform, response: Waveform) -> Waveform:
    """Apply a room; length, power and the time of the direct sound (the peak) are unchanged."""
    size = len(samples) + len(response) - 1
    spectrum = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    delay = int(np.abs(response).argmax())
    heard = np.fft.irfft(spectrum, size)[delay:delay + len(samples)]

    def root_mean_square(values: Waveform) -> float:
        return float(np.sqrt(np.mean(values ** 2)))
    return np.asarray(heard * root_mean_square(samples) / max(root_mean_square(heard), 1e-9))


def simulated_room(rt60_ms: float, sample_rate_hz: int, random: np.random.Generator) -> Waveform:
    """Impulse response (Polack): direct sound, then noise of its energy, -60 dB in `rt60_ms`."""
    time_s = np.arange(max(2, round(rt60_ms * sample_rate_hz / 1000))) / sample_rate_hz
    tail = random.standard_normal(len(time_s)) * 10.0 ** (-3.0 * time_s / (rt60_ms / 1000))
    tail[time_s * 1000 < _DIRECT_PATH_MS] = 0.0
    response = tail / max(float(np.sqrt((tail ** 2).sum())), 1e-9)
    # the direct sound is the greatest peak
    response[0] = max(1.0, 1.001 * float(np.abs(response).max()))
    return response


def add_noise(samples: Waveform, background: Waveform, snr_db: float, is_speech: npt.NDArray[np.bool_]) -> Waveform:
    """Add noise; `snr_db` is the power where `is_speech` over that of the noise. Not to silence."""
    speech_power = float(np.mean(samples[is_speech] ** 2)) if is_speech.any() else 0.0
    noise_power = float(np.mean(background ** 2))
    if not speech_power or not noise_power:
        return samples
    return np.asarray(samples + np.sqrt(speech_power / noise_power) * 10 ** (-snr_db / 20) * background)


def _changed(utterance: Utterance, factor: float, sounds: _Sounds, config: AugmentConfig,
             random: np.random.Generator, silence_pdfs: Sequence[int], *, is_clean: bool, mix: Mix | None) -> Utterance:
    rate_hz, pdf_T, samples = sounds.sample_rate_hz, utterance.pdf_T, utterance.samples.astype(np.float64)
    if factor != 1.0:
        # pitch too, as `speed` of sox
        soxr = imports.load("soxr", extra="asr", purpose="Speed perturbation")
        samples = _to_16_bits(soxr.resample(samples, factor, 1.0)).astype(np.float64)
        pdf_T = retime(pdf_T, num_frames(len(samples), rate_hz), factor)
    # all numbers are generated for any settings, so that one option does not change the others
    rooms, noises, volumes = (np.random.default_rng(seed) for seed in random.integers(2**63, size=3))
    if config.voice:
        voices = np.random.default_rng(random.integers(2**63))
        if voices.random() < config.voice_fraction:
            # one of the other voices of the speaker, with a random rate for the utterance
            number = int(voices.integers(NUM_VOICES))
            of_voice = voice.sample_change(_random(f"voice {utterance.speaker}", number), config.voice_tilt_db)
            change = replace(of_voice, rate=voice.sample_change(voices).rate)
            samples = voice.change_voice(samples, change, rate_hz)
            pdf_T = retime(pdf_T, num_frames(len(samples), rate_hz), change.rate)
            utterance = replace(utterance, utt_id=f"vc{number}x{change.rate:.4f}-{utterance.utt_id}",
                                speaker=f"vc{number}-{utterance.speaker}")
    if config.reverb and not is_clean and rooms.random() < REVERB_PROBABILITY:
        samples = reverberate(samples, sounds.response(rooms))
    # frames are 10 ms apart
    frame_of_sample = np.minimum(np.arange(len(samples)) // (rate_hz // 100), len(pdf_T) - 1)
    is_speech = ~np.isin(pdf_T, silence_pdfs)[frame_of_sample]
    if config.noise and not is_clean and noises.random() < NOISE_PROBABILITY:
        snr_db = float(noises.uniform(config.noise_snr_db_low, config.noise_snr_db_high))
        samples = add_noise(samples, sounds.background(len(samples), noises), snr_db, is_speech)
    if mix and not is_clean:
        samples = mix(samples, is_speech, noises)
    if config.volume:
        # one number is not used: without this line all augmented speech would change
        volumes.random()
        samples = samples * volumes.uniform(*VOLUMES)
    return replace(utterance, samples=_to_16_bits(samples), pdf_T=pdf_T)


def _to_16_bits(samples: Waveform) -> Samples:
    """Round to 16 bits; scale down the complete signal if a part would be clipped."""
    peak = float(np.abs(samples).max(initial=0.0))
    scale = LOUDEST_MIX / peak if peak > FULL_SCALE else 1.0
    return np.asarray(np.round(samples * scale), dtype=np.int16)


def original(utt_id: str) -> tuple[str, float]:
    """Return the name before `augmented` changed it, and the factor of the speed."""
    match = _COPY.fullmatch(utt_id)
    assert match is not None
    return match["utt_id"], float(match["factor"] or 1.0) * float(match["rate"] or 1.0)


def _random(utt_id: str, copy: int) -> np.random.Generator:
    name = int.from_bytes(hashlib.sha256(utt_id.encode()).digest()[:8], "little")
    return np.random.default_rng([0, name, copy])


@dataclass(frozen=True)
class _Sounds:
    """Impulse responses and noises: from folders, or simulated."""

    config: AugmentConfig
    sample_rate_hz: int

    def check(self) -> None:
        """Raise DataError for a required folder that cannot be used."""
        for paths in (self.config.reverb and self._responses, self.config.noise and self._noises):
            for path in paths or ():
                read_wav(path, self.sample_rate_hz)

    def response(self, random: np.random.Generator) -> Waveform:
        if self._responses:
            return self._read(self._responses[int(random.integers(len(self._responses)))])
        rt60_ms = float(np.exp(random.uniform(*np.log(RT60_MS))))
        return simulated_room(rt60_ms, self.sample_rate_hz, random)

    def background(self, num_samples: int, random: np.random.Generator) -> Waveform:
        """Return noise of this length from a random position; a short recording is repeated."""
        if not self._noises:
            return COLORS[str(random.choice(list(COLORS)))](num_samples, random)
        recorded = self._read(self._noises[int(random.integers(len(self._noises)))])
        return np.resize(np.roll(recorded, -int(random.integers(len(recorded)))), num_samples)

    def _read(self, path: Path) -> Waveform:
        return _recently_read(path, path.stat().st_mtime_ns, self.sample_rate_hz)

    @cached_property
    def _responses(self) -> list[Path]:
        return _files_of(self.config.rir_dir, "augment.rir_dir")

    @cached_property
    def _noises(self) -> list[Path]:
        return _files_of(self.config.noise_dir, "augment.noise_dir")


# a collection of noises does not fit in the memory of each process
@lru_cache(32)
def _recently_read(path: Path, _time_ns: int, sample_rate_hz: int) -> Waveform:
    return read_wav(path, sample_rate_hz)


def _files_of(folder: str, knob: str) -> list[Path]:
    if not folder:
        return []
    paths = sorted(path for path in Path(folder).rglob("*.wav") if path.is_file())
    if not paths:
        raise DataError(f"{knob} is {folder}, which "
                        f"{'contains no wav file' if Path(folder).is_dir() else 'is not a folder'}; "
                        "set it to a folder of wav files of one channel, or leave it empty.")
    return paths


def read_wav(path: Path, sample_rate_hz: int) -> Waveform:
    """Read a file of one channel, resampled to the given rate; DataError if it cannot be used."""
    try:
        samples_N, rate_hz = recording.read_mono(str(path), open_regular(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); replace or remove it.") from error
    samples = samples_N.astype(np.float64)
    if not samples.any():
        raise DataError(f"{path} contains no sound; remove it.")
    if rate_hz == sample_rate_hz:
        return samples
    soxr = imports.load("soxr", extra="asr", purpose="Resampling noise and impulse responses")
    return np.asarray(soxr.resample(samples, rate_hz, sample_rate_hz))
