"""N-gram language models: estimation from text, and the ARPA format.

A model gives the cost of a word after other words.  Estimation is interpolated Witten-Bell
smoothing, which needs no held-out text and suits the small transcripts of a speech corpus.

    weight = best_weight(transcripts, newspaper, valid_texts)
    model = interpolate(transcripts, newspaper, weight)

interpolates two models linearly, with the weight of lowest perplexity on other texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ngsgd.asr.lang import arpa
from ngsgd.asr.lang.arpa import BEGIN, END, UNKNOWN
from ngsgd.errors import DataError

# a word without a probability, as with an open vocabulary without <unk>; Kaldi omits such paths
_UNSEEN_COST = 99.0
# of the weight of a mixture: iterations, and its change between the last two
_MAX_ITERATIONS = 200
_CONVERGED = 1e-6
# a smaller rest of a probability is rounding
_LEAST = 1e-12


@dataclass(frozen=True)
class NgramModel:
    """Natural log probabilities and back-off weights by n-gram."""

    order: int
    entries: Mapping[tuple[str, ...], tuple[float, float]]

    def cost(self, history: Sequence[str], word: str) -> float:
        """Return the negative log probability of a word after a history (nats).

        Args:
            history: the previous words, with `BEGIN` first if they reach the beginning.
            word: the word, or `END`.
        """
        context = tuple(history)[max(0, len(history) - self.order + 1) :]
        backoff = 0.0
        while True:
            if (entry := self.entries.get((*context, word))) is not None:
                return -(backoff + entry[0])
            if not context:
                unknown = self.entries.get((UNKNOWN,))
                return -(backoff + unknown[0]) if unknown else _UNSEEN_COST - backoff
            backoff += self.entries.get(context, (0.0, 0.0))[1]
            context = context[1:]

    def perplexity(self, texts: Iterable[Sequence[str]]) -> tuple[float, int]:
        """Return the perplexity of texts, and the number of their words without a unigram.

        Ends of texts count as words.  Words without a unigram are not counted in the perplexity.
        """
        total, num_counted, num_unknown = 0.0, 0, 0
        for text in texts:
            history = [BEGIN]
            for word in (*text, END):
                if (word,) in self.entries:
                    total += self.cost(history, word)
                    num_counted += 1
                else:
                    num_unknown += 1
                history.append(word)
        return math.exp(total / max(num_counted, 1)), num_unknown

    def to_arpa(self) -> str:
        """Return the model in the ARPA format."""
        sizes = Counter(map(len, self.entries))
        lines = ["\\data\\", *(f"ngram {n}={sizes[n]}" for n in range(1, self.order + 1)), ""]
        for n in range(1, self.order + 1):
            lines.append(f"\\{n}-grams:")
            for gram, (log_prob, backoff) in self.entries.items():
                if len(gram) == n:
                    weight = f"\t{backoff / math.log(10.0):.7f}" if n < self.order else ""
                    lines.append(f"{log_prob / math.log(10.0):.7f}\t{' '.join(gram)}{weight}")
            lines.append("")
        return "\n".join([*lines, "\\end\\", ""])


def estimate(texts: Iterable[Sequence[str]], *, order: int, vocabulary: Iterable[str]) -> NgramModel:
    """Estimate an n-gram model with interpolated Witten-Bell smoothing.

    The probability of word w after the history h, which c(h) words and t(h) different words follow
    in the texts, is (c(h w) + t(h) P(w | h')) / (c(h) + t(h)). Here h' lacks the first word of h.
    The empty history is interpolated with a uniform distribution over the vocabulary.

    Args:
        texts: word sequences, such as the transcripts of the training set.
        order: longest n-gram, 1 or more.
        vocabulary: words that get a probability even if no text has them. Words of the texts that
            it lacks count as `UNKNOWN`.

    Returns:
        A model whose probabilities sum to 1 after every history.

    Source: Witten and Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37 (1991);
    interpolated form as in Chen and Goodman, "An empirical study of smoothing techniques" (1998).

    Example:
        >>> model = estimate([("a", "b"), ("a", "c")], order=2, vocabulary="abc")
        >>> round(math.exp(-model.cost(["<s>"], "a")), 3)
        0.767
    """
    words = dict.fromkeys(vocabulary)
    follows: dict[tuple[str, ...], Counter[str]] = {}
    for text in texts:
        tokens = [BEGIN, *(word if word in words else UNKNOWN for word in text), END]
        for at in range(1, len(tokens)):
            for length in range(min(order - 1, at) + 1):
                context = tuple(tokens[at - length : at])
                follows.setdefault(context, Counter())[tokens[at]] += 1
    targets = (*words, *([UNKNOWN] if UNKNOWN in follows.get((), ()) else []), END)
    unigrams = follows.get((), Counter())
    if not (num := unigrams.total()):
        raise DataError("The text of the language model has no words; give another data.lm_text.")
    probs: dict[tuple[str, ...], float] = {
        (w,): (unigrams[w] + len(unigrams) / len(targets)) / (num + len(unigrams)) for w in targets}
    for context in sorted(follows, key=len):
        for word, count in follows[context].items() if context else ():
            num, kinds = follows[context].total(), len(follows[context])
            # the probability after the shorter history, of any that the texts have or lack
            lower, shorter = 1.0, context[1:]
            while (*shorter, word) not in probs:
                lower *= _backoff_weight(follows.get(shorter))
                shorter = shorter[1:]
            lower *= probs[*shorter, word]
            probs[*context, word] = (count + kinds * lower) / (num + kinds)
    entries = {gram: (math.log(prob), math.log(_backoff_weight(follows.get(gram))))
               for gram, prob in probs.items()}
    # no text has it as a following word, but histories begin with it; -99 stands for never in ARPA
    entries[(BEGIN,)] = (-_UNSEEN_COST, math.log(_backoff_weight(follows.get((BEGIN,)))))
    return NgramModel(order, dict(sorted(entries.items(), key=lambda item: len(item[0]))))


def _backoff_weight(following: Counter[str] | None) -> float:
    """The share of a history's probability that goes to the shorter history; 1 without one."""
    return len(following) / (following.total() + len(following)) if following else 1.0


def parse(text: str, name: str = "the language model") -> NgramModel:
    """Parse a model in ARPA format; raise DataError for a damaged or incomplete text."""
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    reader = arpa.Reader(name)
    for _, gram in reader.grams(text):
        if gram:
            # <unk> may also be in capitals
            words = tuple(UNKNOWN if word.lower() == UNKNOWN else word for word in gram.words)
            entries[words] = (float(gram.log_prob) * math.log(10.0), float(gram.backoff or 0.0) * math.log(10.0))
    return NgramModel(reader.order, entries)


# Mixtures -----------------------------------------------------------------------------------------


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
            entries[gram] = (-_UNSEEN_COST, 0.0)
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
