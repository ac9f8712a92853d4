"""Speech synthesis with one new process for each shard of a fixed plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from ngsgd.asr import extras
from ngsgd.asr.utterance import Samples
from ngsgd.errors import DataError

WORKER = Path(__file__).with_name("synth_worker.py")
# a shard takes less than a second; the library has hung in the past
SHARD_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sentence:
    """Text and voice of an utterance, in the units of espeak-ng."""

    text: str
    # a voice file, + and a variant of its timbre: gmw/en-US+Alex
    voice: str
    # words per minute, 80 to 450
    rate: int
    # 0 to 100; 50 is the default of the voice
    pitch: int
    # range of the pitch, 0 (monotone) to 100
    range: int
    # pause between words, in units of 10 ms
    word_gap: int


@dataclass(frozen=True)
class Phoneme:
    name: str
    # index of its word in the sentence
    word: int
    # first sample
    start: int


@dataclass(frozen=True)
class SynthesizedUtterance:
    samples: Samples
    sample_rate: int
    phonemes: tuple[Phoneme, ...]


def require() -> None:
    """Raise if the synthesizer cannot be started here."""
    extras.load("espeakng_loader", extra="synth", purpose="The embedded corpus, data.corpus=digits,")
    extras.load("soxr", extra="asr", purpose="The embedded corpus, data.corpus=digits,")


def speak(sentences: Sequence[Sentence], *, seed: int) -> list[SynthesizedUtterance]:
    """Synthesize the sentences in a new process; bitwise reproducible."""
    plan = {"seed": seed, "utterances": [asdict(sentence) for sentence in sentences]}
    # -P excludes this folder from the import path of the worker, and the file name avoids importing
    # `ngsgd`
    command = [sys.executable, "-P", str(WORKER)]
    try:
        done = subprocess.run(command, input=json.dumps(plan).encode(), capture_output=True, check=False,
                              timeout=SHARD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"The speech synthesizer did not answer within {SHARD_TIMEOUT_S:g} s; run "
                        "the command again.") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise DataError(f"The speech synthesizer failed ({reason}); reinstall it with: pip install "
                        f"--force-reinstall espeakng-loader=={metadata.version('espeakng-loader')}")
    first_line, _, pcm = done.stdout.partition(b"\n")
    header = json.loads(first_line)
    samples = np.frombuffer(pcm, dtype="<i2")
    ends = np.cumsum([utterance["num_samples"] for utterance in header["utterances"]])
    assert ends[-1] == len(samples)
    found = []
    for piece, utterance in zip(np.split(samples, ends[:-1]), header["utterances"], strict=True):
        word, phonemes = -1, []
        for kind, start, name in utterance["events"]:
            if kind == "word":
                word += 1
            else:
                phonemes.append(Phoneme(name, word, start))
        found.append(SynthesizedUtterance(piece, header["sample_rate"], tuple(phonemes)))
    return found
