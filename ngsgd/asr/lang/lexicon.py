"""Pronunciation dictionaries: lines "word phone phone ...", one for each pronunciation."""

from __future__ import annotations

import re
from pathlib import Path

from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.lang.topology import SILENCE_PHONE, Pronunciation, Topology
from ngsgd.errors import DataError

# mark of CMU for further pronunciations of a word: A(2)
_VARIANT = re.compile(r"(?<=.)\(\d+\)$")
# in data.source
PLACES = ("lexicon.txt", "dict/lexicon.txt", "local/dict/lexicon.txt", "data/local/dict/lexicon.txt")


def locate(given: str, source: Path) -> Path:
    """Return the file given by data.lexicon, or the one at a usual location in `source`."""
    if given:
        if not Path(given).expanduser().is_file():
            raise DataError(f"data.lexicon is {given}, which is not a file; set it to a file with "
                            "lines \"word phone phone ...\".")
        return Path(given).expanduser()
    for name in PLACES:
        if (source / name).is_file():
            return source / name
    raise DataError(f"{source} contains no {PLACES[0]}; write one with lines \"word phone phone "
                    "...\", or set data.lexicon=FILE.")


def read(path: Path, num_silence_states: int) -> Topology:
    """Read words and phones of the file, phones in alphabetical order.

    Further pronunciations have separate lines, with or without WORD(2).
    """
    lexicon: dict[str, tuple[Pronunciation, ...]] = {}
    for where, line in tables.read_lines(path):
        word, *phones = line.split()
        word = _VARIANT.sub("", word)
        if not phones:
            raise DataError(f"{where}: the word {word} has no phones; write them after it.")
        if tuple(phones) in lexicon.get(word, ()):
            raise DataError(f"{where}: duplicate pronunciation of the word {word}; remove the "
                            "line.")
        lexicon[word] = (*lexicon.get(word, ()), tuple(phones))
    phones_of_words = {phone for all_ in lexicon.values() for phones in all_ for phone in phones} - {SILENCE_PHONE}
    if not phones_of_words:
        raise DataError(f"{path} contains no phones; write lines \"word phone phone ...\".")
    return Topology(tuple(sorted(phones_of_words)), lexicon, num_silence_states)
