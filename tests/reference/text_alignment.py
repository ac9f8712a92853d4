"""Alignment of a text by trying every sequence of phones, without a graph tool.

A path is a sequence of units. Each unit takes its HMM states in order. The cost of a path is that
of its frames and of its deviations from the text. Float64. Letters: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Span(NamedTuple):
    """A phone ("": garbage), the position of its word (None: between words), its frames."""

    phone: str
    word: int | None
    first: int
    end: int


States = Callable[[str, str, str], Sequence[int]]  # phone with its neighbors ("": edge) -> pdfs


def best(spellings: Sequence[Sequence[tuple[str, ...]]], states: States, score_TP: npt.NDArray[np.float64], *,
         garbage_pdf: int, skip: float, garbage: float, silence: str = "SIL") -> tuple[float, list[Span]]:
    """The cost and the spans of the best path; `spellings` of each word, none of unknown words.

    At most one garbage between two words, with optional silence around it.
    """
    gaps = [((), 0.0), ((silence,), 0.0), (("",), garbage), ((silence, ""), garbage), (("", silence), garbage),
            ((silence, "", silence), garbage)]
    ways = []
    for at, of_word in enumerate(spellings):
        spoken = [(tuple((phone, at) for phone in one), 0.0) for one in of_word]
        ways.append([*spoken, ((), skip)] if of_word else [((("", at),), 0.0)])
    between = [(tuple((phone, None) for phone in one), cost) for one, cost in gaps]
    results = []
    for choice in itertools.product(between, *(one for way in ways for one in (way, between))):
        units = [unit for part, _ in choice for unit in part]
        phones = ["", *(phone for phone, _ in units), ""]
        pdfs, owner = list[int](), list[int]()
        for number in range(len(units)):
            found = states(*phones[number:number + 3]) if phones[number + 1] else (garbage_pdf,)
            pdfs += found
            owner += [number] * len(found)
        cost, state_T = _forced(pdfs, score_TP)
        if cost < math.inf:
            unit_T = [owner[state] for state in state_T]
            spans = [Span(*units[number], unit_T.index(number), len(unit_T) - unit_T[::-1].index(number))
                     for number in range(len(units))]
            results.append((cost + sum(extra for _, extra in choice), spans))
    return min(results, key=lambda one: one[0])


def _forced(pdfs: Sequence[int], score_TP: npt.NDArray[np.float64]) -> tuple[float, list[int]]:
    """The cost and the state of each frame of the best path through these states in order."""
    num_frames = len(score_TP)

    if not pdfs or len(pdfs) > num_frames:
        return math.inf, []
    cost_S = np.full(len(pdfs), math.inf)
    cost_S[0] = -score_TP[0, pdfs[0]]
    moved_TS = np.zeros((num_frames, len(pdfs)), bool)
    for t in range(1, num_frames):
        from_S = np.concatenate([[math.inf], cost_S[:-1]])
        moved_TS[t] = from_S < cost_S
        cost_S = np.minimum(from_S, cost_S) - score_TP[t, list(pdfs)]
    state_T = [len(pdfs) - 1]
    for t in range(num_frames - 1, 0, -1):
        state_T.append(state_T[-1] - int(moved_TS[t, state_T[-1]]))
    return float(cost_S[-1]), state_T[::-1]
