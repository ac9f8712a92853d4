"""Connected digits from Flite, Festival and SVOX Pico, as Kaldi data directories.

    python recipes/digits/local/unseen_voices.py OUT
    python recipes/digits/local/unseen_voices.py OUT --training-strings 60 --leave-out f-pico-us

Four women and four men each say strings of three to seven digits, 20 per voice.  The women are slt
of Flite, slt of Festival's HTS and the two voices of SVOX Pico; the men are kal16, awb and rms of
Flite and ked of Festival.  OUT/clean, OUT/30dB, OUT/10dB and OUT/5dB have the same speech at 8 kHz:
without noise, where pauses are digital silence, and with white or pink noise.  The plan is seeded.

With --training-strings, OUT is one data directory for data.added_dirs: other strings, without
noise, of all voices but those of --leave-out.  Name all voices of a speaker there: f-flite-slt and
f-hts-slt are one woman, and each language of Pico has another one.  Four more women
say digits in training only: Pico's German, Spanish, French and Italian voices, by phonemes of their
languages.  Spanish and Italian lack some digits.

Needs the Debian packages flite, festival, festvox-kdlpc16k and festvox-us-slt-hts, and ttspico from
PyPI.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import soxr

from ngsgd.asr.features import augment

RATE_HZ = 8000
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STRINGS_PER_VOICE, NUM_WORDS = 20, (3, 7)
TABLES = ("wav.scp", "text", "utt2spk")
Tables = dict[str, list[str]]
CONDITIONS = {"clean": np.inf, "30dB": 30.0, "10dB": 10.0, "5dB": 5.0}
EDGE_SILENCE_MS = 200
# below the loudest 10 ms: pauses, which do not count in the signal-to-noise ratio
_PAUSE_DB = 35.0
_PICO = """
import sys, wave, ttspico
engine = ttspico.TtsEngine(sys.argv[1])
with wave.open(sys.argv[3], "wb") as wav:
    wav.setparams((1, 2, 16000, 0, "NONE", ""))
    wav.writeframes(engine.speak(sys.argv[2]))
