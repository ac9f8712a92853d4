"""Small costs that decide between words with the same pronunciation.

If a language model gives homophones the same probability, their paths have equal costs, and the
order of the search or rounding decides. The costs here decide for the word that is more frequent in
the training transcripts. They are about 0.01 at most and rarely change another decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# share of the negative log probability in the training transcripts
_SCALE = 1e-3


def count_words(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return the number of occurrences of each word, sorted by word."""
    counts = Counter(word for words in texts for word in words)
    return dict(sorted(counts.items()))


def costs(lexicon: Mapping[str, Iterable[Sequence[str]]], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the cost of each word that shares a pronunciation with another word.

    Args:
        lexicon: word -> pronunciations, as phones.
        counts: word -> its number in the training transcripts; empty: no word has a cost.

    Returns:
        A thousandth of the negative log probability of the word, with one added to each count.

    >>> a, o = ("EY",), ("OW",)
    >>> found = costs({"A": [a], "O": [o], "OH": [o]}, {"A": 9, "O": 6, "OH": 2})
    >>> {word: round(cost, 6) for word, cost in found.items()}
    {'O': 0.00105, 'OH': 0.001897}
    """
    if not counts:
        return {}
    words_of: dict[tuple[str, ...], dict[str, None]] = {}
    for word, pronunciations in lexicon.items():
        for phones in pronunciations:
            words_of.setdefault(tuple(phones), {})[word] = None
    log_total = math.log(sum(counts.values()) + len(lexicon))
    shared = dict.fromkeys(word for words in words_of.values() if len(words) > 1 for word in words)
    return {word: _SCALE * (log_total - math.log(counts.get(word, 0) + 1)) for word in shared}
