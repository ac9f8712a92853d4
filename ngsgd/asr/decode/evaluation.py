"""Decoding settings tuned on the valid set, and the word errors they give on the test set.  Knows no model.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.decode import decoding, scoring, words
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.scoring import Interval, UtteranceErrors, WordErrors
from ngsgd.asr.decode.streaming import Search
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.grammar import Grammar
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.language import Language
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import DecodeConfig
from ngsgd.errors import DataError
from ngsgd.phase import Phase

# utterances that the calibration is fitted on, and the beam of their lattices: two parameters need no more
_MAX_CALIBRATION = 300
_CALIBRATION_BEAM = 4.0

# T x P of each utterance: log posterior minus log prior
LogLikelihoods = Sequence[npt.NDArray[np.float32]]


@dataclass(frozen=True)
class DecodingWeights:
    """The two weights of decoding that are tuned on validation speech."""

    acoustic_scale: float
    word_penalty: float


Sweep = tuple[tuple[DecodingWeights, WordErrors], ...]


@dataclass(frozen=True)
class DecodingResult:
    """The result of a test, with what it was tuned on."""

    setting: DecodingWeights
    # at the chosen setting
    valid: WordErrors
    # every setting that was tried on valid
    sweep: Sweep
    test: WordErrors
    test_interval: Interval
    # of the test utterances
    hypotheses: tuple[tuple[str, ...], ...]
    # of the test utterances
    per_utterance: tuple[UtteranceErrors, ...]
    # that the test set was decoded with
    graph: Graph
    # the setting that is best on test: not a result, only beside Kaldi's own
    oracle: tuple[DecodingWeights, WordErrors] | None
    # of the posteriors of words, fitted on valid
    calibration: Calibration


def tune_and_decode(
    language: Language, config: DecodeConfig, *, valid: SpeechSet, valid_logliks: LogLikelihoods, test: SpeechSet,
    test_logliks: LogLikelihoods, report: Callable[[str], None] = lambda _line: None,
) -> DecodingResult:
    """Tries every acoustic scale and word penalty on `valid`, and decodes `test` with the best of them.

    Among equals the setting named first wins. `report` receives the phases.
    """
    report(Phase("building the decoding graph"))
    graph = build_graph(language, config)
    num_settings = len(config.acoustic_scales) * len(config.word_penalties)
    report(Phase(f"scale selection: decoding valid with {num_settings} settings"))
    tried = sweep(graph, config, valid.texts, valid.frames.utt_ids, valid_logliks, language.num_pdfs)
    setting, valid_errors = min(tried, key=lambda one: one[1].num_errors)
    penalised = graphs.with_word_penalty(graph, setting.word_penalty)
    report(Phase("decoding the test set"))
    hypotheses = decode_set(penalised, config, setting.acoustic_scale, test_logliks, language.num_pdfs)
    total, rows = scoring.score(test.texts, hypotheses, test.frames.utt_ids)
    on_test = (sweep(graph, config, test.texts, test.frames.utt_ids, test_logliks, language.num_pdfs)
               if config.oracle else ())
    report(Phase("calibrating confidences"))
    oracle = min(on_test, key=lambda one: one[1].num_errors, default=None)
    return DecodingResult(
        setting=setting, valid=valid_errors, sweep=tried, test=total,
        test_interval=scoring.confidence_interval(test.texts, hypotheses), hypotheses=hypotheses, per_utterance=tuple(rows),
        graph=penalised, oracle=oracle,
        calibration=_calibration(penalised, config, setting, valid, valid_logliks),
    )


def _calibration(graph: Graph, config: DecodeConfig, setting: DecodingWeights, valid: SpeechSet,
                 logliks: LogLikelihoods) -> Calibration:
    """The calibration of confidences, of some utterances where there are many."""
    texts, some = valid.texts[:_MAX_CALIBRATION], logliks[:_MAX_CALIBRATION]
    if not any(texts):
        return Calibration()
    return words.calibrate(graph, some, texts, Search(setting.acoustic_scale, config.beam, config.max_active),
                           lattice_beam=min(config.lattice_beam, _CALIBRATION_BEAM))


def build_graph(language: Language, config: DecodeConfig, rules: Grammar | None = None) -> Graph:
    """The graph to decode with: the one that came with the data, or one made of lexicon and language model or `rules`."""
    if config.graph == "given" and language.given is None:
        raise DataError("decode.graph is given, but this corpus comes without a decoding graph; set decode.graph=made, or "
                        "data.graph=FOLDER for your own.")
    if language.given is not None and config.graph != "made":
        is_tied = language.num_pdfs != language.topology.num_pdfs
        return replace(graphs.read(language.given), topology=None if is_tied else language.topology)
    if language.num_pdfs != language.topology.num_pdfs:
        raise DataError(f"decode.graph is made, and a graph made of the lexicon has {language.topology.num_pdfs} states, not the "
                        f"{language.num_pdfs} of the alignment; set decode.graph=given.")
    return graphs.build(language, silence_prob=config.silence_prob, rules=rules)


def decode_set(
    graph: Graph, config: DecodeConfig, acoustic_scale: float, logliks: LogLikelihoods, num_pdfs: int,
) -> tuple[tuple[str, ...], ...]:
    """The recognised words of each utterance."""
    return tuple(_decode_one(graph, config, acoustic_scale, loglik_TP, num_pdfs) for loglik_TP in logliks)


def sweep(graph: Graph, config: DecodeConfig, texts: Sequence[Sequence[str]], utt_ids: Sequence[str],
          logliks: LogLikelihoods, num_pdfs: int) -> Sweep:
    """The errors at every acoustic scale and word penalty."""
    penalised = {penalty: graphs.with_word_penalty(graph, penalty) for penalty in config.word_penalties}
    tried = []
    for scale in config.acoustic_scales:
        for penalty in config.word_penalties:
            hypotheses = decode_set(penalised[penalty], config, scale, logliks, num_pdfs)
            errors = scoring.score(texts, hypotheses, utt_ids)[0]
            tried.append((DecodingWeights(acoustic_scale=scale, word_penalty=penalty), errors))
    return tuple(tried)


def _decode_one(
    graph: Graph, config: DecodeConfig, acoustic_scale: float, loglik_TP: npt.NDArray[np.float32], num_pdfs: int,
) -> tuple[str, ...]:
    if loglik_TP.shape[1] != num_pdfs:
        raise DataError(f"The model scores {loglik_TP.shape[1]} HMM states and the corpus has {num_pdfs}; "
                        "decode with the corpus that the model was trained on.")
    return decoding.best_path(graph, loglik_TP, acoustic_scale=acoustic_scale, beam=config.beam, max_active=config.max_active).words
