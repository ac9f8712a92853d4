"""The ARPA format of n-gram models: one reader for all options that name such a file.

A model is checked before kaldilm or kaldifst read it: both end the process on some damaged models.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ngsgd import files, imports
from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import lexicon, openfst
from ngsgd.errors import DataError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_NO_WORDS = (BEGIN, END, UNKNOWN)
_MAX_ORDER = 20
_SECTION = re.compile(r"\\(\d{1,9})-grams:", re.ASCII)
_COUNT = re.compile(r"ngram\s+(\d{1,9})\s*=\s*(\d{1,18})", re.ASCII)
_LARGEST = 1e6  # log probabilities and weights to base 10 are far smaller
# on the input side of the back-off arcs of G, so that HCLG can be determinized
_BACKOFF = "#0"
_ABOVE_ONE = 0.01  # rounding of a probability of 1
_FOREIGN = {
    b"mmap lm http://kheafield.com/code":
        "a binary model of KenLM, which does not contain all of its words; use the ARPA file that it was made from",
    b"\xd6\xfd\xb2\x7e": "a graph of OpenFst; use the ARPA file that it was made from",
}


class Gram(NamedTuple):
    """An n-gram; the numbers are as written, logarithms to base 10."""

    words: tuple[str, ...]
    log_prob: str
    backoff: str  # empty: none


def read(path: Path, of_lexicon: Sequence[str], report: Callable[[str], None], effect: str = "cannot be recognized") -> str:
    """Read a language model, plain or gzip-compressed, from `\\data\\` to `\\end\\`.

    `report` receives a line, with the `effect`, if it lacks words of the lexicon. Raises DataError
    if the file cannot be read, is not such a model, or has none of the words.
    """
    try:
        with files.open_regular(path) as file:
            head = file.peek(64)
    except OSError as error:
        raise DataError(f"the language model {path} cannot be read ({error.strerror}); use a text file "
                        "in ARPA format.") from error
    if kind := next((kind for magic, kind in _FOREIGN.items() if head.startswith(magic)), None):
        raise DataError(f"the language model {path} is {kind}.")
    reader = Reader(f"{path}")
    text = "".join(f"{line}\n" for line, _ in reader.entries(lines.read(path)))
    lexicon.require_shared(of_lexicon, reader.unigrams - {BEGIN, END}, f"{path}", report, effect)
    return text


def words(text: str) -> set[str]:
    """Return the words of a model, without sentence marks."""
    reader = Reader()
    for _ in reader.grams(text):
        pass
    return reader.unigrams - {BEGIN, END}


def with_words(text: str, added: Iterable[str]) -> str:
    """Return the model with the probability of its rarest word for each word that it lacks."""
    entries = [*Reader().grams(text)]
    unigrams = {gram.words[0]: gram.log_prob for _, gram in entries if gram and len(gram.words) == 1}
    if not (missing := sorted({*added} - unigrams.keys())):
        return text
    rarest = min((log_prob for word, log_prob in unigrams.items() if word not in _NO_WORDS), key=float)
    changed = []
    for line, gram in entries:
        section, count = (None, None) if gram else (_SECTION.fullmatch(line), _COUNT.fullmatch(line))
        is_of_words = count is not None and int(count[1]) == 1
        changed.append(f"ngram 1={len(unigrams) + len(missing)}" if is_of_words else line)
        if section and int(section[1]) == 1:
            changed += [f"{rarest}\t{word}" for word in missing]
    return "\n".join([*changed, ""])


class Reader:
    """Reads the lines of a model and checks them."""

    def __init__(self, name: str = "the language model") -> None:
        self.order = 0  # of the longest n-grams with a section
        self.unigrams: set[str] = set()
        self._name, self._section, self._is_finished = name, 0, False
        self._counts: dict[int, int] = {}
        self._found: dict[int, int] = {}
        self._hashes = array("q")

    def entries(self, numbered: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Gram | None]]:
        """Yield each line from `\\data\\` to `\\end\\`, with its n-gram if it has one; sentence
        marks become lower case. Raises DataError for a damaged or incomplete text, or wrong counts.
        """
        has_begun = False
        for where, line in numbered:
            # other text may come first, even with examples of sections
            has_begun = has_begun or line == "\\data\\"
            if has_begun:
                yield line, self._accept(where, line)
            if self._is_finished:
                break
        self._finish()

    def grams(self, text: str) -> Iterator[tuple[str, Gram | None]]:
        """Yield as `entries` for a text."""
        stripped = ((f"{self._name}, line {number}", line.strip(" \t\r"))
                    for number, line in enumerate(text.split("\n"), start=1))
        return self.entries((where, line) for where, line in stripped if line)

    def _accept(self, where: str, line: str) -> Gram | None:
        if line == "\\end\\" or (line == "\\data\\" and not self._counts):
            self._end_section()
            self._is_finished = line == "\\end\\"
        elif section := _SECTION.fullmatch(line):
            self._end_section()
            order = int(section[1])
            if order <= self.order or order not in self._counts:
                raise self._error(where, f"the section of {order}-grams is repeated, not in order, or has no count")
            self._section = self.order = order
            self._found[order] = 0
        elif self._section:
            return self._gram(line, where)
        elif count := _COUNT.fullmatch(line):
            self._counts[int(count[1])] = int(count[2])
        else:
            raise self._error(where, f"{line[:40]!r} is not a line \"ngram N=count\"")
        return None

    def _finish(self) -> None:
        if not self._counts:
            raise self._error(self._name, "it has no section \\data\\ with counts")
        if not self._is_finished:
            raise self._error(self._name, "it has no \\end\\, so it is truncated")
        if (order := max(self._counts)) > _MAX_ORDER or sorted(self._counts) != list(range(1, order + 1)):
            raise self._error(self._name, f"its orders are not 1 to at most {_MAX_ORDER}")
        for order, count in self._counts.items():
            if self._found.get(order, 0) != count:
                raise self._error(self._name, f"it has {self._found.get(order, 0)} {order}-grams, but "
                                              f"\"ngram {order}={count}\"")
        for mark in (BEGIN, END):
            if mark not in self.unigrams:
                raise self._error(self._name, f"it has no unigram {mark}")

    def _end_section(self) -> None:
        hash_N = np.sort(np.array(self._hashes, np.int64))
        if (hash_N[1:] == hash_N[:-1]).any():
            raise self._error(self._name, f"two of its {self._section}-grams are equal")
        self._hashes, self._section = array("q"), 0

    def _gram(self, line: str, where: str) -> Gram:
        fields, order = line.split(), self._section
        if not order + 1 <= len(fields) <= order + 2:
            raise self._error(where, f"{len(fields)} fields in a section of {order}-grams")
        words = tuple(word.lower() if word.lower() in (BEGIN, END) else word for word in fields[1:order + 1])
        try:
            numbers = [lines.as_float(field) for field in (fields[0], *fields[order + 1:])]
        except ValueError as error:
            raise self._error(where, f"{error}") from error
        if max(map(abs, numbers)) > _LARGEST or numbers[0] > _ABOVE_ONE:
            raise self._error(where, "the number is not a log probability or a weight")
        if order == 1:
            self.unigrams.add(words[0])
        self._found[order] += 1
        self._hashes.append(hash(words))
        # the longest n-grams are no histories
        has_weight = len(fields) > order + 1 and order < max(self._counts)
        return Gram(words, fields[0], fields[order + 1] if has_weight else "")

    def _error(self, where: str, reason: str) -> DataError:
        return DataError(f"{where}: {reason}; use a complete model in ARPA format.")


_ARPA_TO_FST = """
import sys, kaldilm
model, table, symbol, output = sys.argv[1:]
text = kaldilm.arpa2fst(input_arpa=model, disambig_symbol=symbol, read_symbol_table=table,
                        max_arpa_warnings=0)
