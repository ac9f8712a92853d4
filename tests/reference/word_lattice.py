"""All paths of a decoding graph through a few frames (T) of P pdfs, one by one; float64."""

from __future__ import annotations

import math
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


def paths(graph: Graph, loglik_TP: npt.NDArray[np.float64],
          acoustic_scale: float) -> list[FullPath]:
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


def confidences(sequences: list[tuple[float, tuple[str, ...]]],
                hypothesis: tuple[str, ...]) -> list[float]:
    """For each word of the hypothesis the probability of all sequences that have it, aligned."""
    least = min(cost for cost, _ in sequences)
    total = sum(math.exp(least - cost) for cost, _ in sequences)
    found = [0.0] * len(hypothesis)
    for cost, words in sequences:
        for number in _agreeing(words, hypothesis):
            found[number] += math.exp(least - cost) / total
    return found


def _agreeing(words: tuple[str, ...], hypothesis: tuple[str, ...]) -> list[int]:
    """The words of the hypothesis that are opposite an equal word."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for i in range(len(words) + 1):
        for j in range(len(hypothesis) + 1):
            ways = [(best[i - 1, j][0] + 1.0, best[i - 1, j][1])] if i else []
            ways += [(best[i, j - 1][0] + 1.0, best[i, j - 1][1])] if j else []
            if i and j:
                is_equal = words[i - 1] == hypothesis[j - 1]
                cost, agreeing = best[i - 1, j - 1]
                ways.append((cost + (not is_equal), [*agreeing, j - 1] if is_equal else agreeing))
            if ways:
                best[i, j] = min(ways, key=lambda way: way[0])
    return best[len(words), len(hypothesis)][1]
