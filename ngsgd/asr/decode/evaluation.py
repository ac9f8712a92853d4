"""Tuning of decoding weights on validation data, and WER on test data; T frames, P pdfs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.adapt.speakers import FindPath
from ngsgd.asr.decode import decoding, scoring, tuning, words
from ngsgd.asr.decode.decoding import Scores, Search
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights, Sweep
from ngsgd.asr.lang import graphs, lexicon
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.language import Language
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import DecodeConfig
from ngsgd.counting import counted
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError
from ngsgd.phase import Phase, Progress
from ngsgd.word_errors import WordErrors

# of a subset, which is enough for the two parameters of a calibration; the beam of its lattices
_MAX_UTTERANCES, _MAX_FRAMES = 300, 36_000
_CALIBRATION_BEAM = 4.0
# the first pass of speaker adaptation by scores of Gaussian mixtures, about as in decode_fmllr.sh
_FIRST = Search(acoustic_scale=0.0833, beam=11.0, max_active=3000)

LogLikelihoods = Sequence[Scores]  # T x P per utterance: log posterior minus log prior


@dataclass(frozen=True)
class DecodingResult:
    """The result of a test, with the tuning on the validation set."""

    setting: DecodingWeights
    valid: WordErrors  # with the chosen weights
    sweep: Sweep  # errors on the validation set with all weights tried
    test: WordErrors
    test_interval: scoring.Interval
    hypotheses: tuple[tuple[str, ...], ...]  # of the test utterances
    per_utterance: tuple[scoring.UtteranceErrors, ...]  # of the test utterances
    graph: Graph  # used to decode the test set
    # the weights that are best on the test set: not a result, only for comparison with Kaldi
    oracle: tuple[DecodingWeights, WordErrors] | None
    calibration: Calibration  # fitted on the validation set


def tune_and_decode(language: Language, config: DecodeConfig, *, valid: SpeechSet,
                    valid_logliks: LogLikelihoods, test: SpeechSet, test_logliks: LogLikelihoods,
                    report: Callable[[str], None] = lambda _line: None) -> DecodingResult:
    """Choose acoustic scale and word penalty on `valid`, and decode `test` with them."""
    report(Phase("building the decoding graph"))
    graph = build_graph(language, config)
    tried = sweep(graph, config, valid.texts, valid.frames.utt_ids, valid_logliks, language.num_pdfs, report,
                  "scale selection: decoding valid with {}")
    setting, valid_errors = tuning.choose(tried)
    penalized = graphs.with_word_penalty(graph, setting.word_penalty)
    logliks = Progress(report, "decoding the test set", len(test.texts)).each(test_logliks)
    hypotheses = decode_set(penalized, config, setting.acoustic_scale, logliks, language.num_pdfs)
    total, rows = scoring.score(test.texts, hypotheses, test.frames.utt_ids)
    # at once: the steps below can take longer than the training
    report(f"test   {total}")
    on_test: Sweep = ()
    if config.oracle:
        on_test = sweep(graph, config, test.texts, test.frames.utt_ids, test_logliks, language.num_pdfs, report,
                        "oracle: decoding test with {}")
    oracle = min(on_test, key=lambda one: one[1].num_errors, default=None)
    calibration, chosen = Calibration(), spread_subset([len(loglik_TP) for loglik_TP in valid_logliks])
    if any(texts := [valid.texts[u] for u in chosen]):
        reported = Progress(report, "calibrating confidences", len(chosen)).each([valid_logliks[u] for u in chosen])
        search = Search(setting.acoustic_scale, config.beam, config.max_active)
        calibration = words.calibrate(penalized, reported, texts, search, lattice_beam=_CALIBRATION_BEAM)
    interval = scoring.confidence_interval(test.texts, hypotheses)
    return DecodingResult(setting, valid_errors, tried, total, interval, hypotheses, tuple(rows),
                          penalized, oracle, calibration)


def spread_subset(num_frames: Sequence[int]) -> range:
    """Return at most six minutes of speech: all utterances, or every second, third, ... one.

    The search with an uncertain model can take longer than its training, so the amount of speech is
    limited. It is spread over the set, whose utterances are in the order of the speakers.

    >>> spread_subset([500] * 200)
    range(0, 200, 3)
    """
    step = 1
    while len(some := range(0, len(num_frames), step)) > 1 and (
            len(some) > _MAX_UTTERANCES or sum(num_frames[u] for u in some) > _MAX_FRAMES):
        step += 1
    return some


def build_graph(language: Language, config: DecodeConfig) -> Graph:
    """Return the decoding graph of the data, or one built from lexicon and grammar; words with the
    same pronunciation have small costs. Raises DataError if decode.graph does not match the data.
    """
    if config.graph == "given" and language.given is None:
        raise DataError("decode.graph is given, but this corpus has no decoding graph; set "
                        "decode.graph=made, or data.graph=FOLDER to a custom graph.")
    if language.given is not None and config.graph != "made":
        is_tied = language.num_pdfs != language.topology.num_pdfs
        graph = replace(graphs.read(language.given), topology=None if is_tied else language.topology)
    elif not language.tree and language.num_pdfs != language.topology.num_pdfs:
        raise DataError("decode.graph is made, but a graph of the lexicon has "
                        f"{language.topology.num_pdfs} states, not the {language.num_pdfs} of the "
                        "alignment; set decode.graph=given.")
    else:
        graph = graphs.build(language, silence_prob=config.silence_prob)
    costs = lexicon.homophone_costs(language.topology.lexicon, language.word_counts)
    return graphs.with_word_costs(graph, costs) if costs else graph


def first_pass(graph: Graph) -> FindPath:
    """The search that finds the states of frames from scores of Gaussian mixtures."""
    return lambda loglik_TP: decoding.best_path(graph, loglik_TP, _FIRST).pdf_T


def decode_set(graph: Graph, config: DecodeConfig, acoustic_scale: float, logliks: Iterable[Scores],
               num_pdfs: int) -> tuple[tuple[str, ...], ...]:
    """Return the recognized words of each utterance."""
    found, search = [], Search(acoustic_scale, config.beam, config.max_active)
    for loglik_TP in logliks:
        if loglik_TP.shape[1] != num_pdfs:
            raise DataError(f"The model scores {loglik_TP.shape[1]} HMM states, but the corpus has "
                            f"{num_pdfs}; decode with the corpus that the model was trained on.")
        found.append(decoding.best_path(graph, loglik_TP, search).words)
    return tuple(found)


def sweep(graph: Graph, config: DecodeConfig, texts: Sequence[Sequence[str]], utt_ids: Sequence[str],
          logliks: LogLikelihoods, num_pdfs: int, report: Callable[[str], None], about: str,
          rules: Callable[[Sequence[str]], Sequence[str]] = tuple) -> Sweep:
    """Return the errors at every acoustic scale and word penalty.

    The phase `about` has {} where its line names the number of settings. `rules` change texts and
    recognized words before they are compared.
    """
    penalized = {penalty: graphs.with_word_penalty(graph, penalty) for penalty in config.word_penalties}
    refs = [*map(rules, texts)]
    settings = list(itertools.product(config.acoustic_scales, config.word_penalties))
    progress = Progress(report, about.format(counted(len(settings), "setting")), len(settings) * len(texts))
    tried = []
    for scale, penalty in settings:
        hypotheses = decode_set(penalized[penalty], config, scale, progress.each(logliks), num_pdfs)
        errors = scoring.score(refs, [*map(rules, hypotheses)], utt_ids)[0]
        tried.append((DecodingWeights(acoustic_scale=scale, word_penalty=penalty), errors))
    return tuple(tried)


@dataclass(frozen=True)
class UtteranceScore:
    """Score of the model on one utterance."""

    utt_id: str
    num_frames: int  # labeled frames
    objf: float  # nats per frame
    accuracy: float  # of frames, 0 to 1


def utterance_scores(frames: FrameSet, logliks: LogLikelihoods, prior_P: npt.NDArray[np.float64]) -> list[UtteranceScore]:
    """Return all utterances sorted by objf, worst first, then by name. `logliks` are T x P log
    posteriors minus log priors; frames without a label (negative) are ignored.
    """
    scores = []
    for utt_id, first, end, loglik_TP in zip(frames.utt_ids, frames.offsets[:-1], frames.offsets[1:], logliks, strict=True):
        pdf_T = frames.pdf_T[first:end]
        known = np.flatnonzero(pdf_T >= 0)
        if len(known):
            log_posterior_TP = loglik_TP[known] + np.log(prior_P)
            of_class_T = log_posterior_TP[np.arange(len(known)), pdf_T[known]]
            is_right_T = log_posterior_TP.argmax(axis=1) == pdf_T[known]
            scores.append(UtteranceScore(utt_id, len(known), float(of_class_T.mean()), float(is_right_T.mean())))
    return sorted(scores, key=lambda score: (score.objf, score.utt_id))


def scores_as_text(scores: Sequence[UtteranceScore]) -> str:
    """Format a table with one line per utterance."""
    width = max([len("utterance"), *(len(score.utt_id) for score in scores)])
    lines = [f"{'utterance':{width}} {'objf':>9} {'accuracy':>9} {'frames':>7}"]
    lines += [f"{s.utt_id:{width}} {s.objf:9.3f} {100 * s.accuracy:8.1f}% {s.num_frames:7}" for s in scores]
    return "\n".join(lines) + "\n"
