"""Best paths of many utterances at once through graphs of their transcripts (Viterbi).

The graphs of a batch are parts of one graph, so that one array operation per frame advances all of
them. No path is pruned. B utterances, T frames, S states of all graphs, A arcs, L pdfs of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.lang import graphs
from ngsgd.asr.utterance import PdfIds
from ngsgd.sequence.graph import StateArc, StateGraph, from_arcs

Scores = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# bounds memory: frames of the longest utterance times the states of all
MOST_CELLS = 1 << 23


@dataclass(frozen=True)
class TranscriptGraph:
    """States of a transcript, whose `graph.pdf_S` are columns of `pdf_L`."""

    graph: StateGraph
    pdf_L: Ints

    @classmethod
    def of(cls, graph: graphs.Graph) -> TranscriptGraph:
        """Remove epsilon arcs, and number the pdfs of the graph from 0."""
        arcs = (StateArc(arc.source, arc.target, arc.input - 1, -arc.cost) for arc in graphs.arcs(graph))
        states = from_arcs(arcs, start=graph.fst.start, log_final=graphs.log_finals(graph))
        pdf_L, column_S = np.unique(states.pdf_S, return_inverse=True)
        return cls(replace(states, pdf_S=column_S), pdf_L)


def batches(sizes: Iterable[tuple[int, int]]) -> Iterator[range]:
    """Group consecutive utterances, given by numbers of frames and states, whose tables fit."""
    begin = end = longest = total = 0
    for num_frames, num_states in sizes:
        longest, total = max(longest, num_frames), total + num_states
        if end > begin and longest * total > MOST_CELLS:
            yield range(begin, end)
            begin, longest, total = end, num_frames, num_states
        end += 1
    if end > begin:
        yield range(begin, end)


def best_paths(transcripts: Sequence[TranscriptGraph], scores: Sequence[Scores]) -> list[tuple[PdfIds, float]]:
    """Return pdfs and score of the best path of each utterance, minus infinity without a path.

    `scores` are T x L log-likelihoods of the pdfs of a graph. Weights of arcs and of the ends are
    added. A result does not depend on the other utterances.
    """
    order = sorted(range(len(scores)), key=lambda u: -len(scores[u]))
    search = _Search([transcripts[u].graph for u in order], [scores[u] for u in order])
    found = dict(zip(order, search.paths(), strict=True))
    return [(transcripts[u].pdf_L[found[u][0]].astype(np.int32), found[u][1]) for u in range(len(scores))]


class _Search:
    """Tables of a batch, whose longest utterances are first."""

    def __init__(self, parts: Sequence[StateGraph], scores: Sequence[Scores]) -> None:
        self._parts, self._num_frames_B = parts, np.array([len(loglik_TL) for loglik_TL in scores])
        self._first_B = np.cumsum([0, *(graph.num_states for graph in parts)])
        self._column_S = np.concatenate([graph.pdf_S for graph in parts])
        num_states = len(self._column_S)
        ends = [(graph.source_A + first, graph.target_A + first, graph.log_weight_A)
                for graph, first in zip(parts, self._first_B[:-1], strict=True)]
        # a start has no arc, and the maximum over the arcs of a state needs one
        starts = [(first, first, -np.inf) for first in self._first_B[:-1]]
        source_A, target_A, weight_A = (np.concatenate([*column, added]) for column, added in zip(
            zip(*ends, strict=True), zip(*starts, strict=True), strict=True))
        order_A = np.argsort(target_A, kind="stable")
        self._source_A, self._weight_A = source_A[order_A], weight_A[order_A].astype(np.float32)
        self._arc_S = np.searchsorted(target_A[order_A], np.arange(num_states + 1))
        # a state reads the scores of its utterance and column from one vector of all
        widths_B = np.array([loglik_TL.shape[1] for loglik_TL in scores])
        begin_B = np.cumsum([0, *(loglik_TL.size for loglik_TL in scores[:-1])])
        part_S = np.repeat(np.arange(len(parts)), np.diff(self._first_B))
        self._width_S, self._place_S = widths_B[part_S], begin_B[part_S] + self._column_S
        self._scores = np.concatenate([loglik_TL.ravel() for loglik_TL in scores])

    def _num_active(self, frame: int) -> int:
        """The number of utterances that are longer than `frame` frames."""
        return int(np.searchsorted(-self._num_frames_B, -frame, side="left"))

    def paths(self) -> list[tuple[Ints, float]]:
        """Return columns and score of the best path of each utterance."""
        best = [np.concatenate([graph.log_initial_S for graph in self._parts]).astype(np.float32)]
        for frame in range(self._num_frames_B[0]):
            num_states = self._first_B[self._num_active(frame)]
            num_arcs = self._arc_S[num_states]
            into_A = best[-1][self._source_A[:num_arcs]] + self._weight_A[:num_arcs]
            best_S = np.maximum.reduceat(into_A, self._arc_S[:num_states])
            best_S += self._scores[self._place_S[:num_states] + frame * self._width_S[:num_states]]
            best.append(best_S)
        return self._traced(best)

    def _traced(self, best: Sequence[Scores]) -> list[tuple[Ints, float]]:
        num_arcs_S = np.diff(self._arc_S)
        # arcs of each state, the last of them repeated
        arc_SK = self._arc_S[:-1, None] + np.minimum(np.arange(num_arcs_S.max()), num_arcs_S[:, None] - 1)
        path_BT = np.zeros((len(self._parts), self._num_frames_B[0]), np.int64)
        state_B, score_B = np.zeros(len(self._parts), np.int64), np.zeros(len(self._parts))
        num_known = 0
        for frame in range(self._num_frames_B[0], 0, -1):
            num_active = self._num_active(frame - 1)
            for u in range(num_known, num_active):
                first, end = self._first_B[u:u + 2]
                end_S = best[frame][first:end] + self._parts[u].log_final_S
                state_B[u], score_B[u] = first + end_S.argmax(), end_S.max()
            num_known = num_active
            path_BT[:num_active, frame - 1] = self._column_S[state_B[:num_active]]
            arc_BK = arc_SK[state_B[:num_active]]
            into_BK = best[frame - 1][self._source_A[arc_BK]] + self._weight_A[arc_BK]
            chosen_B = np.take_along_axis(arc_BK, into_BK.argmax(axis=1)[:, None], axis=1)[:, 0]
            state_B[:num_active] = self._source_A[chosen_B]
        return [(path_BT[u, :length], float(score_B[u])) for u, length in enumerate(self._num_frames_B)]
