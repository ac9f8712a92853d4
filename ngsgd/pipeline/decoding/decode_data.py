"""Decoding of transcribed data with a trained model, other words, language models and settings."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr import test_set
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode import evaluation, scoring, tuning, words
from ngsgd.asr.decode.decoding import LATTICE_BEAM
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights, ReliabilityBin
from ngsgd.asr.decode.words import Hypothesis, calibrate, lattice_of, outcomes, recognized
from ngsgd.asr.lang import arpa, ngram, vocabulary
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.vocabulary import UnknownWords, Vocabulary
from ngsgd.asr.test_set import ScoredSet
from ngsgd.asr.transcript import ctm_line
from ngsgd.errors import ConfigError, DataError, warn
from ngsgd.files import new_directory, write_text
from ngsgd.interface import option
from ngsgd.phase import Progress
from ngsgd.word_errors import WordErrors

FRAME_S = 0.01
# lower bounds of the groups of utterances by number of words
_LENGTHS = (1, 2, 4, 8, 16, 32)
# of an attribute, before numbers are put into groups
_MOST_VALUES = 10


@dataclass(frozen=True)
class DecodeRequest:
    """Data and settings of a decoding.

    Attributes:
        data: folder of a Kaldi data directory or manifests of lhotse.
        vocabulary: replacements for the words of the model.
        acoustic_scale, word_penalty: None uses those of the model, or tuned ones.
        tune_on: folder of the data on which scale and penalty (if None) are tuned.
        rescore_lm: ARPA file of the language model for lattice rescoring.
        confidences: also compute confidences of words, and compare them with the references.
        rules: change references and recognized words before they are compared.
    """

    data: Path
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    acoustic_scale: float | None = None
    word_penalty: float | None = None
    tune_on: Path | None = None
    rescore_lm: Path | None = None
    confidences: bool = False
    rules: scoring.Rules = field(default_factory=scoring.Rules)


@dataclass(frozen=True)
class DataResult:
    """WER of the data, and the settings used.

    Attributes:
        tuned: errors of the set that `weights` were tuned on; None if they were not tuned.
        interval: 95 % bootstrap interval of the WER.
        first_pass: errors before rescoring; None without rescoring.
        unknown: words of the references that cannot be recognized.
        num_changed: references and results that rules have changed, apart from case; None without
            rules.
        characters: errors in the characters of the words.
        rows, speakers: errors and speaker of each utterance.
        attributes: more about its speaker, by name.
        hypotheses: words with confidences; empty without `confidences`.
        calibration: map used for the confidences.
        reliability: words grouped by their confidence.
    """

    weights: DecodingWeights
    tuned: WordErrors | None
    total: WordErrors
    interval: scoring.Interval
    first_pass: WordErrors | None
    num_changed: int | None
    characters: WordErrors
    unknown: UnknownWords
    rows: tuple[scoring.UtteranceErrors, ...]
    speakers: Sequence[str]
    attributes: Mapping[str, Sequence[str]]
    hypotheses: tuple[Hypothesis, ...]
    calibration: Calibration
    reliability: tuple[ReliabilityBin, ...]


def decode_data(bundle: Bundle, request: DecodeRequest, report: Callable[[str], None] = warn,
                progress: Callable[[str], None] = lambda _line: None) -> DataResult:
    """Decode the data of a request.

    `report` receives lines about words that a language model lacks, and about numbers in a lexicon;
    `progress` the phases (`ngsgd.phase`). Raises ConfigError for parts of the request that exclude
    each other, and DataError for data, words or language models that cannot be used.
    """
    bundle = bundle.with_words(request.vocabulary, scale=request.acoustic_scale, penalty=request.word_penalty, report=report)
    language = bundle.language
    if language.grammar and request.rescore_lm:
        raise ConfigError("a grammar replaces the language model; use either a grammar or language models.")
    if request.confidences and request.rules != scoring.Rules():
        raise ConfigError("confidences are those of the recognized words as they are; use either confidences or "
                          "rules of scoring.")
    # the small files first: an error there is reported before the speech is read
    rescorer = _Rescorer.read(request.rescore_lm, language, report) if request.rescore_lm else None
    # the first pass of speaker adaptation takes the same words and language model
    speech = test_set.read(bundle, request.data, bundle.find_path)
    tuning_set = test_set.read(bundle, request.tune_on, bundle.find_path) if request.tune_on else None
    tuned = None
    if tuning_set and (request.acoustic_scale is None or request.word_penalty is None):
        weights, tuned = _tuned(bundle, request, tuning_set, progress)
        bundle = bundle.with_words(Vocabulary(), scale=weights.acoustic_scale, penalty=weights.word_penalty)

    def each(name: str, scored: ScoredSet) -> Iterator[npt.NDArray[np.float32]]:
        return Progress(progress, name, len(scored.texts)).each(scored.logliks)

    graph, search = bundle.graph, bundle.search
    hypotheses = evaluation.decode_set(graph, bundle.decode, search.acoustic_scale, each("decoding", speech), language.num_pdfs)
    texts = tuple(map(request.rules, speech.texts))
    first_pass = scoring.score(texts, [*map(request.rules, hypotheses)], speech.utt_ids)[0] if rescorer else None
    if rescorer:
        hypotheses = tuple(rescorer.best_words(lattice_of(graph, loglik_TP, search, lattice_beam=LATTICE_BEAM), graph.words)
                           for loglik_TP in each("rescoring lattices", speech))
    compared = tuple(map(request.rules, hypotheses))
    total, rows = scoring.score(texts, compared, speech.utt_ids)
    in_one_case = scoring.Rules(ignore_case=request.rules.ignore_case)
    num_changed = None if request.rules == in_one_case else sum(
        in_one_case(one) != other for before, after in ((speech.texts, texts), (hypotheses, compared))
        for one, other in zip(before, after, strict=True))
    found: tuple[Hypothesis, ...] = ()
    bins: Sequence[ReliabilityBin] = ()
    calibrated = bundle.calibration
    if request.confidences:
        if tuning_set:
            calibrated = calibrate(graph, each("calibrating confidences", tuning_set),
                                   tuning_set.texts, search, lattice_beam=LATTICE_BEAM)
        found = tuple(recognized(graph, loglik_TP, search, lattice_beam=LATTICE_BEAM,
                                 frame_shift_s=FRAME_S, calibration=calibrated)[0]
                      for loglik_TP in each("confidences", speech))
        bins = tuning.reliability(*outcomes(found, speech.texts))
    unknown = vocabulary.unknown_words(speech.texts, language)
    return DataResult(bundle.weights, tuned, total, scoring.confidence_interval(texts, compared), first_pass, num_changed,
                      scoring.character_errors(rows), unknown, tuple(rows), speech.speakers, speech.attributes, found,
                      calibrated, tuple(bins))


def as_json(result: DataResult) -> dict[str, Any]:
    """Convert the result to JSON values, without utterances."""
    bins = result.reliability
    return {**asdict(result.weights), "wer": result.total.wer, "errors": asdict(result.total),
            "cer": result.characters.wer, "character_errors": asdict(result.characters), "num_changed": result.num_changed,
            "interval_95": asdict(result.interval), "tuned": asdict(result.tuned) if result.tuned else None,
            "first_pass": asdict(result.first_pass) if result.first_pass else None, "unknown_words": asdict(result.unknown),
            **{f"by_{about}": {name: asdict(errors) for name, errors in found.items()}
               for about, found in tables(result).items()},
            "calibration": asdict(result.calibration), "reliability": [one._asdict() for one in bins],
            "expected_calibration_error": tuning.expected_calibration_error(bins) if bins else None}


def write(folder: Path, result: DataResult) -> None:
    """Write wer.json, and tables by utterance, speaker and operation, as in `decode/` of a run."""
    with new_directory(folder) as new:
        scoring.write_per_utterance(new / "per_utt.txt", result.total, result.rows)
        scoring.write_per_speaker(new / "per_spk.txt", result.rows, result.speakers)
        scoring.write_operations(new / "ops.txt", result.rows)
        scoring.write_recogs(new / "recogs.txt", result.rows)
        if result.hypotheses:
            write_text(new / "words.ctm", "".join(
                ctm_line(row.utt_id, 1, word)
                for row, one in zip(result.rows, result.hypotheses, strict=True) for word in one.words))
        write_text(new / "wer.json", json.dumps(as_json(result), indent=1))


def tables(result: DataResult) -> dict[str, dict[str, WordErrors]]:
    """Return the errors by speaker, by each of the attributes, and by length of the utterances."""
    attributes = {name: _by_value(result.rows, values) for name, values in result.attributes.items()}
    return {"speaker": scoring.by_group(result.rows, result.speakers), **attributes, "length": by_length(result.rows)}


def _by_value(rows: Sequence[scoring.UtteranceErrors], values: Sequence[str]) -> dict[str, WordErrors]:
    """Errors by an attribute; many different integers, such as ages, are in groups of ten."""
    if len(set(values)) > _MOST_VALUES and all(value.isascii() and value.isdigit() for value in values):
        tens = [int(value) // 10 * 10 for value in values]
        values = [f"{ten}-{ten + 9}" for ten in tens]
    found = scoring.by_group(rows, values)
    numbers = {name: re.match(r"\d+", name, re.ASCII) for name in found}
    # names that begin with numbers come last, in the order of their numbers
    return dict(sorted(found.items(), key=lambda one: (int(number[0]) if (number := numbers[one[0]]) else -1, one[0])))


def by_length(rows: Sequence[scoring.UtteranceErrors]) -> dict[str, WordErrors]:
    """Return the errors of utterances of 0, 1, 2 to 3, 4 to 7, ... words."""
    names = ["0", *(str(low) if high == low + 1 else f"{low}-{high - 1}"
                    for low, high in itertools.pairwise(_LENGTHS)), f"{_LENGTHS[-1]}-"]
    sums: dict[str, WordErrors] = {}
    for row in rows:
        name = names[sum(row.errors.num_words >= low for low in _LENGTHS)]
        sums[name] = sums.get(name, WordErrors(0, 0, 0, 0)) + row.errors
    return {name: sums[name] for name in names if name in sums}


def _tuned(bundle: Bundle, request: DecodeRequest, tuning_set: ScoredSet,
           progress: Callable[[str], None]) -> tuple[DecodingWeights, WordErrors]:
    """Return the given weights, completed by tuned ones, and their errors."""
    config = bundle.decode
    if request.acoustic_scale is not None:
        config = replace(config, acoustic_scales=(request.acoustic_scale,))
    if request.word_penalty is not None:
        config = replace(config, word_penalties=(request.word_penalty,))
    return tuning.choose(evaluation.sweep(bundle.unpenalized_graph, config, tuning_set.texts, tuning_set.utt_ids,
                                          tuning_set.logliks, bundle.language.num_pdfs, progress,
                                          "choosing scale and penalty of {}", request.rules))


@dataclass(frozen=True)
class _Rescorer:
    """Cost difference of two language models."""

    old: ngram.NgramModel | None
    new: ngram.NgramModel
    loop_cost: float  # log of the number of words in a loop, if there is no old model

    @staticmethod
    def read(path: Path, language: Language, report: Callable[[str], None]) -> _Rescorer:
        if language.given:
            raise DataError("the graph of the model hides its language model, so its lattices "
                            f"cannot be rescored; specify the first language model with {option('lm', 'FILE')}.")
        text = arpa.read(path, language.topology.words, report, "have the probability of unknown words")
        loop_cost = math.log(len(language.topology.words))
        return _Rescorer(ngram.parse(language.arpa) if language.arpa else None, ngram.parse(text), loop_cost)

    def best_words(self, lattice: words.WordLattice, names: Sequence[str]) -> tuple[str, ...]:
        order = max(self.new.order, self.old.order if self.old else 1)

        def difference(history: tuple[int, ...], label: int | None) -> float:
            """Cost under the new model minus that under the old one; label None is the end."""
            context = [names[one - 1] for one in history]
            if len(context) < order - 1:
                # it reaches the beginning
                context.insert(0, arpa.BEGIN)
            then = arpa.END if label is None else names[label - 1]
            old = self.old.cost(context, then) if self.old else self.loop_cost * (label is not None)
            return self.new.cost(context, then) - old

        best = words.best_sequences(words.reweighted(lattice, difference, order), 1)
        return tuple(names[label - 1] for label in best[0][1]) if best else ()
