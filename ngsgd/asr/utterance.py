"""Utterances with audio and labels, or with features; and their frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# of the generated corpora; others have features.sample_rate_hz
SAMPLE_RATE_HZ = 8000
FRAME_SHIFT = 80  # samples at that rate: 10 ms
UNALIGNED = -1  # placeholder for an unknown pdf id

Samples = npt.NDArray[np.int16]
Audio = Samples | npt.NDArray[np.float32]  # at 16-bit scale
PdfIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Utterance:
    """Audio with its words and the HMM state of each of its frames."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    samples: Audio
    pdf_T: PdfIds


@dataclass(frozen=True)
class FramedUtterance:
    """Features, not normalized, with words and the HMM state of each frame, or `UNALIGNED`."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    features_TD: npt.NDArray[np.float32]
    pdf_T: PdfIds


def num_frames(num_samples: int, sample_rate_hz: int = SAMPLE_RATE_HZ) -> int:
    """Number of frames (every 10 ms, snip_edges=false in Kaldi, windows reflected at the ends)."""
    shift = sample_rate_hz // 100
    return (num_samples + shift // 2) // shift


def unaligned(num_frames: int) -> PdfIds:
    return np.full(num_frames, UNALIGNED, dtype=np.int32)


def frame_centers(num_samples: int) -> npt.NDArray[np.int64]:
    """The sample in the middle of the window of each frame."""
    return np.arange(num_frames(num_samples)) * FRAME_SHIFT + FRAME_SHIFT // 2


def spread_to_samples(flag_T: npt.NDArray[np.bool_], num_samples: int) -> npt.NDArray[np.bool_]:
    """Flag of the frame of each sample; samples after the last complete frame get its flag."""
    frame_of_sample = np.minimum(np.arange(num_samples) // FRAME_SHIFT, len(flag_T) - 1)
    return flag_T[frame_of_sample]
