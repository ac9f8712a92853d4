"""Pronunciation dictionaries: lines "word phone phone ...", one for each pronunciation.

Those of Kaldi, MFA (columns of numbers) and CMU (comments) are read; probabilities are not used.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang.topology import SILENCE_PHONE, Pronunciation, Topology
from ngsgd.counting import counted
from ngsgd.errors import DataError, warn

_VARIANT = re.compile(r"(?<=.)\(\d+\)$")  # mark of CMU for further pronunciations of a word: A(2)
_COMMENTS, _REST = (";;;", "##"), "#"  # comments of CMU: lines, and the rest of a line
_NUMBER = re.compile(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?", re.ASCII)
_NAMES = ("lexicon.txt", "lexiconp.txt")  # in data.source
PLACES = tuple(f"{folder}{name}" for name in _NAMES for folder in ("", "dict/", "local/dict/", "data/local/dict/"))
_NUM_SHOWN = 10

Entry = tuple[str, str, Pronunciation]  # where, word, phones


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


def read(path: Path, num_silence_states: int, report: Callable[[str], None] = warn) -> Topology:
    """Read words and phones of the file, phones in alphabetical order.

    `report` receives a line if probabilities are omitted (default: a warning). Raises DataError if
    a line has no phones, is a duplicate, or has a number or a comment as phone.
    """
    lexicon: dict[str, tuple[Pronunciation, ...]] = {}
    for where, word, phones in _without_probabilities(list(_entries(path)), path, report):
        if phones in lexicon.get(word, ()):
            raise DataError(f"{where}: duplicate pronunciation of the word {word}; remove the line.")
        lexicon[word] = (*lexicon.get(word, ()), phones)
    phones_of_words = {phone for all_ in lexicon.values() for phones in all_ for phone in phones} - {SILENCE_PHONE}
    if not phones_of_words:
        raise DataError(f"{path} contains no phones; write lines \"word phone phone ...\".")
    return Topology(tuple(sorted(phones_of_words)), lexicon, num_silence_states)


def _entries(path: Path) -> Iterator[Entry]:
    for where, line in lines.read(path):
        if line.startswith(_COMMENTS):
            continue
        word, *phones = line.split()
        phones = phones[:phones.index(_REST)] if _REST in phones else phones
        if not phones or word == _REST:
            raise DataError(f"{where}: the word {word} has no phones; write them after it, or remove the line.")
        if marked := [phone for phone in phones if phone.startswith(_REST)]:
            raise DataError(f"{where}: {marked[0]} of the word {word} is a comment or a disambiguation "
                            "symbol, and not a phone; remove it.")
        yield where, _VARIANT.sub("", word), tuple(phones)


def _without_probabilities(entries: Sequence[Entry], path: Path, report: Callable[[str], None]) -> list[Entry]:
    """Remove the leading columns that are numbers in every line."""
    num_columns = 0
    # a dictionary may number its phones
    if not all(phone.isdecimal() for _, _, phones in entries for phone in phones):
        while entries and _is_probability([phones[num_columns:] for _, _, phones in entries]):
            num_columns += 1
    if num_columns:
        report(f"{path}: the first {num_columns} field(s) after each word are numbers, and are not "
               "used: all pronunciations of a word have the same probability")
    kept = [(where, word, phones[num_columns:]) for where, word, phones in entries]
    for where, word, phones in kept:
        if numbers := [phone for phone in phones if _NUMBER.fullmatch(phone) and not phone.isdecimal()]:
            raise DataError(f"{where}: the word {word} has the number {numbers[0]} as a phone; give "
                            "every line the same number of probabilities, or none.")
    return kept


def _is_probability(rest: Sequence[Pronunciation]) -> bool:
    """Whether the first field is a number in every line, with phones after it."""
    if not all(len(fields) > 1 and _NUMBER.fullmatch(fields[0]) for fields in rest):
        return False
    values = {fields[0] for fields in rest}
    # digits from 2 to 9 are phones of X-SAMPA
    return values <= {"0", "1"} or any(len(value) > 1 for value in values)


def alike(word: str, known: Iterable[str]) -> str:
    """Remark on a known word that differs in composed or invisible characters or case, or empty."""
    def visible(text: str) -> str:
        shown = (char for char in text if unicodedata.category(char) != "Cf")
        return unicodedata.normalize("NFC", "".join(shown))

    def folded(text: str) -> str:
        return unicodedata.normalize("NFKC", visible(text)).casefold()
    same = folded(word)
    twin = next((one for one in known if one != word and folded(one) == same), None)
    if twin is None:
        return ""
    if visible(word) != visible(twin):
        return f" ({twin} is, in other letters)"
    codes, of_twin = (" ".join(f"U+{ord(char):04X}" for char in text) for text in (word, twin))
    return f" ({codes}; {of_twin} looks the same)"


def require_shared(words: Sequence[str], known: Collection[str], source: str,
                   report: Callable[[str], None], effect: str = "cannot be recognized") -> None:
    """Compare the words of the lexicon with those of a language model or graph `source`. `report`
    receives a line, with the `effect`, if some are missing; DataError if none is known.
    """
    missing = [word for word in words if word not in known]
    if len(missing) == len(words):
        raise DataError(f"{source} has none of the {len(words)} words of the lexicon, such as "
                        f"{words[0]}{alike(words[0], known)}; use a lexicon and a language model of "
                        "one task, in the same case and form of Unicode.")
    if missing:
        report(f"{len(missing)} of {counted(len(words), 'word')} of the lexicon are not in {source} "
               f"and {effect}: {listed(missing)}")


def listed(words: Sequence[str]) -> str:
    """Return the first words, and the number of the others."""
    more = f" and {len(words) - _NUM_SHOWN} more" if len(words) > _NUM_SHOWN else ""
    return " ".join(words[:_NUM_SHOWN]) + more


# If a language model gives homophones the same probability, their paths have equal costs, and the
# order of the search or rounding decides. The costs here decide for the word that is more frequent
# in the training transcripts. They are about 0.01 at most and rarely change another decision.
# share of the negative log probability in the training transcripts
_HOMOPHONE_SCALE = 1e-3


def count_words(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the number of occurrences of each word, sorted by word."""
    return dict(sorted(Counter(word for words in texts for word in words).items()))


def homophone_costs(lexicon: Mapping[str, Iterable[Sequence[str]]], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the cost of each word that shares a pronunciation with another word.

    It is a thousandth of the negative log probability of the word in the training transcripts, with
    one added to each of its `counts`; without counts no word has a cost.
    >>> a, o = ("EY",), ("OW",)
    >>> found = homophone_costs({"A": [a], "O": [o], "OH": [o]}, {"A": 9, "O": 6, "OH": 2})
    >>> {word: round(cost, 6) for word, cost in found.items()}
    {'O': 0.00105, 'OH': 0.001897}
    """
    if not counts:
        return {}
    words_of: dict[tuple[str, ...], dict[str, None]] = {}
    for word, pronunciations in lexicon.items():
        for phones in pronunciations:
            words_of.setdefault(tuple(phones), {})[word] = None
    log_total = math.log(sum(counts.values()) + len(lexicon))
    shared = dict.fromkeys(word for words in words_of.values() if len(words) > 1 for word in words)
    return {word: _HOMOPHONE_SCALE * (log_total - math.log(counts.get(word, 0) + 1)) for word in shared}
