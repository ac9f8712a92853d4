"""C and H for tied states: from phones to phones in context, and from those to pdfs.

Contexts with equal pdfs share one input label of C, as after Kaldi's `make-ilabel-transducer`.  C
delays its output by one phone, so an end symbol closes each phone sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ngsgd.asr import extras
from ngsgd.asr.lang.context_tree import EDGE, ContextTree
from ngsgd.errors import DataError

EPSILON = 0


@dataclass
class ContextGraphs:
    """C and H of a tree over triphones or left biphones.

    Attributes:
        tree: phones in context to pdfs.
        num_states: number of HMM states of each phone, from phone 1.
        disambig: symbols on the phone side that pass through C and H.
        end: symbol that closes a phone sequence.
    """

    tree: ContextTree
    num_states: Sequence[int]
    disambig: Sequence[int]
    end: int
    # pdfs of a phone in context, each with its input label of C
    _labels: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if (self.tree.width, self.tree.center) not in ((3, 1), (2, 1)):
            raise DataError(f"The decision tree has windows of {self.tree.width} phones with the "
                            f"center {self.tree.center}; graphs are made for triphones (3, 1) and "
                            "left biphones (2, 1).")

    @cached_property
    def context(self) -> Any:
        """C: labels of phones in context to phones, sorted by output."""
        kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
        phones = range(1, len(self.num_states) + 1)
        fst = kaldifst.StdVectorFst()
        # (left, center) -> state; the center was read and waits for its right neighbor
        states = {pair: fst.add_state()
                  for pair in [(EDGE, EDGE), *itertools.product((EDGE, *phones), phones)]}
        last = fst.add_state()
        fst.start = states[EDGE, EDGE]
        fst.set_final(last, 0.0)
        for (left, center), state in states.items():
            for right in phones:
                label = self._label(left, center, right) if center else EPSILON
                fst.add_arc(state, kaldifst.StdArc(label, right, 0.0, states[center, right]))
            label = self._label(left, center, EDGE) if center else EPSILON
            fst.add_arc(state, kaldifst.StdArc(label, self.end, 0.0, last))
        # labels of disambiguation symbols follow those of the contexts, whose number is known now
        for state in states.values():
            for number, symbol in enumerate(self.disambig):
                label = len(self._labels) + 1 + number
                fst.add_arc(state, kaldifst.StdArc(label, symbol, 0.0, state))
        kaldifst.arcsort(fst, "olabel")
        return fst

    @cached_property
    def states(self) -> Any:
        """H: pdfs + 1 to labels of C, closed under repetition, without self-loops."""
        kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
        _ = self.context
        fst = kaldifst.StdVectorFst()
        fst.start = fst.add_state()
        fst.set_final(fst.start, 0.0)
        for pdfs, label in self._labels.items():
            state, output = fst.start, label
            for pdf in pdfs[:-1]:
                following = fst.add_state()
                fst.add_arc(state, kaldifst.StdArc(pdf + 1, output, 0.0, following))
                state, output = following, EPSILON
            fst.add_arc(state, kaldifst.StdArc(pdfs[-1] + 1, output, 0.0, fst.start))
        for number in range(len(self.disambig)):
            symbols = (self.tree.num_pdfs + 1 + number, len(self._labels) + 1 + number)
            fst.add_arc(fst.start, kaldifst.StdArc(*symbols, 0.0, fst.start))
        kaldifst.arcsort(fst, "olabel")
        return fst

    def _label(self, left: int, center: int, right: int) -> int:
        # trees of left biphones do not ask for the last one
        pdfs = tuple(self.tree.pdf((left, center, right), state)
                     for state in range(self.num_states[center - 1]))
        return self._labels.setdefault(pdfs, len(self._labels) + 1)


def closed(fst: Any, end: int) -> Any:
    """Let every phone sequence of a transducer end with the symbol `end`; sorted by input."""
    kaldifst = extras.load("kaldifst", extra="asr", purpose="Decoding")
    finals = [(state, fst.final(state).value) for state in range(fst.num_states)
              if fst.final(state).value != float("inf")]
    last = fst.add_state()
    for state, cost in finals:
        fst.add_arc(state, kaldifst.StdArc(end, EPSILON, cost, last))
        fst.set_final(state, float("inf"))
    fst.set_final(last, 0.0)
    kaldifst.arcsort(fst, "ilabel")
    return fst