open(output, "w", encoding="utf-8").write(text)
"""


def acceptor(text: str, labels: Mapping[str, int]) -> Any:
    """Build G of a model as kaldifst.StdVectorFst, without n-grams of words that have no label."""
    imports.load("kaldilm", extra="asr", purpose="A graph from an ARPA file")
    # numbers as words: no word of the lexicon can be taken for one of the other symbols
    names = {**{word: str(label) for word, label in labels.items()}, BEGIN: BEGIN, END: END}
    symbols = ["<eps>", *map(str, labels.values()), _BACKOFF, BEGIN, END]
    with tempfile.TemporaryDirectory() as folder:
        model, table, graph = (Path(folder) / name for name in ("lm.arpa", "words.txt", "G.txt"))
        with model.open("w", encoding="utf-8") as file:
            for line, gram in Reader().grams(text):
                words = " ".join(names.get(word, UNKNOWN) for word in gram.words) if gram else ""
                fields = (gram.log_prob, words, gram.backoff) if gram else (line,)
                file.write("\t".join(field for field in fields if field) + "\n")
        table.write_text("".join(f"{symbol} {number}\n" for number, symbol in enumerate(symbols)), encoding="utf-8")
        # kaldilm ends the process on some invalid files
        command = [sys.executable, "-P", "-c", _ARPA_TO_FST, str(model), str(table), _BACKOFF, str(graph)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            # the line that kaldilm marks as an error, else the last one
            said = [one.strip() for one in done.stderr.splitlines() if one.strip()]
            marked = next((one for one in said if one.startswith("[E]")), (said or ["kaldilm could not read it"])[-1])
            reason = "".join(char if char.isprintable() else "?" for char in marked)[:200]
            raise DataError(f"The language model is not in ARPA format ({reason}); check the file.")
        text = graph.read_text(encoding="utf-8")
    return openfst.toolkit().compile(text)
