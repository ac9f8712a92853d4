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

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ngsgd.asr.decode import decoding
from ngsgd.asr.decode.decoding import Path, Search
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


class StreamingDecoder:
    """Decoder of one utterance: call `accept` for each chunk of frames, then `finish`."""

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
        self._decoder = decoding.new_decoder(graph, search)
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
        scores = decoding.decodable(loglik_TP, self._search.acoustic_scale, self.num_decoded)
        self._decoder.advance_decoding(scores)
        self.num_decoded += num_frames
        gone = max(0, self.num_decoded - self._left - self._first)
        self._frames, self._first = self._frames[gone:], self._first + gone

    def _path(self, *, is_at_end: bool) -> Path:
        if not self.num_decoded:
            return decoding.NO_PATH
        return decoding.path_of(self._decoder, self._graph, use_final=is_at_end)
