"""Scoring of recognized words: counts, totals, and files per utterance."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ngsgd import files, imports
from ngsgd.errors import DataError
from ngsgd.word_errors import WordErrors

Words = Sequence[str]
Bounds = tuple[float, float]  # of a 95% interval of the difference between two systems
# opposite an inserted or deleted word in pairs; no word is empty
NOTHING = ""
# its form in files; a word that looks like it has a backslash there
_SHOWN = "***"
_NUM_SAMPLES = 1000  # of a bootstrap of few utterances
_NUM_PAIRED_SAMPLES, _MAX_PAIRED_COUNTS = 2000, 10**7  # of the counts of all samples
# of a line of compute-wer
_COUNTS = re.compile(r"%WER (?:\S+|\(no words\)) \[ \d+ / (\d+), (\d+) ins, (\d+) del, (\d+) sub \]$")
# in NIST's files: with any words before and after
_ANYWHERE = re.compile(r"\s*/\s*\[\s*\]\s*__\s*\[\s*\]$")
_OF_OTHER_FORMS = {"{", "}", "/", "__", "=>"}


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


@dataclass(frozen=True)
class Rules:
    """Replacements of word sequences, and whether case counts.

    At each place the rule with the most words on its left side is applied, from left to right.
    Words that a rule has made are not changed again.

    >>> rules = Rules({("oh",): ("o",), ("uh",): (), ("ice", "cream"): ("icecream",)}, ignore_case=True)
    >>> rules("Uh OH ice cream ice".split())
    ('o', 'icecream', 'ice')
    """

    replacements: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    ignore_case: bool = False

    @staticmethod
    def read(path: Path | None, *, ignore_case: bool = False) -> Rules:
        """Read lines `WORD WORD => WORD WORD`, as in NIST's glm files; the right side may be empty.

        Lines that begin with ;; or # are comments. The context `/ [ ] __ [ ]` of NIST, which allows
        any words before and after, is ignored. Raises DataError for lines of another form, for two
        rules with one left side, and for a file without rules.
        """
        # `ngsgd compare --help` reads this module, and needs no NumPy
        from ngsgd.asr.kaldi_io import lines
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for where, line in lines.read(path) if path else ():
            if line.startswith((";;", "#")):
                continue
            text = _ANYWHERE.sub("", line.casefold() if ignore_case else line)
            left, arrow, right = text.partition("=>")
            before, after = tuple(left.split()), tuple(right.split())
            if not arrow or not before or _OF_OTHER_FORMS & {*before, *after}:
                raise DataError(f"{where}: {line!r} is not a rule; write WORD WORD => WORD WORD, without "
                                "alternatives and contexts.")
            if found.setdefault(before, after) != after:
                raise DataError(f"{where}: {' '.join(before)!r} has another rule above; remove one.")
        if path and not found:
            raise DataError(f"{path} has no rules; write lines WORD WORD => WORD WORD.")
        return Rules(found, ignore_case)

    def __call__(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the words to compare."""
        left = [word.casefold() for word in words] if self.ignore_case else list(words)
        longest, made = max(map(len, self.replacements), default=0), list[str]()
        while left:
            sizes = (size for size in range(min(longest, len(left)), 0, -1) if tuple(left[:size]) in self.replacements)
            size = next(sizes, 0)
            made += self.replacements[tuple(left[:size])] if size else left[:1]
            del left[:size or 1]
        return tuple(made)


def score(refs: Sequence[Words], hyps: Sequence[Words], utt_ids: Sequence[str]) -> tuple[WordErrors, list[UtteranceErrors]]:
    """Return the errors of all utterances together, and of each."""
    if not len(refs) == len(hyps) == len(utt_ids):
        raise DataError(f"{len(refs)} references, {len(hyps)} hypotheses and {len(utt_ids)} "
                        "utterance names cannot be compared; decode the complete set again.")
    if not any(refs):
        raise DataError("The references contain no words, so the WER is undefined; choose a set "
                        "with speech.")
    kaldialign = imports.load("kaldialign", extra="asr", purpose="Scoring")
    rows = []
    for ref, hyp, utt_id in zip(map(list, refs), map(list, hyps), utt_ids, strict=True):
        counts = kaldialign.edit_distance(ref, hyp)
        errors = WordErrors(len(ref), counts["ins"], counts["del"], counts["sub"])
        rows.append(UtteranceErrors(utt_id, tuple(kaldialign.align(ref, hyp, NOTHING)), errors))
    return sum((row.errors for row in rows), WordErrors(0, 0, 0, 0)), rows


