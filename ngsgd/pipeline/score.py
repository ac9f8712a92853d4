"""Decoding and scoring of the held-out sets: words, WER, objective and frame accuracy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ngsgd.asr.align.forced_alignment import Scores
from ngsgd.asr.corpora.corpus import Corpus, SpeechSet
from ngsgd.asr.decode import evaluation, tuning
from ngsgd.asr.decode.decoding import LATTICE_BEAM, Search, write_lattices
from ngsgd.asr.decode.evaluation import DecodingResult, scores_as_text, tune_and_decode, utterance_scores
from ngsgd.asr.decode.scoring import by_group, write_operations, write_per_speaker, write_per_utterance, write_recogs
from ngsgd.asr.lang import ngram
from ngsgd.config import DecodeConfig, EgsConfig, RunConfig
from ngsgd.data.archives import spliced_utterances
from ngsgd.data.frames import FrameSet
from ngsgd.files import new_directory, write_text
from ngsgd.models.growing import utterance_logits
from ngsgd.phase import Phase, Progress
from ngsgd.pipeline.services import Report
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import SubsetScore
from ngsgd.word_errors import WordErrors

# of a rung: the step over scales and penalties, and the limits of the search, as of a first pass in
# Kaldi; the complete search with an uncertain model takes longer than its training
_STEP, _BEAM, _MAX_ACTIVE = 2, 10.0, 2000


def decode_and_score(folder: RunFolder, config: RunConfig, corpus: Corpus, model: nn.Module,
                     prior_P: npt.NDArray[np.float64], report: Report = lambda _line: None) -> DecodingResult:
    """Decode valid and test with scale and penalty tuned on valid; write decode/ in the folder."""
    held_out = _held_out(corpus)
    scores = Progress(report, "decoding: scores of valid and test", sum(len(speech.texts) for speech in held_out.values()))
    logliks = {name: list(scores.each(log_likelihoods(speech.frames, config.egs, model, prior_P)))
               for name, speech in held_out.items()}
    result = tune_and_decode(corpus.language, config.decode, valid=corpus.valid, valid_logliks=logliks["valid"], test=corpus.test,
                             test_logliks=logliks["test"], report=report)
    frames = {name: score_frames(speech, logliks[name], prior_P) for name, speech in held_out.items()}
    speakers = by_group(result.per_utterance, corpus.test.speakers)
    oracle = {}
    if result.oracle:
        # as in RESULTS of Kaldi: the weights are tuned on the test set itself
        setting, errors = result.oracle
        oracle["oracle_on_test_as_in_kaldi"] = {**asdict(setting), "errors": asdict(errors)}
    about = {**asdict(result.setting), "language_model": _language_model(config, corpus),
             "calibration": asdict(result.calibration), "valid": asdict(result.valid),
             "test": asdict(result.test), "test_interval_95": asdict(result.test_interval),
             "test_by_speaker": {name: asdict(errors) for name, errors in speakers.items()},
             **oracle, "frames": {name: asdict(score) for name, score in frames.items() if score},
             "sweep_on_valid": [{**asdict(setting), "errors": asdict(errors)} for setting, errors in result.sweep]}
    report(Phase("writing the results of decoding"))
    with new_directory(folder.decode) as temporary:
        write_per_utterance(temporary / "test.per_utt.txt", result.test, result.per_utterance)
        if corpus.test.is_aligned:
            write_text(temporary / "test.worst.txt", scores_as_text(utterance_scores(corpus.test.frames, logliks["test"], prior_P)))
        write_per_speaker(temporary / "test.per_spk.txt", result.per_utterance, corpus.test.speakers)
        write_operations(temporary / "test.ops.txt", result.per_utterance)
        write_recogs(temporary / "test.recogs.txt", result.per_utterance)
        if config.decode.lattices:
            search = Search(result.setting.acoustic_scale, config.decode.beam, config.decode.max_active)
            write_lattices(temporary / "lattices", result.graph, corpus.test.frames.utt_ids, logliks["test"],
                           search, lattice_beam=LATTICE_BEAM)
        write_text(temporary / "wer.json", json.dumps(about, indent=1))
    return result


def _language_model(config: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """The language model of a WER, with its perplexity on the test transcripts."""
    language = corpus.language
    if language.given and config.decode.graph != "made":
        return {"kind": "graph of the corpus"}
    if not language.arpa:
        return {"kind": "uniform", "num_words": len(language.topology.words)}
    model = ngram.parse(language.arpa)
    perplexity, num_unknown = model.perplexity(corpus.test.texts)
    return {"kind": f"{model.order}-gram", "perplexity_on_test": round(perplexity, 2), "num_unknown_words_in_test": num_unknown}


def score_held_out(config: RunConfig, corpus: Corpus, model: nn.Module,
                   prior_P: npt.NDArray[np.float64]) -> dict[str, SubsetScore | None]:
    """Compute objf per frame and accuracy of valid and test."""
    return {name: score_frames(speech, log_likelihoods(speech.frames, config.egs, model, prior_P), prior_P)
            for name, speech in _held_out(corpus).items()}


def _held_out(corpus: Corpus) -> dict[str, SpeechSet]:
    return {"valid": corpus.valid, "test": corpus.test}


def score_frames(speech: SpeechSet, logliks: Iterable[npt.NDArray[np.float32]],
                 prior_P: npt.NDArray[np.float64]) -> SubsetScore | None:
    """Objf per frame and accuracy over the complete set; None without alignment."""
    if not speech.is_aligned:
        return None
    log_posterior_TP = np.concatenate(list(logliks)) + np.log(prior_P)
    pdf_T = speech.frames.pdf_T
    return SubsetScore(float(log_posterior_TP[np.arange(len(pdf_T)), pdf_T].mean()),
                       float((log_posterior_TP.argmax(axis=1) == pdf_T).mean()))


def log_likelihoods(frames: FrameSet, egs: EgsConfig, model: nn.Module,
                    prior_P: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield T x P per utterance: log posterior minus log prior, up to a constant."""
    log_prior_P = torch.from_numpy(np.log(prior_P)).float()
    for x_TD in spliced_utterances(frames, egs.left_context, egs.right_context):
        with torch.no_grad():
            yield (utterance_logits(model, torch.from_numpy(x_TD)).log_softmax(dim=1) - log_prior_P).numpy()


