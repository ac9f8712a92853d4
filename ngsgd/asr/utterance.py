"""One utterance: as audio with its labels, or as features; and the frames it falls into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# of the corpora that are made here; others have their own (features.sample_rate_hz)
SAMPLE_RATE_HZ = 8000
# samples at that rate: 10 ms
FRAME_SHIFT = 80
# in place of a pdf id, where it is not known
UNALIGNED = -1

Samples = npt.NDArray[np.int16]
# in the range of 16-bit numbers
Audio = Samples | npt.NDArray[np.float32]
PdfIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Utterance:
    """Audio with the words it says and the HMM state of each of its frames."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    samples: Audio
    pdf_T: PdfIds


@dataclass(frozen=True)
class FramedUtterance:
    """Features, not normalised, with the words said in them and the HMM state of each frame, or `UNALIGNED`."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    features_TD: npt.NDArray[np.float32]
    pdf_T: PdfIds


def num_frames(num_samples: int, sample_rate_hz: int = SAMPLE_RATE_HZ) -> int:
    """Frames of Kaldi's snip_edges=false: every 10 ms, windows reflected at the ends."""
    shift = sample_rate_hz // 100
    return (num_samples + shift // 2) // shift


def unaligned(num_frames: int) -> PdfIds:
    return np.full(num_frames, UNALIGNED, dtype=np.int32)


def frame_centres(num_samples: int) -> npt.NDArray[np.int64]:
    """The sample in the middle of each frame's window."""
    return np.arange(num_frames(num_samples)) * FRAME_SHIFT + FRAME_SHIFT // 2


def spread_to_samples(flag_T: npt.NDArray[np.bool_], num_samples: int) -> npt.NDArray[np.bool_]:
    """The flag of the frame that each sample falls into; samples after the last whole frame take that frame's."""
    frame_of_sample = np.minimum(np.arange(num_samples) // FRAME_SHIFT, len(flag_T) - 1)
    return flag_T[frame_of_sample]
