"""Scoring of recognized words: counts, totals, and files per utterance."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ngsgd import files
from ngsgd.asr import extras
from ngsgd.errors import DataError

Words = Sequence[str]
# opposite an inserted or deleted word in pairs; no word is empty
NOTHING = ""
# its form in files; a word that looks like it has a backslash there
_SHOWN = "***"
# of a bootstrap of few utterances
_NUM_SAMPLES = 1000
# of a line of compute-wer
_COUNTS = re.compile(r"%WER (?:\S+|\(no words\)) \[ \d+ / (\d+), (\d+) ins, (\d+) del, (\d+) sub \]$")


@dataclass(frozen=True)
class WordErrors:
    """Counts over one or more utterances.

    >>> str(WordErrors(num_words=1000, insertions=4, deletions=7, substitutions=20))
    '%WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]'
    >>> str(WordErrors(num_words=0, insertions=2, deletions=0, substitutions=0))
    '%WER (no words) [ 2 / 0, 2 ins, 0 del, 0 sub ]'
    """

    num_words: int      # of the references
    insertions: int
    deletions: int
    substitutions: int

    @property
    def num_errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def wer(self) -> float:
        """WER in percent, which may be above 100; NaN without reference words."""
        return 100.0 * self.num_errors / self.num_words if self.num_words else math.nan

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.num_words + other.num_words, self.insertions + other.insertions,
                          self.deletions + other.deletions, self.substitutions + other.substitutions)

    def __str__(self) -> str:
        wer = f"{self.wer:.2f}" if self.num_words else "(no words)"
        return (f"%WER {wer} [ {self.num_errors} / {self.num_words}, {self.insertions} ins, "
                f"{self.deletions} del, {self.substitutions} sub ]")


@dataclass(frozen=True)
class UtteranceErrors:
    """Alignment of one utterance: pairs (reference, hypothesis); a missing word is `NOTHING`."""

    utt_id: str
    pairs: tuple[tuple[str, str], ...]
    errors: WordErrors


@dataclass(frozen=True)
class Interval:
    """Bounds of the WER (percent) of 95 % of the samples; see `confidence_interval`."""

    low: float
    high: float


def score(refs: Sequence[Words], hyps: Sequence[Words], utt_ids: Sequence[str]) -> tuple[WordErrors, list[UtteranceErrors]]:
    """Return the errors of all utterances together, and of each."""
    if not len(refs) == len(hyps) == len(utt_ids):
        raise DataError(f"{len(refs)} references, {len(hyps)} hypotheses and {len(utt_ids)} "
                        "utterance names cannot be compared; decode the complete set again.")
    if not any(refs):
        raise DataError("The references contain no words, so the WER is undefined; choose a set "
                        "with speech.")
    kaldialign = extras.load("kaldialign", extra="asr", purpose="Scoring")
    rows = []
    for ref, hyp, utt_id in zip(map(list, refs), map(list, hyps), utt_ids, strict=True):
        counts = kaldialign.edit_distance(ref, hyp)
        errors = WordErrors(len(ref), counts["ins"], counts["del"], counts["sub"])
        rows.append(UtteranceErrors(utt_id, tuple(kaldialign.align(ref, hyp, NOTHING)), errors))
    return sum((row.errors for row in rows), WordErrors(0, 0, 0, 0)), rows


def confidence_interval(refs: Sequence[Words], hyps: Sequence[Words]) -> Interval:
    """Bootstrap over utterances by Bisani and Ney, as compute-wer-bootci of Kaldi (deterministic).

    Without errors, every sample of the bootstrap has a WER of 0. The upper end is then that of the
    rule of three: 3 / number of words, at most 100 %.
    """
    if all(list(ref) == list(hyp) for ref, hyp in zip(refs, hyps, strict=True)):
        return Interval(low=0.0, high=min(100.0, 300.0 / max(1, sum(map(len, refs)))))
    kaldialign = extras.load("kaldialign", extra="asr", purpose="Scoring")
    found = kaldialign.bootstrap_wer_ci([list(ref) for ref in refs], [list(hyp) for hyp in hyps])
    if math.isfinite(found["ci95max"]):
        # a normal approximation, which ends below 0 after one or two errors
        return Interval(low=max(0.0, 100.0 * found["ci95min"]), high=100.0 * found["ci95max"])
    # some samples have no reference word, and are omitted
    # `ngsgd compare --help` reads this module
    import numpy as np

    rows = score(refs, hyps, [""] * len(refs))[1]
    random, wers = np.random.default_rng(0), []
    for _ in range(_NUM_SAMPLES):
        sample = [rows[u].errors for u in random.integers(len(rows), size=len(rows))]
        if num_words := sum(one.num_words for one in sample):
            wers.append(100.0 * sum(one.num_errors for one in sample) / num_words)
    low, high = np.percentile(wers, (2.5, 97.5))
    return Interval(float(low), float(high))


def write_per_utterance(path: Path, total: WordErrors, rows: Iterable[UtteranceErrors]) -> None:
    """Write the total, then the counts and the two aligned word sequences of each utterance."""
    lines = [str(total), ""]
    for row in rows:
        forms = [(word_form(ref), word_form(hyp)) for ref, hyp in row.pairs]
        widths = [max(map(len, pair)) for pair in forms]
        lines.append(f"{row.utt_id} {row.errors}")
        for side, title in enumerate(("ref", "hyp")):
            words = (pair[side].ljust(width) for pair, width in zip(forms, widths, strict=True))
            lines.append(" ".join([title, *words]).rstrip())
        lines.append("")
    files.write_text(path, "\n".join(lines))


def read_per_utterance(text: str) -> list[UtteranceErrors]:
    """The utterances in a text of `write_per_utterance`; a damaged one is skipped."""
    rows = []
    for block in text.split("\n\n")[1:]:
        match block.strip("\n").split("\n"):
            case [head, ref, hyp] if (counts := _COUNTS.search(head)) and len(ref.split()) == len(hyp.split()):
                num_words, *errors = map(int, counts.groups())
                pairs = tuple((_word(of_ref), _word(of_hyp))
                              for of_ref, of_hyp in zip(ref.split()[1:], hyp.split()[1:], strict=True))
                rows.append(UtteranceErrors(head[:counts.start()].strip(), pairs, WordErrors(num_words, *errors)))
    return rows


def write_per_speaker(path: Path, rows: Sequence[UtteranceErrors], speakers: Sequence[str]) -> None:
    """Write one line of counts for each speaker, in the order of their names, and the total."""
    by_speaker: dict[str, WordErrors] = {}
    for row, speaker in zip(rows, speakers, strict=True):
        by_speaker[speaker] = by_speaker.get(speaker, WordErrors(0, 0, 0, 0)) + row.errors
    width = max(len(name) for name in ["SUM", *by_speaker])
    total = sum(by_speaker.values(), WordErrors(0, 0, 0, 0))
    lines = [f"{name:{width}} {errors}" for name, errors in [*sorted(by_speaker.items()), ("SUM", total)]]
    files.write_text(path, "\n".join([*lines, ""]))


def operations(rows: Iterable[UtteranceErrors]) -> Counter[tuple[str, str]]:
    """Count each pair of reference and recognized word; `NOTHING` stands for a missing word."""
    return Counter(pair for row in rows for pair in row.pairs)


def write_operations(path: Path, rows: Iterable[UtteranceErrors]) -> None:
    """Write lines "operation reference recognized count", as wer_details/ops of Kaldi.

    A missing word is `***`; a word `***` is written with a backslash before it, here and in the
    file of `write_per_utterance`. Within each operation the most frequent pairs come first.
    """
    lines: dict[str, list[str]] = {"correct": [], "substitution": [], "insertion": [], "deletion": []}
    order = sorted(operations(rows).items(), key=lambda one: (-one[1], *map(word_form, one[0])))
    for (ref, hyp), count in order:
        kind = "correct" if ref == hyp else "insertion" if ref == NOTHING else \
            "deletion" if hyp == NOTHING else "substitution"
        lines[kind].append(f"{kind:12} {word_form(ref):15} {word_form(hyp):15} {count:8}")
    files.write_text(path, "\n".join([*itertools.chain.from_iterable(lines.values()), ""]))


def write_recogs(path: Path, rows: Iterable[UtteranceErrors]) -> None:
    """Write reference and recognized words of each utterance, as recogs-*.txt of icefall."""
    lines = []
    for row in rows:
        ref, hyp = ([pair[side] for pair in row.pairs if pair[side] != NOTHING] for side in (0, 1))
        lines += [f"{row.utt_id}:\tref={ref}", f"{row.utt_id}:\thyp={hyp}"]
    files.write_text(path, "\n".join([*lines, ""]))


def word_form(word: str) -> str:
    """Return the form of a word, or of `NOTHING`, in files and reports."""
    if not word:
        return _SHOWN
    return f"\\{word}" if word.lstrip("\\") == _SHOWN else word


def _word(form: str) -> str:
    """The word of a form in files."""
    if form == _SHOWN:
        return NOTHING
    return form[1:] if form.startswith("\\") and form.lstrip("\\") == _SHOWN else form
