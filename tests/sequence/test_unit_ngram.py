"""N-gram models of units with HMM states: probabilities of paths, from the relative frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch.testing import assert_close

from ngsgd.errors import DataError
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.ngram import UnitFrames, unit_ngram
from tests.reference import chains as reference


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
    return [class_of(*key) for key in zip(left, (unit for _, unit, _ in one), (state for *_, state in one), strict=True)]


SAID = [frames(one) for one in ("1:0011 2:0 1:01", "2:02 2:01 1:1", "1:0 3:001112 2:2")]


def graph(order: int, said: list[reference.Frames] = SAID) -> StateGraph:
    return unit_ngram([UnitFrames(*np.array(one).T) for one in said], order, class_of)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_weights_of_labels_are_products_of_relative_frequencies(order: int) -> None:
    others = [frames(one) for one in ("1:01 2:0 1:001", "1:01 3:02 2:0 1:00", "2:0 2:1 2:0 1:01")]
    found = [math.exp(graph(order).log_weight_of(labels(one))) for one in [*SAID, *others]]
    assert_close(found, [reference.probability(SAID, order, one) for one in [*SAID, *others]], rtol=1e-12, atol=0.0)
    assert all(found[:3]) and found[3] > 0.0


def test_probabilities_of_a_state_sum_to_one() -> None:
    made = graph(3)
    out = np.exp(made.log_final_S)
    np.add.at(out, made.source_A, np.exp(made.log_weight_A))
    assert_close(out, np.ones(made.num_states), rtol=1e-12, atol=0.0)


def test_every_third_frame_has_the_topology_of_outputs_at_a_third_of_the_rate() -> None:
    one = UnitFrames(*np.array(frames("1:00112222 2:000111222")).T)
    assert one.every(3, 1).state_T.tolist() == [0, 2, 2, 0, 1, 2]
    thinned = unit_ngram([one.every(3, first) for first in range(3)], 3, class_of)
    # unit 1 from its first state to its last, then unit 2 entered in its first
    skips = [class_of(0, 1, 0), class_of(0, 1, 2), class_of(1, 2, 0), class_of(1, 2, 1), class_of(1, 2, 2)]
    assert thinned.log_weight_of(skips) > -math.inf
    assert unit_ngram([one], 3, class_of).log_weight_of(skips) == -math.inf


def test_without_frames_there_is_no_model() -> None:
    with pytest.raises(DataError, match="no labels"):
        unit_ngram([], 3, class_of)