def character_errors(rows: Iterable[UtteranceErrors]) -> WordErrors:
    """Count the errors in the characters of the words; spaces between words do not count."""
    kaldialign = imports.load("kaldialign", extra="asr", purpose="Scoring")
    total = WordErrors(0, 0, 0, 0)
    for row in rows:
        ref, hyp = (list("".join(side)) for side in zip(*row.pairs, strict=True)) if row.pairs else ([], [])
        counts = kaldialign.edit_distance(ref, hyp)
        total += WordErrors(len(ref), counts["ins"], counts["del"], counts["sub"])
    return total


def confidence_interval(refs: Sequence[Words], hyps: Sequence[Words]) -> Interval:
    """Bootstrap over utterances by Bisani and Ney, as compute-wer-bootci of Kaldi (deterministic).
    Without errors the upper end is that of the rule of three: 3 / number of words, at most 100 %.
    """
    if all(list(ref) == list(hyp) for ref, hyp in zip(refs, hyps, strict=True)):
        return Interval(low=0.0, high=min(100.0, 300.0 / max(1, sum(map(len, refs)))))
    kaldialign = imports.load("kaldialign", extra="asr", purpose="Scoring")
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
    found = by_group(rows, speakers)
    width = max(len(name) for name in ["SUM", *found])
    total = sum(found.values(), WordErrors(0, 0, 0, 0))
    lines = [f"{name:{width}} {errors}" for name, errors in [*found.items(), ("SUM", total)]]
    files.write_text(path, "\n".join([*lines, ""]))


def by_group(rows: Sequence[UtteranceErrors], groups: Sequence[str]) -> dict[str, WordErrors]:
    """Return the errors of each group of utterances, in the order of their names."""
    found = {name: WordErrors(0, 0, 0, 0) for name in sorted(set(groups))}
    for row, group in zip(rows, groups, strict=True):
        found[group] += row.errors
    return found


def operations(rows: Iterable[UtteranceErrors]) -> Counter[tuple[str, str]]:
    """Count each pair of reference and recognized word; `NOTHING` stands for a missing word."""
    return Counter(pair for row in rows for pair in row.pairs)


def write_operations(path: Path, rows: Iterable[UtteranceErrors]) -> None:
    """Write lines "operation reference recognized count", as wer_details/ops of Kaldi; a missing
    word is `***`, and a word `***` has a backslash before it. The most frequent pairs come first.
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
    if form == _SHOWN:
        return NOTHING
    return form[1:] if form.startswith("\\") and form.lstrip("\\") == _SHOWN else form


def paired_interval(differences: Sequence[float]) -> Bounds:
    """Bounds of the mean of paired differences by Student's t, such as of runs with equal seeds.

    >>> low, high = paired_interval([0.3, 0.3, 0.31])
    >>> round(low, 3), round(high, 3)
    (0.289, 0.318)
    """
    mean, count = statistics.fmean(differences), len(differences)
    reach = _quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - reach, mean + reach


def welch_interval(first: Sequence[float], second: Sequence[float]) -> Bounds:
    """Bounds of mean(second) - mean(first) of independent values by Welch's t."""
    value = statistics.fmean(second) - statistics.fmean(first)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    weights = [part**2 / (len(one) - 1) for part, one in zip(parts, (first, second), strict=True)]
    # equal values have no variance, and any freedom
    freedom = sum(parts) ** 2 / sum(weights) if sum(weights) else 1.0
    reach = _quantile(freedom) * math.sqrt(sum(parts))
    return value - reach, value + reach


def bootstrap_interval(first: Sequence[UtteranceErrors], second: Sequence[UtteranceErrors]) -> Bounds | None:
    """Bounds of WER(second) - WER(first) in percent points by a paired bootstrap; deterministic.
    None where the two are not of the same utterances.
    """
    import numpy as np
    if not first or [row.utt_id for row in first] != [row.utt_id for row in second]:
        return None
    count = len(first)
    pairs = zip(first, second, strict=True)
    more_U = np.array([b.errors.num_errors - a.errors.num_errors for a, b in pairs])
    words_U = np.array([row.errors.num_words for row in first])
    num_samples = max(200, min(_NUM_PAIRED_SAMPLES, _MAX_PAIRED_COUNTS // count))
    rng = np.random.default_rng(0)
    counts_SU = rng.multinomial(count, np.full(count, 1 / count), size=num_samples)
    wers_S = 100.0 * (counts_SU @ more_U) / np.maximum(counts_SU @ words_U, 1)
    low, high = np.percentile(wers_S, (2.5, 97.5))
    return float(low), float(high)


def _quantile(freedom: float) -> float:
    """Quantile of Student's t for a two-sided interval of 95%."""
    from scipy.special import stdtrit
    return float(stdtrit(freedom, 0.975))
