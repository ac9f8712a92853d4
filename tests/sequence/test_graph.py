"""Graphs: from transducers with empty arcs, from labels; weights of labellings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch.testing import assert_close

from ngsgd.errors import DataError
from ngsgd.sequence.graph import NOTHING, StateArc, StateGraph, from_arcs
from ngsgd.sequence.ngram import state_ngram
from tests.reference.path_sums import enumerated, paths
from tests.sequence.graphs import random_graph


def test_a_transducer_with_empty_arcs_has_the_same_sum_over_paths() -> None:
    """Every way through the transducer, gone one arc at a time, against the graph."""
    arcs = [StateArc(0, 1, 0, -0.1), StateArc(1, 1, 0, -0.7), StateArc(1, 2, NOTHING, -0.2),
            StateArc(1, 2, 1, -0.3), StateArc(2, 0, NOTHING, -0.4),
            StateArc(2, 3, 2, -0.5), StateArc(3, 3, 2, -0.6), StateArc(3, 2, NOTHING, -0.8),
            StateArc(0, 3, 2, -1.0)]
    log_final = {2: -0.05, 3: -0.15}
    scores_TP = np.random.default_rng(0).normal(size=(5, 3))

    def total(state: int, t: int) -> float:
        found = math.exp(log_final[state]) if t == 5 and state in log_final else 0.0
        for arc in arcs:
            if arc.source == state and arc.pdf == NOTHING:
                found += math.exp(arc.log_weight) * total(arc.target, t)
            elif arc.source == state and t < 5:
                found += math.exp(arc.log_weight + scores_TP[t, arc.pdf]) * total(arc.target, t + 1)
        return found
    graph = from_arcs(arcs, start=0, log_final=log_final)
    assert_close(enumerated(graph, scores_TP, scores_TP)[0], math.log(total(0, 0)), rtol=1e-12, atol=0.0)


def test_a_circle_of_empty_arcs_is_refused() -> None:
    with pytest.raises(DataError, match="cycle"):
        from_arcs([StateArc(0, 1, NOTHING, 0.0), StateArc(1, 0, NOTHING, 0.0)], start=0,
                  log_final={1: 0.0})


def test_the_weight_of_labels_is_that_of_all_their_paths() -> None:
    graph = random_graph(1)
    wanted = [0, 0, 1, 1]
    weights = [log_weight for states, log_weight in paths(graph, 4) if graph.pdf_S[list(states)].tolist() == wanted]
    expected = np.logaddexp.reduce(weights) if weights else -math.inf
    assert_close(graph.log_weight_of(wanted), float(expected), rtol=1e-12, atol=0.0)
    assert math.isinf(StateGraph.log_weight_of(random_graph(1), [7, 7]))


def test_ngrams_are_relative_frequencies_and_sum_to_one() -> None:
    graph = state_ngram([[0, 0, 1, 1, 1, 2], [0, 2, 2]], order=2)
    out = np.exp(graph.log_final_S)
    np.add.at(out, graph.source_A, np.exp(graph.log_weight_A))
    assert_close(out, np.ones(4), rtol=1e-12, atol=0.0)
    by_class = {int(pdf): state for state, pdf in enumerate(graph.pdf_S) if state}
    arcs = {(int(s), int(t)): math.exp(w) for s, t, w in zip(graph.source_A, graph.target_A, graph.log_weight_A, strict=True)}
    # two visits in three frames
    assert_close(arcs[by_class[0], by_class[0]], 1 / 3, rtol=1e-12, atol=0.0)
    # left for 1 in one of two
    assert_close(arcs[by_class[0], by_class[1]], 2 / 3 * 1 / 2, rtol=1e-12, atol=0.0)
    # of 0 0 1 1 1 2: begin, stay, continue, stay twice, continue, end
    expected = math.log(1.0 * 1 / 3 * 1 / 3 * (2 / 3) ** 2 * 1 / 3 * 2 / 3)
    assert_close(graph.log_weight_of([0, 0, 1, 1, 1, 2]), expected, rtol=1e-12, atol=0.0)


def test_longer_histories_tell_more_apart() -> None:
    """After 0 1 comes 2 and after 3 1 comes 0: the bigram allows 0 1 0, the trigram does not."""
    labels = [[0, 1, 2], [3, 1, 0]]
    assert state_ngram(labels, order=2).log_weight_of([0, 1, 0]) > -math.inf
    assert state_ngram(labels, order=3).log_weight_of([0, 1, 0]) == -math.inf
    assert state_ngram(labels, order=3).log_weight_of([3, 1, 0]) > -math.inf


def test_pieces_may_begin_and_end_anywhere() -> None:
    graph = state_ngram([[0, 0, 1, 1, 1, 2]], order=3)
    assert graph.log_weight_of([1, 1]) == -math.inf
    assert graph.anywhere().log_weight_of([1, 1]) > -math.inf


def test_pieces_may_begin_where_sequences_do() -> None:
    """After 0 without a repetition comes 1, so that no state but the start leads to 0."""
    graph = state_ngram([[0, 1, 1, 2]], order=3)
    assert graph.anywhere().log_weight_of([0, 1]) == -math.inf
    assert graph.anywhere(with_start=True).log_weight_of([0, 1]) > -math.inf
    assert_close(np.exp(graph.anywhere(with_start=True).log_initial_S).sum(), 1.0, rtol=1e-12, atol=0.0)
