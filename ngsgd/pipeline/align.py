"""Alignment of frames with HMM states, from the transcripts alone or by a trained model.

A flat start gives each state of the words an equal part of the speech of the utterance. Training
of growing mixtures of Gaussians then alternates with the search for the best path.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ngsgd.asr.align import forced_alignment
from ngsgd.asr.align.forced_alignment import Decorrelated, Scores, States, Transcripts
from ngsgd.asr.align.tree_building import with_tied_states
from ngsgd.asr.corpora import alignments, corpus
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.features import gaussians
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.utterance import UNALIGNED
from ngsgd.config import DataConfig, RunConfig
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.files import cache_name
from ngsgd.interface import option
from ngsgd.object_storage.urls import local_root
from ngsgd.phase import Progress
from ngsgd.pipeline.adaptation import network_input, num_leaves_of, with_ivectors
from ngsgd.pipeline.score import computed_log_likelihoods, word_errors
from ngsgd.pipeline.services import Report
from ngsgd.runs.final_model import load_final
from ngsgd.runs.run_folder import RunFolder
from ngsgd.runs.rungs import Stopwatch

# passes of EM before which the speech is aligned again, about those of train_mono.sh of Kaldi
_REALIGNS_AT = (*range(1, 11), 12, 14, 17, 20, 23, 26, 29)
_TIED_REALIGNS_AT = (9, 17, 24)
# of training speech, at least; Kaldi has 10,000 Gaussians of tied states for five hours
_FRAMES_PER_GAUSSIAN = 100
# increase it if the same settings would give another alignment
RECIPE_VERSION = 5


def cache_folder(config: RunConfig) -> Path:
    """The folder of prepared data of a run."""
    return Path(config.data.cache_dir or local_root(config.output_dir) / "data").absolute()


def with_alignment(config: RunConfig, cache_root: Path, report: Report) -> DataConfig:
    """Return the data settings, with a new alignment if labels are needed."""
    if not corpus.needs_alignment(config.data):
        return config.data
    return replace(config.data, alignment=str(make(config, cache_root, report)))


def make(config: RunConfig, cache_root: Path, report: Report) -> Path:
    """Return the file of the alignment for these data and settings; compute it if needed.

    Raises ConfigError if data.graph numbers the HMM states: a flat start numbers those of the
    lexicon.
    """
    if config.data.graph:
        raise ConfigError(f"data.graph is {config.data.graph}, which defines the numbers of its "
                          "HMM states, but a flat start uses the numbers of the phones of the "
                          "lexicon. Set data.alignment=FILE with the numbers of the graph, such as "
                          "ali.*.gz of Kaldi with its final.mdl, or leave data.graph empty.")
    speech = corpus.prepare_unaligned(config.data, config.features, cache_root, report)
    name = cache_name("ali", version=RECIPE_VERSION, corpus=speech.digest, settings=asdict(config.align),
                      oov_word=config.data.oov_word)
    path = cache_root / f"{name}.npz"
    if not path.exists():
        watch = Stopwatch("flat start")
        known: States = {}
        if config.data.added_dirs and config.data.alignment != "flat":
            # only the speech of data.added_dirs has no labels
            known = {utt_id: pdf_T for utt_id, pdf_T in _labels(speech).items() if not (pdf_T == UNALIGNED).any()}
        states, logliks = _align(speech, config, report, known)
        errors = None
        if config.align.num_full_passes and not known:
            decoded = corpus.with_language_model(speech, config.data, report) if config.data.lm_order else speech
            errors = word_errors(decoded, config.decode, logliks, report)
        alignments.write(path, states)
        watch.stored(path, errors)
    return path


def _labels(speech: Corpus) -> States:
    return {utt_id: pdf_T for one in speech.sets.values()
            for utt_id, pdf_T in zip(one.frames.utt_ids, one.split_pdfs(), strict=True)}


def _align(speech: Corpus, config: RunConfig, report: Report, known: States) -> tuple[States, Scores]:
    """Return the states of unknown utterances, and the scores of Gaussian mixtures."""
    oov, x_TK = config.data.oov_word, forced_alignment.Decorrelated(speech)
    passes = Progress(report, "alignment: speech and silence", forced_alignment.NUM_SILENCE_PASSES, "passes")
    transcripts, starts = Transcripts(speech, oov), forced_alignment.silence_start(speech, oov, x_TK, passes.each)
    if num_short := sum(len(one.texts) for one in speech.sets.values()) - len(starts):
        report(f"align: {counted(num_short, 'utterance is', 'utterances are')} skipped, because they have fewer frames than "
               "their words have states")
    num_gaussians = min(config.align.num_gaussians, speech.train.frames.num_frames // _FRAMES_PER_GAUSSIAN)
    left = {utt_id: pdf_T for utt_id, pdf_T in starts.items() if utt_id not in known}
    return _by_mixtures(speech, transcripts, x_TK, known or starts, left, num_gaussians, () if known else _REALIGNS_AT, report)


def _by_mixtures(speech: Corpus, transcripts: Transcripts, x_TK: Decorrelated, begun: States, left: States,
                 num_gaussians: int, realigns_at: Collection[int], report: Report) -> tuple[States, Scores]:
    """Train mixtures of the training set from its states `begun`; align the utterances `left`."""
    train = {utt_id: begun[utt_id] for utt_id in speech.train.frames.utt_ids if utt_id in begun}
    progress = Progress(report, "alignment: Gaussian mixtures", gaussians.NUM_EM_PASSES, "passes")
    mixtures, found = forced_alignment.train_mixtures(transcripts, train, x_TK, speech.num_pdfs, realigns_at=realigns_at,
                                                      num_gaussians=num_gaussians, each=progress.each)
    left = {utt_id: found.states.get(utt_id, pdf_T) for utt_id, pdf_T in left.items()}
    done = forced_alignment.realign(transcripts, left, forced_alignment.scores_of(mixtures, x_TK),
                                    Progress(report, "alignment", len(left)).each)
    report(f"align: {counted(len(mixtures.pdf_G), 'Gaussian')} of {counted(speech.num_pdfs, 'state')}, log-likelihood "
           f"{-done.cost_per_frame:.3f} per frame" + (
               f", {counted(len(done.lost), 'utterance has', 'utterances have')} no path" if done.lost else ""))
    states = {utt_id: pdf_T for utt_id, pdf_T in done.states.items() if utt_id not in done.lost}
    return states, lambda utt_id: mixtures.log_likelihood(x_TK[utt_id])


def make_tied(config: RunConfig, data: DataConfig, cache_root: Path, report: Report) -> Path:
    """Return the file of an alignment by mixtures of tied states, trained on the labels of `data`.

    The states are those of phones. Kaldi: `train_deltas.sh`.
    """
    speech = corpus.prepare(data, config.features, cache_root, report)
    width = 2 if data.context == "left_biphone" else 3
    speech = with_tied_states(speech, num_leaves_of(config, speech), cache_root, report, width=width)
    path = cache_root / f"{cache_name('ali', version=RECIPE_VERSION, corpus=speech.digest, oov_word=data.oov_word)}.npz"
    if not path.exists():
        watch, x_TK = Stopwatch("tied states"), Decorrelated(speech)
        labels, num_frames = _labels(speech), speech.train.frames.num_frames
        transcripts = Transcripts(speech, data.oov_word, tied=speech.language)
        states, logliks = _by_mixtures(speech, transcripts, x_TK, labels, labels, num_frames // _FRAMES_PER_GAUSSIAN,
                                       _TIED_REALIGNS_AT, report)
        errors = word_errors(speech, config.decode, logliks, report)
        alignments.write(path, of_phones(states, speech.language))
        watch.stored(path, errors)
    return path


def of_phones(states: States, language: Language) -> States:
    """Replace tied states by the states of phones that they belong to."""
    state_P = np.array(language.phone_states(), np.int32)
    return {utt_id: state_P[pdf_T] for utt_id, pdf_T in states.items()}


def label(config: RunConfig, folder: RunFolder, cache_root: Path, report: Report, *, trust: bool = False) -> States:
    """Align all frames by the final model of a run, with the best path of every transcript.

    All pronunciations and optional pauses are allowed, so the labels fit the speech better than
    those of the training. `trust` imports the module of a custom network. Raises ConfigError if the
    corpus is spliced from labeled recordings.
    """
    if config.data.corpus in ("digits", "fsdd"):
        raise ConfigError(f"recipe={config.data.corpus} splices its speech from labeled "
                          f"recordings, which a model of complete strings cannot align; align without {option('model', '')}.")
    model, prior_P = load_final(folder, trust=trust)
    tied = None
    if config.data.num_leaves or config.adaptation.lda_dim:
        # the tree and the transforms are made from the labels and the speech of the run
        data = replace(config.data, alignment=folder.alignment()) if folder.alignment() else \
            with_alignment(config, cache_root, report)
        speech = corpus.prepare(data, config.features, cache_root, report, augment_config=config.augment)
        features, _ = network_input(config, speech, cache_root, report)
        tied = features.language if config.data.num_leaves else None
    else:
        speech = corpus.prepare_unaligned(config.data, config.features, cache_root, report)
        if config.ivectors.dim:
            speech = with_ivectors(config, speech, folder.ivectors, cache_root, report)
        features = speech
    logliks = computed_log_likelihoods(features.sets.values(), config.egs, model, prior_P)
    # the states of a graph of the data have separate numbers, and may be tied
    given = graphs.read(speech.language.given) if config.data.graph and speech.language.given else None
    each = Progress(report, "alignment", len(labels := _labels(speech))).each
    transcripts = Transcripts(speech, config.data.oov_word, given=given, tied=tied)
    done = forced_alignment.realign(transcripts, labels, lambda utt_id, pdf_L: logliks(utt_id)[:, pdf_L], each)
    states = {utt_id: pdf_T for utt_id, pdf_T in done.states.items() if utt_id not in done.lost}
    report(f"align: {counted(len(states), 'utterance')}, {len(done.lost)} without a path skipped; "
           f"log-likelihood {-done.cost_per_frame:.3f} per frame")
    return of_phones(states, tied) if tied else states
