"""Hotwords: phrases, such as names, that decoding prefers with any grammar or language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import openfst
from ngsgd.errors import DataError

HOTWORDS = "hotwords.txt"
BONUS_PER_WORD, MAX_BONUS = 3.0, 100.0

EPSILON = 0
Phrase = tuple[str, ...]
Labels = tuple[int, ...]


@dataclass(frozen=True)
class Hotwords:
    """Bonuses of phrases in nats: a path with a phrase costs so much less."""

    bonuses: Mapping[Phrase, float]

    def words(self) -> tuple[str, ...]:
        """All words of all phrases, sorted."""
        return tuple(sorted({word for phrase in self.bonuses for word in phrase}))

    def to_text(self) -> str:
        """Return lines that `parse` reads."""
        return "".join(f"{' '.join(phrase)} :{bonus!r}\n" for phrase, bonus in self.bonuses.items())

    def apply(self, acceptor: Any, labels: Mapping[str, int]) -> Any:
        """Return a kaldifst.StdVectorFst of the same word sequences with the bonuses.

        The state of a path is the longest end of its words that begins a phrase. Each word of a
        phrase gives its part of the bonus at once, so that pruning keeps the phrase. An arc of
        back-off, as in `arpa.acceptor`, leaves the phrase and takes these parts back.
        """
        bonuses = {tuple(labels[word] for word in phrase): bonus for phrase, bonus in self.bonuses.items()}
        # the bonus so far of each beginning of a phrase
        given: dict[Labels, float] = {(): 0.0}
        for phrase, bonus in bonuses.items():
            for length in range(1, len(phrase)):
                given[phrase[:length]] = max(given.get(phrase[:length], 0.0), bonus * length / len(phrase))
        # beginning -> next word -> the beginning after it, and its cost
        steps: dict[Labels, dict[int, tuple[Labels, float]]] = {begun: {} for begun in given}
        for *before, label in {*bonuses, *given} - {()}:
            begun, ends = tuple(before), _ends((*before, label))
            after = next(end for end in ends if end in given)
            steps[begun][label] = after, given[begun] - given[after] - sum(bonuses.get(end, 0.0) for end in ends)
        kaldifst = openfst.toolkit()
        # these loops run for every arc of a language model, up to millions of times
        new_arc, fst, backoff, none = kaldifst.StdArc, kaldifst.StdVectorFst(), len(labels) + 1, ((), 0.0)
        found: dict[int, dict[int, list[Any]]] = {}
        first: tuple[int, Labels] = (acceptor.start, ())
        numbers, todo = {first: fst.add_state()}, [first]
        fst.start = numbers[first]

        def add(source: int, label: int, cost: float, target: tuple[int, Labels]) -> None:
            if target not in numbers:
                numbers[target] = fst.add_state()
                todo.append(target)
            fst.add_arc(source, new_arc(label, label if label < backoff else EPSILON, cost, numbers[target]))
        while todo:
            state, begun = todo.pop()
            source = numbers[state, begun]
            fst.set_final(source, acceptor.final(state).value + given[begun])
            if state not in found:
                found[state] = {}
                for arc in kaldifst.ArcIterator(acceptor, state):
                    found[state].setdefault(arc.ilabel, []).append(arc)
            # an arc of back-off or without a word changes nothing
            for label in (EPSILON, backoff, *steps[begun]) if begun else found[state]:
                after, cost = steps[begun].get(label, none) if 0 < label < backoff else (begun, 0.0)
                for arc in found[state].get(label, ()):
                    add(source, label, arc.weight.value + cost, (arc.nextstate, after))
            if begun:
                shorter = next(end for end in _ends(begun)[1:] if end in given)
                add(source, backoff, given[begun] - given[shorter], (state, shorter))
        return fst


def _ends(labels: Labels) -> list[Labels]:
    """All ends of a sequence, the longest first, down to the empty one."""
    return [labels[at:] for at in range(len(labels) + 1)]


def read(path: Path) -> Hotwords:
    """Read a file of phrases; see `parse`."""
    return parse(lines.read(path), f"{path}")


def parse(numbered: Iterable[tuple[str, str]], name: str) -> Hotwords:
    """Parse (place, line) pairs: the words of a phrase, and perhaps `:NUMBER`, its bonus in nats.

    Raises DataError if there are no lines, or one has no words, a wrong bonus, or a former phrase.
    """
    bonuses: dict[Phrase, float] = {}
    for where, line in numbered:
        *phrase, last = line.split()
        if not last.startswith(":"):
            phrase, last = [*phrase, last], f":{BONUS_PER_WORD * (len(phrase) + 1)}"
        try:
            bonus = lines.as_float(last[1:])
        except ValueError as error:
            raise DataError(f"{where}: {error}; write a bonus in nats after the colon.") from error
        if not phrase or not 0.0 < bonus <= MAX_BONUS:
            raise DataError(f"{where}: {line[:40]!r} is no phrase with a bonus; write WORD ... or WORD ... :NUMBER, above 0 and "
                            f"at most {MAX_BONUS:g}.")
        if tuple(phrase) in bonuses:
            raise DataError(f"{where}: the phrase {' '.join(phrase)} is repeated; remove one of the lines.")
        bonuses[tuple(phrase)] = bonus
    if not bonuses:
        raise DataError(f"{name} contains no phrases; write one per line.")
    return Hotwords(bonuses)
