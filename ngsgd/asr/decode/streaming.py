"""Streaming decoding: frames arrive in chunks, and words are available with a bounded delay.

This module is independent of the model. The final result equals that of decoding the complete
utterance, because the search and the context of every frame are the same. Until then the words are
those of the best path so far.

Delay of the last frame of a word: the right context, and up to one chunk of frames, in addition to
the computing time.

Letters: T frames of a chunk, D feature dimension, S side values (inputs besides the features), P
pdfs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngsgd.asr import extras
from ngsgd.asr.decode.decoding import Path, path_of
from ngsgd.asr.lang.graphs import Graph

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


@dataclass(frozen=True)
class Search:
    """Settings of the search; see `ngsgd.asr.decode.decoding.best_path`."""

    acoustic_scale: float
    beam: float
    max_active: int


class StreamingDecoder:
    """Decoder of one utterance: call `accept` for each chunk of frames, then `finish`."""

    def __init__(self, graph: Graph, score: Score, search: Search, *, left_context: int, right_context: int,
                 chunk_frames: int = 10, side: SideInput | None = None) -> None:
        """Create a decoder.

        Args:
            graph: the decoding graph.
            score: acoustic scores of spliced frames.
            search: settings of the search.
            left_context: frames before a frame in the input of the network.
            right_context: frames after a frame in the input of the network.
            chunk_frames: frames scored together; fewer shorten the delay and slow down the network.
            side: side inputs. It must receive the same frames before this decoder, and its end
                before `finish`.
        """
        # kaldifst first: kaldi_decoder uses its graphs
        extras.load("kaldifst", extra="asr", purpose="Decoding")
        self._kaldi_decoder: Any = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
        options = self._kaldi_decoder.FasterDecoderOptions(beam=search.beam, max_active=search.max_active)
        self._decoder: Any = self._kaldi_decoder.FasterDecoder(graph.fst, options)
        self._decoder.init_decoding()
        self._graph, self._score, self._search = graph, score, search
        self._left, self._right, self._chunk, self._side = left_context, right_context, chunk_frames, side
        self._ahead = max(right_context, side.right_context if side else 0)
        # frames that are still needed, including context
        self._frames = np.zeros((0, 0), np.float32)
        # index in the utterance of the first of these frames
        self._first = 0
        self.num_decoded = 0

    @property
    def max_delay_frames(self) -> int:
        """Maximum number of following frames before a frame is searched."""
        return self._ahead + self._chunk - 1

    def accept(self, features_TD: Features) -> None:
        """Accept the next frames, and search as far as their context allows."""
        self._frames = np.concatenate([self._frames, features_TD]) if len(self._frames) else np.array(features_TD, np.float32)
        while self._first + len(self._frames) - self._ahead - self.num_decoded >= self._chunk:
            self._advance(self._chunk, self._first + len(self._frames) - 1)

    def words(self) -> tuple[str, ...]:
        """Words of the best path so far; they may still change."""
        return self._path(is_at_end=False).words

    def finish(self) -> Path:
        """Return the best path at the end of the utterance; the last frame is repeated as
        context.
        """
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
        scaled_TP = np.ascontiguousarray(self._search.acoustic_scale * loglik_TP, dtype=np.float32)
        self._decoder.advance_decoding(self._kaldi_decoder.DecodableCtc(scaled_TP, self.num_decoded))
        self.num_decoded += num_frames
        gone = max(0, self.num_decoded - self._left - self._first)
        self._frames, self._first = self._frames[gone:], self._first + gone

    def _path(self, *, is_at_end: bool) -> Path:
        if not self.num_decoded:
            return Path((), np.zeros(0, np.int32), math.inf, is_complete=False)
        return path_of(self._decoder, self._graph, use_final=is_at_end)
