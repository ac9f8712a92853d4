"""Conversion of phoneme events of the synthesizer to HMM states of frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ngsgd.asr.corpora.digits.synthesis import SynthesizedUtterance
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Pronunciation, Topology
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, PdfIds, frame_centers
from ngsgd.errors import DataError

_PHONES = "z i@ r oU w V 0 n t u: T t[ i: f o@ O@ aI v s I k E @ eI"
TOPOLOGY = Topology(
    phones=tuple(_PHONES.split()),
    lexicon={
        "zero": (("z", "i@", "r", "oU"),),
        "one": (("w", "V", "n"), ("w", "0", "n")),
        "two": (("t", "u:"),),
        "three": (("T", "r", "i:"), ("t[", "r", "i:")),
        "four": (("f", "o@"), ("f", "o@", "r"), ("f", "O@"), ("f", "O@", "r")),
        "five": (("f", "aI", "v"),),
        "six": (("s", "I", "k", "s"),),
        "seven": (("s", "E", "v", "@", "n"),),
        "eight": (("eI", "t"),),
        "nine": (("n", "aI", "n"),),
    },
)

STRESS_MARKS = "',%="
# a shorter diphthong, and the r that links to a following vowel
SAME_PHONE = {"aI2": "aI", "r-": "r"}
# an offglide before a vowel; its time is added to the previous phone
GLIDE = ";"
PAUSE = "_"


def label(spoken: SynthesizedUtterance, words: Sequence[str], *, lead: int,
          num_samples: int) -> PdfIds:
    """Return the pdf of each frame of an utterance with `num_samples` samples at 8 kHz.

    `lead` samples at its start are silent.
    """
    phonemes = [phoneme for phoneme in spoken.phonemes if phoneme.name != GLIDE]
    said: list[Pronunciation] = [()] * len(words)
    for phoneme in phonemes:
        if not phoneme.name.startswith(PAUSE):
            said[phoneme.word] = (*said[phoneme.word], phone(phoneme.name))
    for word, phones in zip(words, said, strict=True):
        if phones not in TOPOLOGY.lexicon[word]:
            raise DataError(f"The synthesizer pronounced the word {word} as "
                            f"{' '.join(phones) or 'nothing'}, which the digits lexicon does not "
                            "contain; install the supported version: pip install 'ngsgd[synth]'")
    starts, pdfs = [0.0], [SILENCE_PDF]
    ends = [phoneme.start for phoneme in phonemes[1:]] + [len(spoken.samples)]
    for phoneme, end in zip(phonemes, ends, strict=True):
        states = (SILENCE_PDF,) * STATES_PER_PHONE
        if not phoneme.name.startswith(PAUSE):
            states = TOPOLOGY.pdfs_of_phone(phone(phoneme.name))
        for third, pdf in enumerate(states):
            starts.append(phoneme.start + (end - phoneme.start) * third / STATES_PER_PHONE)
            pdfs.append(pdf)
    starts.append(len(spoken.samples))
    pdfs.append(SILENCE_PDF)
    centres = (frame_centers(num_samples) - lead) * (spoken.sample_rate / SAMPLE_RATE_HZ)
    state_T = np.searchsorted(starts, centres, side="right") - 1
    return np.array(pdfs, dtype=np.int32)[np.maximum(state_T, 0)]


def phone(name: str) -> str:
    """Phone of the topology for the name of an espeak-ng phoneme."""
    plain = name.strip(STRESS_MARKS)
    return SAME_PHONE.get(plain, plain)
