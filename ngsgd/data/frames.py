"""Labeled frames in memory, before they become archives; independent of speech.

Letters: T frames, D feature dimension, U utterances; R side rows of S values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.errors import DataError


@dataclass(frozen=True)
class Side:
    """Additional model inputs of a frame, such as an i-vector; many frames share a row."""

    rows_RS: npt.NDArray[np.float32]
    row_T: npt.NDArray[np.int32]  # index of the row of each frame

    @property
    def dim(self) -> int:
        return int(self.rows_RS.shape[1])


@dataclass(frozen=True)
class FrameSet:
    """Frames of U concatenated utterances, with the class of each frame."""

    # unspliced, optionally memory-mapped; context is added during reading
    features_TD: npt.NDArray[np.float32]
    pdf_T: npt.NDArray[np.int32]  # class (HMM state) of each frame
    offsets: npt.NDArray[np.int64]  # U + 1 entries; utterance u is rows offsets[u]:offsets[u + 1]
    utt_ids: Sequence[str]
    # weight of each frame in the objf; 0 masks a frame; None: all weights are 1
    weight_T: npt.NDArray[np.float32] | None = None
    side: Side | None = None

    def __post_init__(self) -> None:
        num_frames = self.features_TD.shape[0]
        if self.pdf_T.shape != (num_frames,) or self.offsets[-1] != num_frames or len(self.offsets) != len(self.utt_ids) + 1:
            raise DataError(f"{num_frames} frames, {len(self.pdf_T)} labels and offsets up to "
                            f"{self.offsets[-1]} of {len(self.utt_ids)} utterances are inconsistent; prepare the data again.")
        if self.weight_T is not None and self.weight_T.shape != (num_frames,):
            raise DataError(f"{num_frames} frames have {len(self.weight_T)} weights; prepare the data again.")
        if self.side is not None and self.side.row_T.shape != (num_frames,):
            raise DataError(f"{num_frames} frames have {len(self.side.row_T)} side rows; prepare the data again.")

    @classmethod
    def of_utterance(cls, features_TD: npt.NDArray[np.float32], side: Side | None = None) -> FrameSet:
        """Frames of one utterance without name and labels."""
        num_frames = len(features_TD)
        return cls(features_TD, np.zeros(num_frames, np.int32), np.array([0, num_frames]), ("",), side=side)

    @property
    def num_frames(self) -> int:
        return int(self.features_TD.shape[0])

    @property
    def dim(self) -> int:
        return int(self.features_TD.shape[1])

    @property
    def side_dim(self) -> int:
        return self.side.dim if self.side else 0
