"""N-gram models estimated from text."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ngsgd.asr.lang import ngram
from ngsgd.errors import DataError
from tests.reference import witten_bell

VOCABULARY = ("a", "b", "c", "d")


def texts(seed: int, words: tuple[str, ...] = VOCABULARY) -> list[tuple[str, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.choice(words, rng.integers(0, 6))) for _ in range(12)]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_are_those_of_the_recursion_and_sum_to_one(order: int) -> None:
    given = [text for seed in (1, 2) for text in texts(seed, ("a", "b", "c", "<unk>"))]
    model = ngram.estimate(given, order=order, vocabulary=VOCABULARY)
    targets = [*VOCABULARY, "<unk>", "</s>"]
    for length in range(3):
        for history in itertools.product(("<s>", *VOCABULARY), repeat=length):
            found = [math.exp(-model.cost(history, word)) for word in targets]
            expected = [witten_bell.probability(given, history, word, order=order,
                                                vocabulary=VOCABULARY) for word in targets]
            # float64 sums of at most six logarithms
            np.testing.assert_allclose(found, expected, rtol=1e-12)
            np.testing.assert_allclose(sum(found), 1.0, rtol=1e-12)


def test_a_model_read_back_from_arpa_has_its_costs() -> None:
    model = ngram.estimate(texts(3), order=3, vocabulary=VOCABULARY)
    read = ngram.parse(model.to_arpa())
    assert set(read.entries) == set(model.entries)
    for gram, values in model.entries.items():
        # seven decimals of a logarithm to base 10
        np.testing.assert_allclose(read.entries[gram], values, atol=2e-7)


def test_perplexity_counts_ends_and_omits_unknown_words() -> None:
    model = ngram.estimate([("a",), ("a",)], order=1, vocabulary=("a",))
    # a and </s>, each 1/2
    perplexity, num_unknown = model.perplexity([("a", "z"), ()])
    assert perplexity == pytest.approx(2.0)
    assert num_unknown == 1


def test_a_text_without_words_and_ends_is_an_error() -> None:
    with pytest.raises(DataError):
        ngram.estimate([], order=2, vocabulary=VOCABULARY)
