"""Mixtures of two n-gram models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ngsgd.asr.lang import ngram
from tests.reference import witten_bell

VOCABULARY = ("a", "b", "c", "d")
TARGETS = (*VOCABULARY, "</s>")


def texts(seed: int, shares: tuple[float, ...], num: int = 15) -> list[tuple[str, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(map(str, rng.choice(VOCABULARY, rng.integers(1, 6), p=shares))) for _ in range(num)]


FIRST, SECOND = texts(1, (0.7, 0.1, 0.1, 0.1)), texts(2, (0.1, 0.1, 0.2, 0.6))


def estimated(given: list[tuple[str, ...]], order: int) -> ngram.NgramModel:
    return ngram.estimate(given, order=order, vocabulary=VOCABULARY)


@pytest.mark.parametrize(("orders", "weight"), [((1, 1), 0.3), ((3, 3), 0.3), ((2, 3), 0.8), ((3, 3), 1.0), ((3, 3), 0.0)])
def test_ngrams_have_the_mixed_probability_and_all_sum_to_one(orders: tuple[int, int], weight: float) -> None:
    mixed = ngram.interpolate(estimated(FIRST, orders[0]), estimated(SECOND, orders[1]), weight)
    for length in range(3):
        for history in itertools.product(("<s>", *VOCABULARY), repeat=length):
            found = {word: math.exp(-mixed.cost(history, word)) for word in TARGETS}
            # a back-off weight is a ratio of two rests, of at least 1e-3 here
            np.testing.assert_allclose(sum(found.values()), 1.0, rtol=1e-10)
            for word in TARGETS:
                if (*history, word) in mixed.entries:
                    expected = sum(share * witten_bell.probability(given, history, word, order=order, vocabulary=VOCABULARY)
                                   for share, given, order in zip((weight, 1.0 - weight), (FIRST, SECOND), orders, strict=True))
                    np.testing.assert_allclose(found[word], expected, rtol=1e-11)


def test_the_mixture_survives_arpa() -> None:
    mixed = ngram.interpolate(estimated(FIRST, 3), estimated(SECOND, 2), 0.4)
    read = ngram.parse(mixed.to_arpa())
    for history, word in itertools.product(itertools.product(VOCABULARY, repeat=2), TARGETS):
        # seven decimals of a logarithm to base 10, added up to three times
        assert read.cost(history, word) == pytest.approx(mixed.cost(history, word), abs=1e-6)


def test_the_weight_has_the_lowest_perplexity_of_a_fine_grid() -> None:
    first, second = estimated(FIRST, 2), estimated(SECOND, 2)
    valid = texts(3, (0.4, 0.1, 0.1, 0.4), num=40)

    def perplexity(weight: float) -> float:
        log_probs = [math.log(weight * math.exp(-first.cost(("<s>", *text[:at]), word))
                              + (1.0 - weight) * math.exp(-second.cost(("<s>", *text[:at]), word)))
                     for text in valid for at, word in enumerate((*text, "</s>"))]
        return math.exp(-np.mean(log_probs))

    grid = np.linspace(0.001, 0.999, 999)
    best = grid[np.argmin([perplexity(weight) for weight in grid])]
    # half a step of the grid, and the criterion of convergence over its rate
    assert ngram.best_weight(first, second, valid) == pytest.approx(best, abs=1e-3)


def test_texts_like_those_of_one_model_give_it_the_weight() -> None:
    first, second = estimated(FIRST, 2), estimated(SECOND, 2)
    assert ngram.best_weight(first, second, FIRST) > 0.9
    assert ngram.best_weight(second, first, FIRST) < 0.1
    assert ngram.best_weight(first, second, []) == 0.5
