"""The best word sequence through a word loop, by dynamic programming over every state and frame; no
beam, no graph tool.

Letters: T frames, P pdfs, S states. States are listed one after the other: silence first, then each
spelling's pdfs from left to right.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr.lang.topology import SILENCE_PDF, Topology


class State(NamedTuple):
    pdf: int
    word: str        # "" in silence
    is_first: bool
    is_last: bool


class Path(NamedTuple):
    cost: float
    words: tuple[str, ...]


DEAD = Path(math.inf, ())


def states_of(topology: Topology) -> list[State]:
    states = [State(SILENCE_PDF, "", is_first=True, is_last=True)]
    for word, pdfs in topology.spellings():
        states += [State(pdf, word, is_first=i == 0, is_last=i == len(pdfs) - 1) for i, pdf in enumerate(pdfs)]
    return states


def best_path(topology: Topology, loglik_TP: npt.NDArray[np.floating], *, acoustic_scale: float, word_penalty: float) -> Path:
    """The cheapest path that ends at a word end or in silence."""
    states = states_of(topology)
    word_cost = math.log(len(topology.lexicon)) + word_penalty
    paths = [DEAD] * len(states)
    at_loop = Path(0.0, ())
    for loglik_P in loglik_TP:
        reached = []
        for s, state in enumerate(states):
            candidates = [paths[s]]
            if state.is_first:
                candidates.append(_enter(at_loop, state, word_cost))
            else:
                candidates.append(paths[s - 1])
            best = min(candidates)
            reached.append(Path(best.cost - acoustic_scale * float(loglik_P[state.pdf]), best.words))
        paths = reached
        at_loop = min(path for path, state in zip(paths, states, strict=True) if state.is_last)
    return at_loop


def _enter(at_loop: Path, state: State, word_cost: float) -> Path:
    if not state.word:
        return at_loop
    return Path(at_loop.cost + word_cost, (*at_loop.words, state.word))
