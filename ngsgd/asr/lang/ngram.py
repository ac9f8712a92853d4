"""N-gram language models: interpolated Witten-Bell estimates from text, and the ARPA format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ngsgd.asr.lang import arpa
from ngsgd.asr.lang.arpa import BEGIN, END, UNKNOWN
from ngsgd.errors import DataError

# a word without a probability, as with an open vocabulary without <unk>; Kaldi omits such paths
_UNSEEN_COST = 99.0


@dataclass(frozen=True)
class NgramModel:
    """Natural log probabilities and back-off weights by n-gram."""

    order: int
    entries: Mapping[tuple[str, ...], tuple[float, float]]

    def cost(self, history: Sequence[str], word: str) -> float:
        """Return -log p (nats) of a word or `END`; only a complete history begins with `BEGIN`."""
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
        """Return the perplexity of texts with ends, and the number of its omitted unknown words."""
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

    After the history h come c(h) words in the texts, t(h) of them different; h' lacks its first
    word. Then P(w | h) = (c(h w) + t(h) P(w | h')) / (c(h) + t(h)). The empty history is
    interpolated with a uniform distribution over `vocabulary`. Words that it lacks count as
    `UNKNOWN`. Witten and Bell 1991; interpolated form as in Chen and Goodman 1998.

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
                follows.setdefault(tuple(tokens[at - length : at]), Counter())[tokens[at]] += 1
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
    entries = {gram: (math.log(prob), math.log(_backoff_weight(follows.get(gram)))) for gram, prob in probs.items()}
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
