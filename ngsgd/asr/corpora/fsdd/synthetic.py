"""Synthetic digits with the phones of FSDD, to be mixed with its recordings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ngsgd.asr.corpora.digits import labels
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.utterance import Utterance

# phones of the synthesizer -> phones of FSDD; accents differ in the vowels of one and four and in
# the first sound of three
PHONES = {
    "z": "Z", "i@": "IH", "r": "R", "oU": "OW", "w": "W", "V": "AH", "0": "AH", "n": "N", "t": "T", "u:": "UW",
    "T": "TH", "t[": "TH", "i:": "IY", "f": "F", "o@": "AO", "O@": "AO", "aI": "AY", "v": "V", "s": "S", "I": "IH",
    "k": "K", "E": "EH", "@": "AH", "eI": "EY",
}


def with_pronunciations(topology: Topology) -> Topology:
    """Return the topology of FSDD with the pronunciations that its lexicon lacks: four without
    r.
    """
    lexicon = {word: tuple(dict.fromkeys((*pronunciations, *_spoken(word))))
               for word, pronunciations in topology.lexicon.items()}
    return replace(topology, lexicon=lexicon)


def relabeled(utterances: Iterable[Utterance], topology: Topology) -> Iterator[Utterance]:
    """Yield synthetic digits with the HMM states of `topology`."""
    synthetic = labels.TOPOLOGY
    pdf_of = np.zeros(synthetic.num_pdfs, dtype=np.int32)
    pdf_of[list(synthetic.silence_pdfs)] = topology.silence_pdfs
    for phone, name in PHONES.items():
        pdf_of[list(synthetic.pdfs_of_phone(phone))] = topology.pdfs_of_phone(name)
    for utterance in utterances:
        yield replace(utterance, pdf_T=pdf_of[utterance.pdf_T])


def _spoken(word: str) -> Iterator[tuple[str, ...]]:
    for phones in labels.TOPOLOGY.lexicon[word]:
        yield tuple(PHONES[phone] for phone in phones)
