"""Forced alignment of T frames to P pdfs: equal segmentation first, then best paths."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr.align import best_paths
from ngsgd.asr.align.best_paths import TranscriptGraph
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.features import gaussians
from ngsgd.asr.features.gaussians import FRAMES_AT_ONCE, Axes, Piece, StateMixtures
from ngsgd.asr.features.gaussians import Scores as Features
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import PdfIds
from ngsgd.data import mapped
from ngsgd.errors import DataError
from ngsgd.phase import Each

# frames at either end of an utterance that are silence initially; at most a tenth of it
_EDGE_FRAMES, NUM_SILENCE_PASSES = 10, 5
# frames on either side over which scores of speech and silence are smoothed
_SMOOTHING = 5

States = Mapping[str, PdfIds]  # utt_id -> states of its frames
# utt_id -> T x P: log densities, or log posteriors minus log priors
Scores = Callable[[str], npt.NDArray[np.float32]]
# utt_id, L pdfs -> T x L
Score = Callable[[str, npt.NDArray[np.int64]], npt.NDArray[np.float32]]


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


def silence_start(corpus: Corpus, oov: str, x_TK: Mapping[str, Features], each: Each = iter) -> dict[str, PdfIds]:
    """Return a flat start in which only speech frames are divided into the states of the words.

    Two Gaussians, of the first and last frames of all utterances and of the others, classify
    frames. If the speech is shorter than its states, the complete utterance is divided.
    """
    starts, topology = flat_start(corpus, oov), corpus.language.topology
    is_speech = {}
    for utt_id, pdf_T in starts.items():
        frame_T, width = np.arange(len(pdf_T)), min(_EDGE_FRAMES, len(pdf_T) // 10)
        is_speech[utt_id] = ((frame_T >= width) & (frame_T < len(pdf_T) - width)).astype(np.int32)
    train = [utt_id for utt_id in corpus.train.frames.utt_ids if utt_id in starts]
    for number in each(range(1, NUM_SILENCE_PASSES + 1)):
        fitted, _ = StateMixtures.single(lambda: gaussians.joined((x_TK[utt_id], is_speech[utt_id]) for utt_id in train), 2)
        # the Gaussians are of the training set, so the others need the last pass alone
        for utt_id in starts if number == NUM_SILENCE_PASSES else train:
            if len(starts[utt_id]) > 2 * _SMOOTHING:
                better_T = np.diff(fitted.log_likelihood(x_TK[utt_id]), axis=1)[:, 0]
                is_speech[utt_id] = (np.convolve(better_T, np.ones(2 * _SMOOTHING + 1), mode="same") > 0).astype(np.int32)
    for utt_id, words, _ in _utterances(corpus, oov):
        spoken = [pdf for word in words for pdf in topology.pdfs_of(topology.lexicon[word][0])]
        if utt_id in starts and is_speech[utt_id].sum() >= len(spoken):
            for mask_T, pdfs in ((is_speech[utt_id] == 0, topology.silence_pdfs), (is_speech[utt_id] == 1, spoken)):
                starts[utt_id][mask_T] = np.array(pdfs, np.int32)[np.arange(mask_T.sum()) * len(pdfs) // max(1, mask_T.sum())]
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


class Transcripts:
    """Graphs of the transcripts of all sets; made when read, but kept for a small training set.

    `oov` replaces words missing in the lexicon. A `given` decoding graph has its own numbering of
    states; a language `tied` has tied states.
    """

    def __init__(self, corpus: Corpus, oov: str, *, given: graphs.Graph | None = None, tied: Language | None = None) -> None:
        self._words = {utt_id: words for utt_id, words, _ in _utterances(corpus, oov)}
        self._topology, self._given, self._tied = corpus.language.topology, given, tied
        self._in_context = graphs.graphs_in_context(tied) if tied else None
        self._is_kept = corpus.train.frames.num_frames <= FRAMES_AT_ONCE
        self._kept: dict[str, TranscriptGraph] = {}

    def __getitem__(self, utt_id: str) -> TranscriptGraph:
        if utt_id in self._kept:
            return self._kept[utt_id]
        words = self._words[utt_id]
        if self._tied and self._in_context:
            graph = graphs.of_transcript_in_context(self._tied, self._in_context, words)
        else:
            graph = graphs.within(self._given, words) if self._given else graphs.of_transcript(self._topology, words)
        found = TranscriptGraph.of(graph)
        if self._is_kept:
            self._kept[utt_id] = found
        return found


@dataclass(frozen=True)
class Realigned:
    """Best paths and their cost."""

    states: dict[str, PdfIds]  # utt_id -> states of its frames
    lost: tuple[str, ...]  # utterances without a path, which keep their previous states
    cost_per_frame: float


def realign(transcripts: Transcripts, states: States, score: Score, each: Each = iter) -> Realigned:
    """Find the best path of each utterance in `states` through the graph of its transcript.

    `score` is called once for each utterance.
    """
    realigned, lost, cost, num_frames = dict(states), list[str](), 0.0, 0
    utt_ids, made = list(states), deque[TranscriptGraph]()

    def sizes() -> Iterator[tuple[int, int]]:
        for utt_id in utt_ids:
            made.append(transcripts[utt_id])
            yield len(states[utt_id]), made[-1].graph.num_states

    done = iter(each(utt_ids))
    for batch in best_paths.batches(sizes()):
        # reports that the utterances of the batch are done
        some = list(itertools.islice(done, len(batch)))
        parts = [made.popleft() for _ in some]
        scores = [score(utt_id, part.pdf_L) for utt_id, part in zip(some, parts, strict=True)]
        for utt_id, (pdf_T, path_score) in zip(some, best_paths.best_paths(parts, scores), strict=True):
            if path_score == -math.inf:
                lost.append(utt_id)
                continue
            realigned[utt_id] = pdf_T
            cost, num_frames = cost - path_score, num_frames + len(pdf_T)
    return Realigned(realigned, tuple(lost), cost / max(1, num_frames))


def train_mixtures(transcripts: Transcripts, states: States, x_TK: Mapping[str, Features], num_pdfs: int, *,
                   num_gaussians: int, realigns_at: Collection[int], each: Each = iter) -> tuple[StateMixtures, Realigned]:
    """Alternate between EM of growing mixtures and realignment.

    `states` are those of training utterances; `realigns_at` has the numbers, from 1, of the passes
    before which they are aligned again. Returns the mixtures and the last alignment.
    """
    found = Realigned(dict(states), (), math.inf)

    def realigned(number: int, mixtures: StateMixtures) -> None:
        nonlocal found
        if number in realigns_at:
            found = realign(transcripts, found.states, scores_of(mixtures, x_TK))

    def pieces() -> Iterator[Piece]:
        return gaussians.joined((x_TK[utt_id], pdf_T) for utt_id, pdf_T in found.states.items())
    return gaussians.train(pieces, num_pdfs, num_gaussians=num_gaussians, realign=realigned, each=each), found


class Decorrelated(Mapping[str, Features]):
    """T x K decorrelated features of all sets; computed when read, but for a small training set."""

    def __init__(self, corpus: Corpus) -> None:
        self._sets = (corpus.train, corpus.valid, corpus.test)
        self._axes = Axes.of(corpus.train.frames.features_TD)
        self._place = {utt_id: (speech.frames, u) for speech in self._sets for u, utt_id in enumerate(speech.frames.utt_ids)}
        self._kept: dict[str, Features] = {}
        if corpus.train.frames.num_frames <= FRAMES_AT_ONCE:
            self._kept = {utt_id: self[utt_id] for utt_id in corpus.train.frames.utt_ids}

    def __getitem__(self, utt_id: str) -> Features:
        if utt_id in self._kept:
            return self._kept[utt_id]
        frames, u = self._place[utt_id]
        return self._axes.apply(mapped.copied(frames.features_TD[slice(*frames.offsets[u:u + 2])]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def scores_of(mixtures: StateMixtures, x_TK: Mapping[str, Features]) -> Score:
    """Return the function of the log-likelihoods of some pdfs of an utterance."""
    return lambda utt_id, pdf_L: mixtures.log_likelihood(x_TK[utt_id], pdf_L)


def _utterances(corpus: Corpus, oov: str) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """(name, words of the lexicon, number of frames) of every utterance of the three sets."""
    lexicon = corpus.language.topology.lexicon
    for speech in corpus.sets.values():
        lengths = np.diff(speech.frames.offsets).tolist()
        for utt_id, words, length in zip(speech.frames.utt_ids, speech.texts, lengths, strict=True):
            yield utt_id, tuple(word if word in lexicon else oov for word in words), length
