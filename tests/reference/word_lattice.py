"""All paths of a decoding graph through a few frames, one by one; float64.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.graphs import Graph


class FullPath(NamedTuple):
    """Cost, pdf of each frame, and (frames before it, word) of each emitted word."""

    cost: float
    pdfs: tuple[int, ...]
    words: tuple[tuple[int, str], ...]


def paths(
    graph: Graph, loglik_TP: npt.NDArray[np.float64], acoustic_scale: float
) -> list[FullPath]:
    """Every path that ends in a final state."""
    arcs: dict[int, list[graphs.Arc]] = {}
    for arc in graphs.arcs(graph):
        arcs.setdefault(arc.source, []).append(arc)
    log_finals = graphs.log_finals(graph)

    def walk(state: int, path: FullPath) -> Iterator[FullPath]:
        t = len(path.pdfs)
        if t == len(loglik_TP) and state in log_finals:
            yield path._replace(cost=path.cost - log_finals[state])
        for arc in arcs.get(state, ()):
            if arc.input and t == len(loglik_TP):
                continue
            acoustic = -acoustic_scale * float(loglik_TP[t, arc.input - 1]) if arc.input else 0.0
            yield from walk(
                arc.target,
                FullPath(
                    path.cost + arc.cost + acoustic,
                    (*path.pdfs, arc.input - 1) if arc.input else path.pdfs,
                    (*path.words, (t, graph.words[arc.output - 1])) if arc.output else path.words,
                ),
            )

    return list(walk(graph.fst.start, FullPath(0.0, (), ())))


def best_sequences(found: list[FullPath]) -> list[tuple[float, tuple[str, ...]]]:
    """The cost of the best path of each word sequence, best first."""
    best: dict[tuple[str, ...], float] = {}
    for path in found:
        words = tuple(word for _, word in path.words)
        best[words] = min(best.get(words, math.inf), path.cost)
    return sorted((cost, words) for words, cost in best.items())


def posteriors(found: list[FullPath]) -> dict[tuple[int, str], float]:
    """(frame, word) -> probability that a path emits the word there."""
    least = min(path.cost for path in found)
    total = sum(math.exp(least - path.cost) for path in found)
    sums: defaultdict[tuple[int, str], float] = defaultdict(float)
    for path in found:
        for event in path.words:
            sums[event] += math.exp(least - path.cost) / total
    return sums
