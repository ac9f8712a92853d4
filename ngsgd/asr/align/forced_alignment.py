"""Forced alignment: equal segmentation first, then best paths, independent of any model.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.align.gaussians import Axes, Gaussians, Matrix
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import PdfIds
from ngsgd.errors import DataError

# frames at either end of an utterance that are labeled silence initially; at most a tenth of it
EDGE_FRAMES = 10
NUM_SILENCE_PASSES = 5
# frames on either side over which speech/silence scores are smoothed
SMOOTHING = 5
# maximum number of active states: the graph of a transcript is small
NO_LIMIT = 1_000_000
# beam of the search through the graph of a transcript, nats
BEAM = 200.0
# factor of the beam for an utterance whose search failed
WIDER = 8.0

# utt_id -> states of its frames
States = Mapping[str, PdfIds]


def flat_start(corpus: Corpus, oov: str) -> dict[str, PdfIds]:
    """Divide every utterance into equal parts, one for each state of its words.

    Silence of the length of a phone is assumed before, between and after the words, which have
    their first pronunciation. Utterances with fewer frames than states are omitted.
    """
    states = {}
    for utt_id, words, num_frames in _utterances(corpus, oov):
        path = equal_parts(corpus.language.topology, words, num_frames)
        if path is not None:
            states[utt_id] = path
    if not states:
        raise DataError("No utterance has as many frames as its words have states; check the "
                        "lexicon, and that the transcripts belong to this audio.")
    return states


def silence_start(corpus: Corpus, oov: str) -> dict[str, PdfIds]:
    """Return a flat start in which only speech frames are divided into the states of the words.

    Two Gaussians classify frames: one is initialized with the first and last frames of all
    utterances, one with the others. They are re-estimated a few times on smoothed frame decisions.
    If the speech is shorter than its states, the complete utterance is divided.
    """
    starts = flat_start(corpus, oov)
    x_TK = _decorrelated(corpus)
    is_silence = {utt_id: _edges(len(x_TK[utt_id])) for utt_id in starts}
    train = [utt_id for utt_id in corpus.train.frames.utt_ids if utt_id in starts]
    for _ in range(NUM_SILENCE_PASSES):
        is_speech_T = np.concatenate([~is_silence[utt_id] for utt_id in train])
        fitted = Gaussians.fit(np.concatenate([x_TK[utt_id] for utt_id in train]),
                               is_speech_T.astype(np.int32), 2)
        for utt_id in starts:
            loglik_T2 = fitted.log_likelihood(x_TK[utt_id])
            better_T = np.convolve(loglik_T2[:, SILENCE_PDF] - loglik_T2[:, 1],
                                   np.ones(2 * SMOOTHING + 1), mode="same")
            is_silence[utt_id] = better_T[:len(loglik_T2)] > 0 if len(loglik_T2) > 2 * SMOOTHING else is_silence[utt_id]
    for utt_id, words, _ in _utterances(corpus, oov):
        topology = corpus.language.topology
        # the first pronunciation of each word
        spoken = [pdf for word in words for pdf in topology.pdfs_of(topology.lexicon[word][0])]
        if utt_id in starts and (~is_silence[utt_id]).sum() >= len(spoken):
            starts[utt_id] = _spread(is_silence[utt_id], spoken, topology.silence_pdfs)
    return starts


def _edges(num_frames: int) -> npt.NDArray[np.bool_]:
    width = min(EDGE_FRAMES, num_frames // 10)
    frame_T = np.arange(num_frames)
    return (frame_T < width) | (frame_T >= num_frames - width)


def _spread(is_silence_T: npt.NDArray[np.bool_], spoken: Sequence[int],
            silence: Sequence[int]) -> PdfIds:
    """Assign equal parts of speech and silence frames to their states."""
    pdf_T = np.empty(len(is_silence_T), dtype=np.int32)
    for mask_T, states in ((is_silence_T, silence), (~is_silence_T, spoken)):
        pdf_T[mask_T] = np.array(states, dtype=np.int32)[np.arange(mask_T.sum()) * len(states) // max(1, mask_T.sum())]
    return pdf_T


def equal_parts(topology: Topology, words: Sequence[str], num_frames: int) -> PdfIds | None:
    """States of `num_frames` frames in equal parts; None if there are fewer frames than states."""
    repeats = max(1, STATES_PER_PHONE // topology.num_silence_states)
    silence = [pdf for pdf in topology.silence_pdfs for _ in range(repeats)]
    spoken = [topology.pdfs_of(topology.lexicon[word][0]) for word in words]
    states = [*silence, *(pdf for pdfs in spoken for pdf in (*pdfs, *silence))]
    if num_frames < len(states):
        states = [pdf for pdfs in spoken for pdf in pdfs]
    if num_frames < len(states):
        return None
    return np.array(states, dtype=np.int32)[np.arange(num_frames) * len(states) // num_frames]


def score_by_gaussians(corpus: Corpus, states: States) -> dict[str, npt.NDArray[np.float32]]:
    """T x P scores of every utterance from Gaussians of the training set."""
    x_TK = _decorrelated(corpus)
    train = [utt_id for utt_id in corpus.train.frames.utt_ids if utt_id in states]
    fitted = Gaussians.fit(np.concatenate([x_TK[utt_id] for utt_id in train]),
                           np.concatenate([states[utt_id] for utt_id in train]), corpus.num_pdfs)
    return {utt_id: fitted.log_likelihood(x) for utt_id, x in x_TK.items()}


@dataclass(frozen=True)
class Realigned:
    """Best paths and their cost."""

    # utt_id -> states of its frames
    states: dict[str, PdfIds]
    # utterances without a path, which keep their previous states
    lost: tuple[str, ...]
    cost_per_frame: float


def realign(corpus: Corpus, states: States, logliks: Mapping[str, npt.NDArray[np.float32]], oov: str,
            given: graphs.Graph | None = None, tied: Language | None = None) -> Realigned:
    """Find the best path of each utterance in `states` through the graph of its transcript.

    Args:
        corpus: the speech.
        states: the utterances to align, and the states of those without a path.
        logliks: for each utterance, T x P: log densities, or log posteriors minus log priors.
        oov: word that replaces words missing in the lexicon.
        given: a decoding graph with its own numbering of states; the result uses that numbering.
            Default: the states of the phones of the lexicon.
        tied: a language with a decision tree, whose tied states `logliks` scores. The result has
            the states of the phones of the lexicon.
    """
    realigned, lost, cost, num_frames = {}, [], 0.0, 0
    in_context = graphs.graphs_in_context(tied) if tied else None
    for utt_id, words, length in _utterances(corpus, oov):
        if utt_id in states:
            if tied and in_context:
                graph = graphs.of_transcript_in_context(tied, in_context, words)
            elif given:
                graph = graphs.within(given, words)
            else:
                graph = graphs.of_transcript(corpus.language.topology, words)
            path = _best_path(graph, logliks[utt_id])
            found_T = path.pdf_T
            if graph.phone_states is not None:
                found_T = np.array(graph.phone_states, np.int32)[found_T]
            realigned[utt_id] = found_T if path.is_complete else states[utt_id]
            if path.is_complete:
                cost, num_frames = cost + path.cost, num_frames + length
            else:
                lost.append(utt_id)
    return Realigned(realigned, tuple(lost), cost / max(1, num_frames))


def share_changed(before: States, after: States) -> float:
    """Fraction of all frames whose state changed."""
    changed = sum(int((after[utt_id] != before[utt_id]).sum()) for utt_id in after)
    return changed / sum(map(len, after.values()))


def _best_path(graph: graphs.Graph, loglik_TP: npt.NDArray[np.float32]) -> decoding.Path:
    for width in (BEAM, WIDER * BEAM):
        path = decoding.best_path(graph, loglik_TP, acoustic_scale=1.0, beam=width, max_active=NO_LIMIT)
        if path.is_complete:
            break
    return path


def _decorrelated(corpus: Corpus) -> dict[str, Matrix]:
    """T x K decorrelated features of every utterance."""
    axes = Axes.of(corpus.train.frames.features_TD)
    return {utt_id: axes.apply(features_TD) for speech in (corpus.train, corpus.valid, corpus.test)
            for utt_id, features_TD in zip(speech.frames.utt_ids, speech.split_features(),
                                           strict=True)}


def _utterances(corpus: Corpus, oov: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(name, words of the lexicon, number of frames) of every utterance of the three sets."""
    lexicon = corpus.language.topology.lexicon
    for speech in (corpus.train, corpus.valid, corpus.test):
        lengths = np.diff(speech.frames.offsets).tolist()
        for utt_id, words, num_frames in zip(speech.frames.utt_ids, speech.texts, lengths,
                                             strict=True):
            yield utt_id, tuple(word if word in lexicon else oov for word in words), num_frames
