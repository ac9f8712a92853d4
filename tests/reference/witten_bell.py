"""Interpolated Witten-Bell probabilities by recursion, from counts of the texts."""

from __future__ import annotations

from collections.abc import Sequence


def probability(texts: Sequence[Sequence[str]], history: Sequence[str], word: str, *, order: int,
                vocabulary: Sequence[str]) -> float:
    """P(word | history), with words outside the vocabulary replaced by <unk> beforehand."""
    context = list(history)[-(order - 1) :] if order > 1 else []
    following = [
        tokens[at]
        for text in texts
        for tokens in [["<s>", *text, "</s>"]]
        for at in range(1, len(tokens))
        if at >= len(context) and tokens[at - len(context) : at] == context
    ]
    seen = {token for text in texts for token in text if token == "<unk>"}
    lower = (probability(texts, context[1:], word, order=len(context), vocabulary=vocabulary)
             if context else 1.0 / (len(set(vocabulary)) + 1 + len(seen)))
    kinds = len(set(following))
    if not following:
        return lower
    return (following.count(word) + kinds * lower) / (len(following) + kinds)
