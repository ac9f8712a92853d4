"""Examples cut one by one, as C.2 of arXiv 1410.7455 and Kaldi's nnet3-get-egs describe them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngsgd.data.frames import FrameSet


def windows_of(frames: FrameSet, utterance: int, left: int, right: int,
               frames_per_eg: int) -> list[tuple[npt.NDArray[np.float32], list[int]]]:
    """(features, classes) of each example of one utterance; -1 where the utterance has ended."""
    first, end = int(frames.offsets[utterance]), int(frames.offsets[utterance + 1])
    found = []
    for start in range(first, end, frames_per_eg):
        rows = [min(max(t, first), end - 1) for t in range(start - left, start + frames_per_eg + right)]
        classes = [int(frames.pdf_T[t]) if t < end else -1 for t in range(start, start + frames_per_eg)]
        found.append((np.stack([frames.features_TD[t] for t in rows]), classes))
    return found