def computed_log_likelihoods(sets: Iterable[SpeechSet], egs: EgsConfig, model: nn.Module,
                             prior_P: npt.NDArray[np.float64]) -> Scores:
    """Return a function of the name of an utterance to its `log_likelihoods`."""
    place = {utt_id: (speech, u) for speech in sets for u, utt_id in enumerate(speech.frames.utt_ids)}

    def compute(utt_id: str) -> npt.NDArray[np.float32]:
        speech, u = place[utt_id]
        return next(log_likelihoods(speech.only(u).frames, egs, model, prior_P))
    return compute


def coarse(config: DecodeConfig) -> DecodeConfig:
    """Return the settings with some of the scales and penalties, which are enough for a rung."""
    return replace(config, acoustic_scales=config.acoustic_scales[::_STEP], word_penalties=config.word_penalties[::_STEP])


def word_errors(corpus: Corpus, config: DecodeConfig, logliks: Scores, report: Report) -> WordErrors:
    """Return the errors on a part of valid, with the best of some weights and a narrow search."""
    language, valid = corpus.language, corpus.valid
    config = replace(coarse(config), beam=min(config.beam, _BEAM), max_active=min(config.max_active, _MAX_ACTIVE))
    chosen = evaluation.spread_subset(np.diff(valid.frames.offsets).tolist())
    utt_ids = [valid.frames.utt_ids[u] for u in chosen]
    scores = Progress(report, "WER of the rung: scores", len(chosen))
    found = [logliks(utt_id) for utt_id in scores.each(utt_ids)]
    report(Phase("WER of the rung: building the decoding graph"))
    graph = evaluation.build_graph(language, config)
    texts = [valid.texts[u] for u in chosen]
    return tuning.choose(evaluation.sweep(graph, config, texts, utt_ids, found, language.num_pdfs, report,
                                          "WER of the rung: decoding"))[1]
