"""Linear interpolation of two n-gram models, with the weight of lowest perplexity on other texts.

    weight = best_weight(transcripts, newspaper, valid_texts)
    model = interpolate(transcripts, newspaper, weight)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ngsgd.asr.lang.arpa import BEGIN, END
from ngsgd.asr.lang.ngram import NgramModel

_MAX_ITERATIONS = 200
# of the weight, between two iterations
_CONVERGED = 1e-6
# a smaller rest of a probability is rounding
_LEAST = 1e-12
_NEVER = -99.0


def best_weight(first: NgramModel, second: NgramModel, texts: Iterable[Sequence[str]]) -> float:
    """Return the weight of `first`, 0 to 1, for which the mixture has the lowest perplexity.

    It is found by expectation maximization from a half; the perplexity has one minimum. Words that
    a model lacks do not count. Without texts the weight is a half. Neither model, over the same
    words, is estimated from the texts.

    Source: Jelinek and Mercer, "Interpolated estimation of Markov source parameters from sparse
    data" (1980).
    """
    rows = []
    for text in texts:
        history = [BEGIN]
        for word in (*text, END):
            if all((word,) in model.entries for model in (first, second)):
                rows.append([math.exp(-model.cost(history, word)) for model in (first, second)])
            history.append(word)
    # the probability of each word that both models know
    prob_2N = np.array(rows).reshape(-1, 2).T
    weight = 0.5
    for _ in range(_MAX_ITERATIONS if prob_2N.shape[1] else 0):
        share_N = weight * prob_2N[0] / (weight * prob_2N[0] + (1.0 - weight) * prob_2N[1])
        previous, weight = weight, float(share_N.mean())
        if abs(weight - previous) < _CONVERGED:
            break
    return weight


def interpolate(first: NgramModel, second: NgramModel, weight: float) -> NgramModel:
    """Return one back-off model of `weight` times `first` plus the rest times `second`.

    N-grams of either model get the interpolated probability. The back-off weight of a history gives
    the remaining probability to all other words, in proportion to the shorter history. So
    probabilities sum to 1, and only those of n-grams in neither model differ from the mixture.

    Source: `ngram -mix-lm` of SRILM; Stolcke, "SRILM - an extensible language modeling toolkit"
    (2002).
    """
    models, weights = (first, second), (weight, 1.0 - weight)
    grams = sorted(first.entries.keys() | second.entries.keys(), key=lambda gram: (len(gram), gram))
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    followers: dict[tuple[str, ...], list[str]] = {}
    for gram in grams:
        if gram == (BEGIN,):
            # it follows nothing
            entries[gram] = (_NEVER, 0.0)
            continue
        history, word = gram[:-1], gram[-1]
        mixed = sum(share * math.exp(-model.cost(history, word)) for model, share in zip(models, weights, strict=True))
        entries[gram] = (math.log(mixed), 0.0)
        followers.setdefault(history, []).append(word)
    result = NgramModel(max(first.order, second.order), entries)
    # the back-off weights of shorter histories are in the model
    for context in sorted(followers, key=len):
        if context in entries:
            words = followers[context]
            left = 1.0 - sum(math.exp(entries[*context, word][0]) for word in words)
            lower = 1.0 - sum(math.exp(-result.cost(context[1:], word)) for word in words)
            # 0 where the history has all words
            backoff = math.log(max(left, _LEAST) / lower) if lower > _LEAST else 0.0
            entries[context] = (entries[context][0], backoff)
    return result
