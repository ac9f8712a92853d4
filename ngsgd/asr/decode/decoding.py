"""Beam search through a decoding graph for words, states and lattices.

Costs are negative log probabilities; those of frames are scaled by the acoustic scale.
Letters: T frames, D feature dimension, S side values (inputs besides the features), P pdfs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngsgd import files, imports
from ngsgd.asr.lang import openfst
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.utterance import PdfIds

# nats; paths of a lattice cost at most this more than the best, as in Kaldi
LATTICE_BEAM = 8.0


@dataclass(frozen=True)
class Path:
    """The best path; without words and states and with infinite cost if none survived the beam."""

    words: tuple[str, ...]
    pdf_T: PdfIds
    cost: float
    is_complete: bool  # it ends in a final state, not in the middle of a word


NO_PATH = Path((), np.zeros(0, np.int32), math.inf, is_complete=False)
Scores = npt.NDArray[np.float32]  # T x P: log posterior minus log prior


@dataclass(frozen=True)
class Search:
    """Settings of a search."""

    acoustic_scale: float
    beam: float  # in the unit of the scaled costs
    max_active: int  # maximum number of active states


def best_path(graph: Graph, loglik_TP: Scores, search: Search) -> Path:
    """Return the best path; a graph without states has none."""
    if not graph.fst.num_states:
        return NO_PATH
    return path_of(_searched(graph, loglik_TP, search), graph)


def timed_path(graph: Graph, loglik_TP: Scores, search: Search) -> tuple[Path, list[int]]:
    """Return the best path, and the number of frames before each of its word labels."""
    decoder = _searched(graph, loglik_TP, search)
    found, path = decoder.get_best_path(True)
    frames: list[int] = []
    num_frames = 0
    # a linear path, printed from its start; lines of final states have fewer fields
    for line in path.to_str(show_weight_one=True, fst_field_separator=" ").splitlines() if found else ():
        fields = line.split(" ")
        if len(fields) > 3:
            frames += [num_frames] * (fields[3] != "0")
            num_frames += fields[2] != "0"
    return path_of(decoder, graph), frames


def _searched(graph: Graph, loglik_TP: Scores, search: Search) -> Any:
    """Return a FasterDecoder at the end of the utterance; the graph must outlive it."""
    decoder = new_decoder(graph, search)
    decoder.decode(decodable(loglik_TP, search.acoustic_scale))
    return decoder


def new_decoder(graph: Graph, search: Search) -> Any:
    """Return a FasterDecoder before the first frame; the graph must outlive it."""
    # kaldifst first: kaldi_decoder uses its graphs
    openfst.toolkit()
    kaldi_decoder = imports.load("kaldi_decoder", extra="asr", purpose="Decoding")
    options = kaldi_decoder.FasterDecoderOptions(beam=search.beam, max_active=search.max_active)
    return kaldi_decoder.FasterDecoder(graph.fst, options)


def decodable(loglik_TP: Scores, acoustic_scale: float, first_frame: int = 0) -> Any:
    """Return scaled scores for a decoder, from the frame `first_frame` of an utterance."""
    scaled_TP = np.ascontiguousarray(acoustic_scale * loglik_TP, dtype=np.float32)
    kaldi_decoder = imports.load("kaldi_decoder", extra="asr", purpose="Decoding")
    return kaldi_decoder.DecodableCtc(scaled_TP, first_frame)


def path_of(decoder: Any, graph: Graph, *, use_final: bool = True) -> Path:
    """Return the best path of a FasterDecoder; without `use_final` it may end in any state."""
    kaldifst = openfst.toolkit()
    found, path = decoder.get_best_path(use_final)
    if not found:
        return NO_PATH
    _, pdf_labels, word_labels, weight = kaldifst.get_linear_symbol_sequence(path)
    return Path(tuple(graph.words[label - 1] for label in word_labels), np.array(pdf_labels, np.int32) - 1,
                weight.value1 + weight.value2, is_complete=decoder.reached_final())


def lattice(graph: Graph, loglik_TP: Scores, search: Search, *, lattice_beam: float) -> Any:
    """Return all paths within `lattice_beam` of the best (kaldifst.Lattice), with labels + 1."""
    kaldi_decoder = imports.load("kaldi_decoder", extra="asr", purpose="Decoding")
    config = kaldi_decoder.LatticeSimpleDecoderConfig(beam=search.beam, lattice_beam=lattice_beam)
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph.fst, config)
    decoder.decode(decodable(loglik_TP, search.acoustic_scale))
    return decoder.get_raw_lattice()[1]


def write_lattices(folder: FilePath, graph: Graph, utt_ids: Sequence[str], logliks: Sequence[Scores],
                   search: Search, *, lattice_beam: float) -> None:
    """Write `folder`/words.txt and `folder`/UTTERANCE.lat.txt (slashes become underscores): lines
    "state state pdf+1 word graph-cost,scaled-acoustic-cost", the text form of OpenFst.
    """
    folder.mkdir()
    files.write_text(folder / "words.txt", "".join(f"{word} {number}\n" for number, word in enumerate(("<eps>", *graph.words))))
    for utt_id, loglik_TP in zip(utt_ids, logliks, strict=True):
        paths = lattice(graph, loglik_TP, search, lattice_beam=lattice_beam)
        files.write_text(folder / f"{utt_id.replace('/', '_')}.lat.txt", paths.to_str(show_weight_one=True))


Features = npt.NDArray[np.float32]
# spliced frames with side values -> log posterior minus log prior, T x P
Score = Callable[[Features], Features]


class SideInput(Protocol):
    """Side inputs of the frames, such as i-vectors, computed while frames arrive."""

    @property
    def right_context(self) -> int:
        """Number of following frames needed before the values of a frame are known."""

    def at(self, time_T: npt.NDArray[np.int64]) -> Features:
        """Return T x S values of frames that enough others have followed, or after the end."""


class StreamingDecoder:
    """Decoder of one utterance: call `accept` for each chunk of frames, then `finish`.

    The final result equals that of decoding the complete utterance, because the search and the
    context of every frame are the same. Until then the words are those of the best path so far.

    Delay of the last frame of a word: the right context, and up to one chunk of frames, in addition
    to the computing time.
    """

    def __init__(self, graph: Graph, score: Score, search: Search, *, left_context: int, right_context: int,
                 chunk_frames: int = 10, side: SideInput | None = None) -> None:
        """Create a decoder.

        Args:
            graph, score, search: decoding graph, acoustic scores of spliced frames, settings.
            left_context, right_context: frames around a frame in the input of the network.
            chunk_frames: frames scored together; fewer shorten the delay and slow down the network.
            side: side inputs. It must receive the same frames before this decoder, and its end
                before `finish`.
        """
        self._decoder = new_decoder(graph, search)
        self._decoder.init_decoding()
        self._graph, self._score, self._search = graph, score, search
        self._left, self._right, self._chunk, self._side = left_context, right_context, chunk_frames, side
        self._ahead = max(right_context, side.right_context if side else 0)
        # frames that are still needed, including context, and the index of the first of them
        self._frames, self._first = np.zeros((0, 0), np.float32), 0
        self.num_decoded = 0

    @property
    def max_delay_frames(self) -> int:
        """Maximum number of following frames before a frame is searched."""
        return self._ahead + self._chunk - 1

    def accept(self, features_TD: Features) -> None:
        """Accept the next frames, and search as far as their context allows."""
        self._frames = np.concatenate([self._frames, features_TD]) if len(self._frames) \
            else np.array(features_TD, np.float32)
        while self._first + len(self._frames) - self._ahead - self.num_decoded >= self._chunk:
            self._advance(self._chunk, self._first + len(self._frames) - 1)

    def words(self) -> tuple[str, ...]:
        """Words of the best path so far; they may still change."""
        return self._path(is_at_end=False).words

    def finish(self) -> Path:
        """Return the best path at the end of the utterance, with its last frame as context."""
        end = self._first + len(self._frames)
        while self.num_decoded < end:
            self._advance(min(self._chunk, end - self.num_decoded), end - 1)
        return self._path(is_at_end=True)

    def _advance(self, num_frames: int, last: int) -> None:
        """Search the next `num_frames`; `last` is the newest available frame."""
        time_T = np.arange(self.num_decoded, self.num_decoded + num_frames)
        row_TW = np.clip(time_T[:, None] + np.arange(-self._left, self._right + 1), 0, last) - self._first
        x_TI = self._frames[row_TW].reshape(num_frames, -1)
        loglik_TP = self._score(x_TI if self._side is None else np.hstack([x_TI, self._side.at(time_T)]))
        scores = decodable(loglik_TP, self._search.acoustic_scale, self.num_decoded)
        self._decoder.advance_decoding(scores)
        self.num_decoded += num_frames
        gone = max(0, self.num_decoded - self._left - self._first)
        self._frames, self._first = self._frames[gone:], self._first + gone

    def _path(self, *, is_at_end: bool) -> Path:
        if not self.num_decoded:
            return NO_PATH
        return path_of(self._decoder, self._graph, use_final=is_at_end)