"""


def flite(voice: str) -> Callable[[str, Path], None]:
    return lambda text, path: run("flite", "-voice", voice, "-t", text, "-o", str(path))


def festival(voice: str) -> Callable[[str, Path], None]:
    return lambda text, path: run("text2wave", "-eval", f"(voice_{voice})", "-o", str(path), stdin=text)


def pico(language: str, phonemes: Mapping[str, str] | None = None) -> Callable[[str, Path], None]:
    """Speak with the voice of a language; `phonemes` gives the X-SAMPA of each word."""
    def speak(text: str, path: Path) -> None:
        if phonemes:
            text = " ".join(f"<phoneme ph='\"{phonemes[word]}'/>" for word in text.split())
        run(sys.executable, "-c", _PICO, language, text, str(path))

    return speak


VOICES = {
    "f-flite-slt": flite("slt"), "f-hts-slt": festival("cmu_us_slt_arctic_hts"), "f-pico-us": pico("en-US"),
    "f-pico-gb": pico("en-GB"), "m-flite-awb": flite("awb"), "m-flite-kal": flite("kal16"), "m-flite-rms": flite("rms"),
    "m-festival-ked": festival("ked_diphone"),
}
# digits that a voice of another language speaks, in its phonemes
PHONEMES = {
    "de-DE": dict(zip(DIGITS, ("zi:Ro:", "uOn", "tu:", "fRi:", "fo:6", "faIf", "zIks", "zEvEn", "e:t", "naIn"), strict=True)),
    "es-ES": {"one": "wan", "three": "Tri", "five": "faiB", "six": "siks", "seven": "seBen", "eight": "ejt", "nine": "najn"},
    "fr-FR": {"zero": "ziRo", "one": "uOn", "two": "tuu", "four": "fOR", "five": "fajv", "six": "siks", "seven": "sEvEn",
              "eight": "Ejt", "nine": "najn"},
    "it-IT": {"zero": "ziro", "five": "fajv", "six": "siks", "seven": "sEven", "nine": "nain"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="new folder for the data directories")
    parser.add_argument("--training-strings", type=int, default=0, metavar="N",
                        help="write one data directory for training, N strings per voice, without noise")
    parser.add_argument("--leave-out", nargs="+", default=[], choices=list(VOICES), metavar="VOICE",
                        help=f"voices that it does not contain: {', '.join(VOICES)}")
    asked = parser.parse_args()
    missing = [name for name in ("flite", "text2wave") if not shutil.which(name)]
    if missing or not importlib.util.find_spec("ttspico"):
        raise SystemExit(f"{' and '.join(missing) or 'ttspico'} cannot be found; install the packages that --help names.")
    if asked.training_strings:
        write_training_set(asked.out, asked.training_strings, asked.leave_out)
    else:
        write_test_sets(asked.out)


def write_training_set(out: Path, strings_per_voice: int, leave_out: list[str]) -> None:
    """Write other strings than those of the test sets, without noise."""
    lines: Tables = {name: [] for name in TABLES}
    for number, (voice, speak) in enumerate(VOICES.items()):
        random = np.random.default_rng([2, number])
        for index in range(strings_per_voice if voice not in leave_out else 0):
            words = sample_words(random)
            add(lines, out, f"{voice}-train-{index:03d}", voice, words, spoken(speak, " ".join(words)))
    for number, (language, phonemes) in enumerate(PHONEMES.items()):
        voice, speak = f"f-pico-{language[:2]}", pico(language, phonemes)
        random = np.random.default_rng([3, number])
        for index in range(strings_per_voice):
            words = sample_words(random, sorted(phonemes))
            add(lines, out, f"{voice}-train-{index:03d}", voice, words, spoken(speak, " ".join(words)))
    write_tables(out, lines)


def write_test_sets(out: Path) -> None:
    lines: dict[str, Tables] = {condition: {name: [] for name in TABLES} for condition in CONDITIONS}
    for number, (voice, speak) in enumerate(VOICES.items()):
        random = np.random.default_rng([0, number])
        for index in range(STRINGS_PER_VOICE):
            words = sample_words(random)
            speech = spoken(speak, " ".join(words))
            color = str(random.choice(list(augment.COLORS)))
            background = augment.COLORS[color](len(speech), np.random.default_rng([1, number, index]))
            for name, snr_db in CONDITIONS.items():
                noisy = augment.mix(speech, background, snr_db=snr_db, is_speech=is_speech(speech))
                add(lines[name], out / name, f"{voice}-{index:02d}", voice, words, noisy)
    for name in CONDITIONS:
        write_tables(out / name, lines[name])


def sample_words(random: np.random.Generator, known: Sequence[str] = DIGITS) -> list[str]:
    return random.choice(known, size=int(random.integers(*NUM_WORDS, endpoint=True))).tolist()


def add(lines: Tables, folder: Path, utt_id: str, voice: str, words: list[str], samples: np.ndarray) -> None:
    path = (folder / "wav" / f"{utt_id}.wav").absolute()
    write(path, samples)
    for table, value in zip(TABLES, (path, " ".join(words), voice), strict=True):
        lines[table].append(f"{utt_id} {value}\n")


def write_tables(folder: Path, lines: Tables) -> None:
    for table, content in lines.items():
        (folder / table).write_text("".join(sorted(content)))


def spoken(speak: Callable[[str, Path], None], text: str) -> augment.Waveform:
    """The text as speech at 8 kHz with silence at both ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        speak(text, path)
        with wave.open(str(path)) as wav:
            rate_hz = wav.getframerate()
            samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2").astype(np.float64)
    return np.pad(soxr.resample(samples, rate_hz, RATE_HZ), RATE_HZ * EDGE_SILENCE_MS // 1000)


def is_speech(samples: augment.Waveform) -> np.ndarray:
    """Whether each sample lies in a 10 ms block that is not a pause."""
    block = RATE_HZ // 100
    power = np.array([np.mean(part ** 2) for part in np.split(samples, range(block, len(samples), block))])
    return np.repeat(power > power.max() * 10 ** (-_PAUSE_DB / 10), block)[:len(samples)]


def write(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # loud voices exceed 16 bits after resampling
    samples = samples * min(1.0, augment.LOUDEST_MIX / max(1.0, np.abs(samples).max()))
    with wave.open(str(path), "wb") as wav:
        wav.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        wav.writeframes(samples.astype("<i2").tobytes())


def run(*command: str, stdin: str = "") -> None:
    subprocess.run(command, input=stdin.encode(), check=True, capture_output=True)


if __name__ == "__main__":
    main()
