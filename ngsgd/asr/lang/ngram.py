"""N-gram language models in ARPA format, as costs of words, for rescoring lattices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ngsgd.errors import DataError

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
# a word without a probability, as with an open vocabulary without <unk>; Kaldi omits such paths
_UNSEEN_COST = 99.0
_SECTION = re.compile(r"\\(\d+)-grams:")
_MAX_ORDER = 20


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


def parse(text: str) -> NgramModel:
    """Parse a model.

    Raises:
        DataError: the text is not in ARPA format.
    """
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    order = highest = 0
    has_begun = False
    for number, line in enumerate(text.splitlines(), start=1):
        # other text may come first, even with examples of sections
        has_begun = has_begun or line.strip() == "\\data\\"
        if not has_begun:
            continue
        if section := _SECTION.fullmatch(line.strip()):
            order = int(section[1])
            highest = max(highest, order)
        elif line.strip() == "\\end\\":
            break
        elif order and line.strip():
            gram, values = _entry(line, order, number)
            entries[gram] = values
    if not entries or highest > _MAX_ORDER:
        raise DataError(
            f"The language model is not in ARPA format, or has n-grams of more than {_MAX_ORDER} "
            "words; check the file."
        )
    return NgramModel(highest, entries)


def _entry(line: str, order: int, number: int) -> tuple[tuple[str, ...], tuple[float, float]]:
    fields = line.split()
    try:
        if not order + 1 <= len(fields) <= order + 2:
            raise ValueError(f"{len(fields)} fields")
        values = [float(fields[0]), float(fields[order + 1]) if len(fields) > order + 1 else 0.0]
        if not all(map(math.isfinite, values)):
            raise ValueError("a number that is not finite")
    except ValueError as error:
        raise DataError(
            f"The language model is not in ARPA format (line {number}: {error}); check the file."
        ) from error
    # </s> and <unk> may also be in capitals
    words = tuple(
        word.lower() if word.lower() in (BEGIN, END, UNKNOWN) else word
        for word in fields[1 : order + 1]
    )
    return words, (values[0] * math.log(10.0), values[1] * math.log(10.0))
