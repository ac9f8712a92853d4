"""Forced alignment of T frames to P pdfs: equal segmentation first, then best paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.align.gaussians import FRAMES_AT_ONCE, Axes, Gaussians, Matrix, Piece
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import PdfIds
from ngsgd.data import mapped
from ngsgd.errors import DataError
from ngsgd.phase import Each

# frames at either end of an utterance that are labeled silence initially; at most a tenth of it
EDGE_FRAMES = 10
NUM_SILENCE_PASSES = 5
# frames on either side over which speech/silence scores are smoothed
SMOOTHING = 5
# through the graph of a transcript, which is small
_SEARCH = decoding.Search(acoustic_scale=1.0, beam=200.0, max_active=1_000_000)
_WIDER = replace(_SEARCH, beam=1600.0)  # for an utterance whose search failed

States = Mapping[str, PdfIds]  # utt_id -> states of its frames
# utt_id -> T x P: log densities, or log posteriors minus log priors
Scores = Mapping[str, npt.NDArray[np.float32]]


def flat_start(corpus: Corpus, oov: str) -> dict[str, PdfIds]:
    """Divide every utterance into equal parts, one for each state of its words' first
    pronunciations, with silence around them. Those with fewer frames than states are omitted.
    """
    paths = ((utt_id, equal_parts(corpus.language.topology, words, num_frames))
             for utt_id, words, num_frames in _utterances(corpus, oov))
    states = {utt_id: path for utt_id, path in paths if path is not None}
    if not states:
        raise DataError("No utterance has as many frames as its words have states; check the "
                        "lexicon, and that the transcripts belong to this audio.")
    return states


def silence_start(corpus: Corpus, oov: str) -> dict[str, PdfIds]:
    """Return a flat start in which only speech frames are divided into the states of the words.

    Two Gaussians, of the first and last frames of all utterances and of the others, classify
    frames. If the speech is shorter than its states, the complete utterance is divided.
    """
    starts = flat_start(corpus, oov)
    x_TK = Decorrelated(corpus)
    is_silence = {}
    for utt_id, pdf_T in starts.items():
        frame_T, width = np.arange(len(pdf_T)), min(EDGE_FRAMES, len(pdf_T) // 10)
        is_silence[utt_id] = (frame_T < width) | (frame_T >= len(pdf_T) - width)
    train = [utt_id for utt_id in corpus.train.frames.utt_ids if utt_id in starts]
    for _ in range(NUM_SILENCE_PASSES):
        fitted = Gaussians.fit(lambda: x_TK.pieces((utt_id, (~is_silence[utt_id]).astype(np.int32)) for utt_id in train), 2)
        for utt_id in starts:
            loglik_T2 = fitted.log_likelihood(x_TK[utt_id])
            if len(loglik_T2) > 2 * SMOOTHING:
                better_T = loglik_T2[:, SILENCE_PDF] - loglik_T2[:, 1]
                smooth_T = np.convolve(better_T, np.ones(2 * SMOOTHING + 1), mode="same")
                is_silence[utt_id] = smooth_T > 0
    topology = corpus.language.topology
    for utt_id, words, _ in _utterances(corpus, oov):
        # the first pronunciation of each word
        spoken = [pdf for word in words for pdf in topology.pdfs_of(topology.lexicon[word][0])]
        if utt_id in starts and (~is_silence[utt_id]).sum() >= len(spoken):
            pdf_T = np.empty_like(starts[utt_id])
            # equal parts of silence and speech
            for mask_T, pdfs in ((is_silence[utt_id], topology.silence_pdfs), (~is_silence[utt_id], spoken)):
                at_T = np.arange(mask_T.sum()) * len(pdfs) // max(1, mask_T.sum())
                pdf_T[mask_T] = np.array(pdfs, np.int32)[at_T]
            starts[utt_id] = pdf_T
    return starts


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


def score_by_gaussians(corpus: Corpus, states: States, oov: str, x_TK: Decorrelated) -> Scores:
    """T x P scores from Gaussians of the training set; computed when read, for states of words."""
    train = [utt_id for utt_id in corpus.train.frames.utt_ids if utt_id in states]
    fitted = Gaussians.fit(lambda: x_TK.pieces((utt_id, states[utt_id]) for utt_id in train), corpus.num_pdfs)
    topology, words_of = corpus.language.topology, {utt_id: words for utt_id, words, _ in _utterances(corpus, oov)}

    def compute(utt_id: str) -> npt.NDArray[np.float32]:
        phones = {phone for word in words_of[utt_id] for phones in topology.lexicon[word] for phone in phones}
        pdfs = {*topology.silence_pdfs, *topology.pdfs_of(tuple(phones))}
        return fitted.log_likelihood(x_TK[utt_id], sorted(pdfs))

    return Computed(list(x_TK), compute)


class Computed(Mapping[str, npt.NDArray[np.float32]]):
    """Scores of utterances that are computed whenever they are read, and not kept."""

    def __init__(self, utt_ids: Sequence[str], compute: Callable[[str], npt.NDArray[np.float32]]) -> None:
        self._utt_ids, self._compute = dict.fromkeys(utt_ids), compute

    def __getitem__(self, utt_id: str) -> npt.NDArray[np.float32]:
        if utt_id not in self._utt_ids:
            raise KeyError(utt_id)
        return self._compute(utt_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._utt_ids)

    def __len__(self) -> int:
        return len(self._utt_ids)


@dataclass(frozen=True)
class Realigned:
    """Best paths and their cost."""

    states: dict[str, PdfIds]  # utt_id -> states of its frames
    lost: tuple[str, ...]  # utterances without a path, which keep their previous states
    cost_per_frame: float


def realign(corpus: Corpus, states: States, logliks: Scores, oov: str,
            given: graphs.Graph | None = None, tied: Language | None = None, each: Each = iter) -> Realigned:
    """Find the best path of each utterance in `states` through the graph of its transcript.

    `oov` replaces words missing in the lexicon, and `logliks` are read once. A `given` decoding
    graph has its own numbering of states, which the result has too. `logliks` may be of the tied
    states of a language `tied`; the result has the states of the phones of the lexicon.
    """
    realigned, lost, cost, num_frames = {}, [], 0.0, 0
    in_context = graphs.graphs_in_context(tied) if tied else None
    for utt_id, words, length in each(one for one in _utterances(corpus, oov) if one[0] in states):
        if tied and in_context:
            graph = graphs.of_transcript_in_context(tied, in_context, words)
        elif given:
            graph = graphs.within(given, words)
        else:
            graph = graphs.of_transcript(corpus.language.topology, words)
        loglik_TP = logliks[utt_id]
        path = decoding.best_path(graph, loglik_TP, _SEARCH)
        if not path.is_complete:
            path = decoding.best_path(graph, loglik_TP, _WIDER)
        realigned[utt_id] = states[utt_id]
        if not path.is_complete:
            lost.append(utt_id)
            continue
        if graph.phone_states is None:
            realigned[utt_id] = path.pdf_T
        else:
            realigned[utt_id] = np.array(graph.phone_states, np.int32)[path.pdf_T]
        cost, num_frames = cost + path.cost, num_frames + length
    return Realigned(realigned, tuple(lost), cost / max(1, num_frames))


def share_changed(before: States, after: States) -> float:
    """Fraction of all frames whose state changed."""
    changed = sum(int((after[utt_id] != before[utt_id]).sum()) for utt_id in after)
    return changed / sum(map(len, after.values()))


class Decorrelated(Mapping[str, Matrix]):
    """T x K decorrelated features of all sets; computed when read, but for a small training set."""

    def __init__(self, corpus: Corpus) -> None:
        self._sets = (corpus.train, corpus.valid, corpus.test)
        self._axes = Axes.of(corpus.train.frames.features_TD)
        self._place = {utt_id: (speech.frames, u) for speech in self._sets for u, utt_id in enumerate(speech.frames.utt_ids)}
        self._kept: dict[str, Matrix] = {}
        if corpus.train.frames.num_frames <= FRAMES_AT_ONCE:
            self._kept = {utt_id: self[utt_id] for utt_id in corpus.train.frames.utt_ids}

    def __getitem__(self, utt_id: str) -> Matrix:
        if utt_id in self._kept:
            return self._kept[utt_id]
        frames, u = self._place[utt_id]
        return self._axes.apply(mapped.copied(frames.features_TD[slice(*frames.offsets[u:u + 2])]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def pieces(self, labelled: Iterable[tuple[str, PdfIds]]) -> Iterator[Piece]:
        """Yield features and labels of utterances, some of them at once."""
        features, labels = list[Matrix](), list[PdfIds]()
        for utt_id, pdf_T in labelled:
            features.append(self[utt_id])
            labels.append(pdf_T)
            if sum(map(len, labels)) >= mapped.BLOCK_ROWS:
                yield np.concatenate(features), np.concatenate(labels)
                features, labels = [], []
        if labels:
            yield np.concatenate(features), np.concatenate(labels)


def _utterances(corpus: Corpus, oov: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(name, words of the lexicon, number of frames) of every utterance of the three sets."""
    lexicon = corpus.language.topology.lexicon
    for speech in (corpus.train, corpus.valid, corpus.test):
        lengths = np.diff(speech.frames.offsets).tolist()
        for utt_id, words, length in zip(speech.frames.utt_ids, speech.texts, lengths, strict=True):
            yield utt_id, tuple(word if word in lexicon else oov for word in words), length
