"""Made-up speech of yesno's shape: "words" that are chords with pauses, in a little noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.asr.fake_fsdd import write_wav

# three tones in a row for each phone, as far apart as formants are
TONES_HZ = {"N": (300, 900, 500), "Y": (2200, 1400, 3000)}
LEXICON = {"NO": "N", "YES": "Y"}
WORD_S, PAUSE_S, EDGE_S = (0.25, 0.45), (0.1, 0.4), (0.4, 0.9)


def say(words: Sequence[str], rng: np.random.Generator, rate_hz: int = 8000) -> npt.NDArray[np.int16]:
    pieces = [np.zeros(_length(rng, EDGE_S, rate_hz))]
    for word in words:
        pieces += [_word(LEXICON[word], rng, rate_hz), np.zeros(_length(rng, PAUSE_S, rate_hz))]
    speech = np.concatenate([*pieces, np.zeros(_length(rng, EDGE_S, rate_hz))])
    return np.round(6000 * speech + 60 * rng.standard_normal(len(speech))).astype(np.int16)


def _word(phone: str, rng: np.random.Generator, rate_hz: int) -> npt.NDArray[np.float64]:
    length = _length(rng, WORD_S, rate_hz) // 3
    time_s = np.arange(length) / rate_hz
    return np.concatenate([np.sin(2 * np.pi * tone * rng.uniform(0.95, 1.05) * time_s) for tone in TONES_HZ[phone]])


def _length(rng: np.random.Generator, bounds_s: tuple[float, float], rate_hz: int) -> int:
    return int(rng.uniform(*bounds_s) * rate_hz)


def draw_words(rng: np.random.Generator, num_words: int = 8) -> list[str]:
    return [("NO", "YES")[int(digit)] for digit in rng.integers(2, size=num_words)]


def write_yesno(folder: Path, num_recordings: int = 16, seed: int = 0) -> Path:
    """wav files with yesno's names."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    written: set[str] = set()
    while len(written) < num_recordings:
        words = draw_words(rng)
        name = "_".join("1" if word == "YES" else "0" for word in words)
        if name not in written:
            written.add(name)
            write_wav(folder / f"{name}.wav", say(words, rng))
    return folder


def write_data(root: Path, *, num_utterances: int = 6, rate_hz: int = 16000, seed: int = 0) -> Path:
    """train, valid and test as Kaldi data directories, two speakers each, and a lexicon."""
    rng = np.random.default_rng(seed)
    root.mkdir(parents=True)
    (root / "lexicon.txt").write_text("".join(f"{word} {phone}\n" for word, phone in LEXICON.items()))
    for name in ("train", "valid", "test"):
        (root / name).mkdir()
        tables: dict[str, list[str]] = {"text": [], "utt2spk": [], "wav.scp": []}
        for number in range(num_utterances):
            utt_id, words = f"{name}-s{number % 2}-{number}", draw_words(rng, 3)
            write_wav(root / name / f"{utt_id}.wav", say(words, rng, rate_hz), rate_hz=rate_hz)
            tables["text"].append(f"{utt_id} {' '.join(words)}")
            tables["utt2spk"].append(f"{utt_id} {name}-s{number % 2}")
            tables["wav.scp"].append(f"{utt_id} {utt_id}.wav")
        for table, lines in tables.items():
            (root / name / table).write_text("\n".join(lines) + "\n")
    return root
