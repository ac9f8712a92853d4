"""Graphs: from transducers with empty arcs, from labels and units; weights of labellings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch.testing import assert_close

from ngsgd.errors import DataError
from ngsgd.sequence.graph import NOTHING, StateArc, StateGraph, from_arcs
from ngsgd.sequence.ngram import UnitFrames, state_ngram, unit_ngram
from tests.reference import chains as reference
from tests.reference.path_sums import enumerated, paths
from tests.sequence.graphs import random_graph


def test_a_transducer_with_empty_arcs_has_the_same_sum_over_paths() -> None:
    """Every way through the transducer, gone one arc at a time, against the graph."""
    arcs = [StateArc(0, 1, 0, -0.1), StateArc(1, 1, 0, -0.7), StateArc(1, 2, NOTHING, -0.2),
            StateArc(1, 2, 1, -0.3), StateArc(2, 0, NOTHING, -0.4), StateArc(2, 3, 2, -0.5),
            StateArc(3, 3, 2, -0.6), StateArc(3, 2, NOTHING, -0.8), StateArc(0, 3, 2, -1.0)]
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
    expected = np.logaddexp.reduce([-math.inf, *weights])
    assert_close(graph.log_weight_of(wanted), float(expected), rtol=1e-12, atol=0.0)
    assert math.isinf(StateGraph.log_weight_of(random_graph(1), [7, 7]))


def assert_sums_to_one(graph: StateGraph) -> None:
    """The ways out of each state."""
    out = np.exp(graph.log_final_S)
    np.add.at(out, graph.source_A, np.exp(graph.log_weight_A))
    assert_close(out, np.ones(graph.num_states), rtol=1e-12, atol=0.0)


def test_ngrams_are_relative_frequencies_and_sum_to_one() -> None:
    graph = state_ngram([[0, 0, 1, 1, 1, 2], [0, 2, 2]], order=2)
    assert_sums_to_one(graph)
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


def test_pieces_may_begin_and_end_anywhere_and_where_sequences_do() -> None:
    graph = state_ngram([[0, 0, 1, 1, 1, 2]], order=3)
    assert graph.log_weight_of([1, 1]) == -math.inf < graph.anywhere().log_weight_of([1, 1])
    # after 0 without a repetition comes 1, so that no state but the start leads to 0
    graph = state_ngram([[0, 1, 1, 2]], order=3)
    from_start = graph.anywhere(with_start=True)
    assert graph.anywhere().log_weight_of([0, 1]) == -math.inf < from_start.log_weight_of([0, 1])
    assert_close(np.exp(from_start.log_initial_S).sum(), 1.0, rtol=1e-12, atol=0.0)


def frames(spelled: str) -> reference.Frames:
    """"1:001 2:0" is unit 1 with states 0, 0 and 1, then unit 2 with state 0."""
    return [(occurrence, int(unit), int(state)) for occurrence, one in enumerate(spelled.split())
            for unit, states in [one.split(":")] for state in states]


def class_of(left: int, unit: int, state: int) -> int:
    return 10 * (3 * unit + state) + left


def labels(one: reference.Frames) -> list[int]:
    units = [0, *(unit for _, unit, _ in one)]
    starts = [at for at, frame in enumerate(one) if at == 0 or frame[0] != one[at - 1][0]]
    left = [units[max(start for start in starts if start <= at)] for at in range(len(one))]
    return [class_of(unit_before, *frame[1:]) for unit_before, frame in zip(left, one, strict=True)]


SAID = [frames(one) for one in ("1:0011 2:0 1:01", "2:02 2:01 1:1", "1:0 3:001112 2:2")]


def of_units(order: int, said: list[reference.Frames] = SAID) -> StateGraph:
    return unit_ngram([UnitFrames(*np.array(one).T) for one in said], order, class_of)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_weights_of_labels_are_products_of_relative_frequencies(order: int) -> None:
    others = [frames(one) for one in ("1:01 2:0 1:001", "1:01 3:02 2:0 1:00", "2:0 2:1 2:0 1:01")]
    found = [math.exp(of_units(order).log_weight_of(labels(one))) for one in [*SAID, *others]]
    expected = [reference.probability(SAID, order, one) for one in [*SAID, *others]]
    assert_close(found, expected, rtol=1e-12, atol=0.0)
    assert all(found[:3]) and found[3] > 0.0


def test_probabilities_of_a_state_sum_to_one() -> None:
    assert_sums_to_one(of_units(3))


def test_every_third_frame_has_the_topology_of_outputs_at_a_third_of_the_rate() -> None:
    one = UnitFrames(*np.array(frames("1:00112222 2:000111222")).T)
    assert one.every(3, 1).state_T.tolist() == [0, 2, 2, 0, 1, 2]
    thinned = unit_ngram([one.every(3, first) for first in range(3)], 3, class_of)
    # unit 1 from its first state to its last, then unit 2 entered in its first
    skips = [class_of(*one) for one in ((0, 1, 0), (0, 1, 2), (1, 2, 0), (1, 2, 1), (1, 2, 2))]
    assert thinned.log_weight_of(skips) > -math.inf
    assert unit_ngram([one], 3, class_of).log_weight_of(skips) == -math.inf


def test_without_frames_there_is_no_model() -> None:
    with pytest.raises(DataError, match="no labels"):
        unit_ngram([], 3, class_of)
