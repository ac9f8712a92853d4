"""Word errors, counted as Kaldi counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ngsgd.asr import extras
from ngsgd.files import write_text

_NOTHING = "***"  # stands where one side of an alignment has no word, as in Kaldi's per_utt files

Words = Sequence[str]


@dataclass(frozen=True)
class WordErrors:
    """Counts over any number of utterances; they add up."""

    num_words: int = 0       # in the reference
    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0

    @property
    def total(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def wer(self) -> float:
        """Percent."""
        return 100.0 * self.total / max(self.num_words, 1)

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.num_words + other.num_words, self.insertions + other.insertions,
                          self.deletions + other.deletions, self.substitutions + other.substitutions)

    def __str__(self) -> str:
        return (f"%WER {self.wer:.2f} [ {self.total} / {self.num_words}, {self.insertions} ins, {self.deletions} del, "
                f"{self.substitutions} sub ]")


@dataclass(frozen=True)
class ScoredUtterance:
    utt_id: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]
    errors: WordErrors


@dataclass(frozen=True)
class ScoredSet:
    errors: WordErrors
    utterances: tuple[ScoredUtterance, ...]

    def confidence_interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the word error rate over utterances, in percent; a fixed seed."""
        kaldialign = extras.load("kaldialign", extra="asr", purpose="Scoring")
        interval = kaldialign.bootstrap_wer_ci([list(u.reference) for u in self.utterances],
                                               [list(u.hypothesis) for u in self.utterances], seed=0)
        return 100.0 * interval["ci95min"], 100.0 * interval["ci95max"]


def score(references: Sequence[Words], hypotheses: Sequence[Words], utt_ids: Sequence[str]) -> ScoredSet:
    """Minimum edit distance of each utterance, and the sum."""
    kaldialign = extras.load("kaldialign", extra="asr", purpose="Scoring")
    utterances = []
    for utt_id, reference, hypothesis in zip(utt_ids, references, hypotheses, strict=True):
        counts = kaldialign.edit_distance(list(reference), list(hypothesis))
        errors = WordErrors(len(reference), counts["ins"], counts["del"], counts["sub"])
        utterances.append(ScoredUtterance(utt_id, tuple(reference), tuple(hypothesis), errors))
    return ScoredSet(sum((u.errors for u in utterances), WordErrors()), tuple(utterances))


def write_per_utterance(path: Path, scored: ScoredSet) -> None:
    """Kaldi's per_utt format: four lines an utterance (ref, hyp, op, #csid), aligned word by word; then the sum."""
    kaldialign = extras.load("kaldialign", extra="asr", purpose="Scoring")
    lines = []
    for utterance in scored.utterances:
        pairs = kaldialign.align(list(utterance.reference), list(utterance.hypothesis), _NOTHING)
        operations = [_operation(reference, hypothesis) for reference, hypothesis in pairs]
        columns = [(reference, hypothesis, operation) for (reference, hypothesis), operation in
                   zip(pairs, operations, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        for name, row in zip(("ref ", "hyp ", "op  "), zip(*columns, strict=True) if columns else ((), (), ()), strict=True):
            cells = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"{utterance.utt_id} {name} {cells}".rstrip())
        counts = " ".join(str(operations.count(operation)) for operation in "CSID")
        lines.append(f"{utterance.utt_id} #csid {counts}")
    lines.append(f"{scored.errors}")
    write_text(path, "\n".join(lines) + "\n")


def _operation(reference: str, hypothesis: str) -> str:
    if reference == _NOTHING:
        return "I"
    if hypothesis == _NOTHING:
        return "D"
    return "C" if reference == hypothesis else "S"
