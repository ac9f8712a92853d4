"""Decoding while somebody speaks: frames go in as they come, words are known with a bounded delay.  Knows no model.

What comes out at the end is what decoding the whole utterance gives, as the search is the same and every frame is scored with the
same context; until then the words are those of the best path so far.

Delay of a word's last frame: the right context, and up to a chunk of frames that is waited for; beside them what computing takes.

Letters: T frames of a chunk, D feature dimension, S values beside the features, P pdfs.
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
# spliced frames, with what goes beside them, to log posterior minus log prior, T x P
Score = Callable[[Features], Features]


class Beside(Protocol):
    """What goes beside the frames, such as i-vectors, while they come."""

    @property
    def right_context(self) -> int:
        """Frames that must follow a frame before this is known of it."""

    def at(self, time_T: npt.NDArray[np.int64]) -> Features:
        """T x S, for frames of the utterance that enough others have followed, or that has ended."""


@dataclass(frozen=True)
class Search:
    """How the graph is searched; as `ngsgd.asr.decode.decoding.best_path` takes it."""

    acoustic_scale: float
    beam: float
    max_active: int


class StreamingDecoder:
    """One utterance.  `accept` as often as frames come, then `finish`."""

    def __init__(self, graph: Graph, score: Score, search: Search, *, left_context: int, right_context: int,
                 chunk_frames: int = 10, beside: Beside | None = None) -> None:
        """`chunk_frames` are scored together: fewer make the delay shorter and the network slower.

        `beside` must have been given the same frames before this is, and been told of the end before `finish`.
        """
        # first: kaldi_decoder takes its graphs
        extras.load("kaldifst", extra="asr", purpose="Decoding")
        self._kaldi_decoder: Any = extras.load("kaldi_decoder", extra="asr", purpose="Decoding")
        options = self._kaldi_decoder.FasterDecoderOptions(beam=search.beam, max_active=search.max_active)
        self._decoder: Any = self._kaldi_decoder.FasterDecoder(graph.fst, options)
        self._decoder.init_decoding()
        self._graph, self._score, self._search = graph, score, search
        self._left, self._right, self._chunk, self._beside = left_context, right_context, chunk_frames, beside
        self._ahead = max(right_context, beside.right_context if beside else 0)
        # those that are still needed, context included
        self._frames = np.zeros((0, 0), np.float32)
        # the frame of the utterance that they begin with
        self._first = 0
        self.num_decoded = 0

    @property
    def max_delay_frames(self) -> int:
        """Frames that must follow a frame, at most, before it is searched."""
        return self._ahead + self._chunk - 1

    def accept(self, features_TD: Features) -> None:
        """Takes the frames that follow, and searches as far as they reach."""
        self._frames = np.concatenate([self._frames, features_TD]) if len(self._frames) else np.array(features_TD, np.float32)
        while self._first + len(self._frames) - self._ahead - self.num_decoded >= self._chunk:
            self._advance(self._chunk, self._first + len(self._frames) - 1)

    def words(self) -> tuple[str, ...]:
        """Of the best path so far; they may still change."""
        return self._path(is_at_end=False).words

    def finish(self) -> Path:
        """The best path, the utterance having ended; the last frame stands for what would follow it."""
        end = self._first + len(self._frames)
        while self.num_decoded < end:
            self._advance(min(self._chunk, end - self.num_decoded), end - 1)
        return self._path(is_at_end=True)

    def _advance(self, num_frames: int, last: int) -> None:
        """Searches the next `num_frames`; `last` is the newest frame that is there."""
        time_T = np.arange(self.num_decoded, self.num_decoded + num_frames)
        row_TW = np.clip(time_T[:, None] + np.arange(-self._left, self._right + 1), 0, last) - self._first
        x_TI = self._frames[row_TW].reshape(num_frames, -1)
        loglik_TP = self._score(x_TI if self._beside is None else np.hstack([x_TI, self._beside.at(time_T)]))
        scaled_TP = np.ascontiguousarray(self._search.acoustic_scale * loglik_TP, dtype=np.float32)
        self._decoder.advance_decoding(self._kaldi_decoder.DecodableCtc(scaled_TP, self.num_decoded))
        self.num_decoded += num_frames
        gone = max(0, self.num_decoded - self._left - self._first)
        self._frames, self._first = self._frames[gone:], self._first + gone

    def _path(self, *, is_at_end: bool) -> Path:
        if not self.num_decoded:
            return Path((), np.zeros(0, np.int32), math.inf, is_complete=False)
        return path_of(self._decoder, self._graph, use_final=is_at_end)
