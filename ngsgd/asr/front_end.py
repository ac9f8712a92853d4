"""From audio to the input of a network: samples, features and i-vectors of segments of speech.

Letters: N samples, C channels, T frames, D features.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngsgd.asr import recording
from ngsgd.asr.adapt.projections import FmllrStats
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.ivectors.model import IvectorStream, SpeakerState
from ngsgd.asr.recording import Recording, Samples
from ngsgd.data.frames import Side
from ngsgd.errors import ArgumentError, DataError
from ngsgd.imports import first_line

FRAME_S = 0.01
_BLOCK_S = 5.0  # block length for arrays


@contextlib.contextmanager
def opened(audio: str | Path | npt.ArrayLike | Recording, sample_rate_hz: int | None,
           default_hz: int) -> Iterator[Recording]:
    """Open a file, or samples (N, N x C or C x N) with their rate (None: `default_hz`).

    Raises:
        ArgumentError: the rate is not a number.
        DataError: the audio cannot be read, or has invalid values; or a rate is given for a file.
    """
    if not isinstance(audio, (str, Path)):
        yield audio if isinstance(audio, Recording) else recording_of(audio, sample_rate_hz, default_hz)
        return
    if sample_rate_hz is not None:
        raise DataError(f"sample_rate_hz was given with the file {audio}, whose header specifies "
                        "it; omit sample_rate_hz.")
    with recording.opened(Path(audio)) as source:
        yield source


def rate_of(sample_rate_hz: Any, default_hz: int) -> int:
    """Return the sampling rate of samples; ArgumentError for another type than a number."""
    if sample_rate_hz is None:
        return default_hz
    is_number = isinstance(sample_rate_hz, numbers.Real) and not isinstance(sample_rate_hz, bool)
    if not is_number or not float(sample_rate_hz).is_integer():
        raise ArgumentError(f"sample_rate_hz is {sample_rate_hz!r}; pass an integer, such as 16000.")
    return int(sample_rate_hz)


def recording_of(audio: npt.ArrayLike, sample_rate_hz: int | None, default_hz: int) -> Recording:
    """Return samples as a recording; DataError if they are of a wrong type, shape or scale."""
    samples = array_of(audio, "the array")
    if samples.ndim not in (1, 2):
        raise DataError(f"the samples have the shape {samples.shape}; pass one dimension, or samples "
                        "and channels.")
    # the shorter dimension is the channels
    samples_NC = samples[:, None] if samples.ndim == 1 else \
        samples.T if samples.shape[0] < samples.shape[1] else samples
    rate_hz = rate_of(sample_rate_hz, default_hz)
    recording.check_rate("the array", rate_hz, samples_NC.shape[1])
    recording.check_peak_of_32_bits(recording.peak_of_32_bits(samples_NC), "the array")
    # also for an array without samples
    recording.scaled(samples_NC[:0], "the array")
    blocks = iter(range(0, len(samples_NC), round(_BLOCK_S * rate_hz)))

    def read(size: int) -> npt.NDArray[Any]:
        first = next(blocks, len(samples_NC))
        return samples_NC[first : first + size]
    return Recording("the array", rate_hz, samples_NC.shape[1], read)


@dataclass(frozen=True)
class Speaker:
    """Statistics of the segments of a channel so far."""

    stats: cmvn.Stats | None = None
    mean: cmvn.CmnState | None = None
    ivectors: SpeakerState | None = None
    fmllr: FmllrStats | None = None


def features_of(bundle: Bundle, samples_N: Samples, speaker: Speaker) -> tuple[npt.NDArray[np.float32], Side | None, Speaker]:
    """Return normalized features, i-vectors, and the state for the next segment of the channel."""
    raw_TD = filterbank.extract(samples_N, bundle.features)
    if bundle.features.cmvn == "online":
        mean = cmvn.OnlineMean(bundle.statistics, speaker.mean)
        normal_TD, speaker = mean.normalized(raw_TD), replace(speaker, mean=mean.heard())
    elif bundle.features.cmvn == "speaker":
        stats = cmvn.statistics(raw_TD) + (0.0 if speaker.stats is None else speaker.stats)
        normal_TD, speaker = cmvn.normalized(raw_TD, stats), replace(speaker, stats=stats)
    else:
        [normal_TD] = filterbank.normalize([raw_TD], [""], bundle.features)
    if bundle.adaptation is not None:
        normal_TD, fmllr = bundle.adaptation.adapt(normal_TD, speaker.fmllr, bundle.find_path)
        return normal_TD, None, replace(speaker, fmllr=fmllr)
    if bundle.ivectors is None:
        return normal_TD, None, speaker
    stream = IvectorStream(bundle.ivectors, speaker.ivectors)
    stream.accept(raw_TD)
    speaker = replace(speaker, ivectors=stream.finish())
    row_T = (np.arange(len(raw_TD)) // bundle.ivectors.front.config.period).astype(np.int32)
    return normal_TD, Side(stream.rows(), row_T), speaker


def array_of(audio: npt.ArrayLike | Sequence[float], name: str) -> npt.NDArray[Any]:
    """Return samples as an array; DataError for bytes and other types without a scale."""
    if isinstance(audio, (bytes, bytearray)) or (isinstance(audio, memoryview) and audio.itemsize == 1):
        raise DataError(f"{name} consists of bytes, whose type is unknown; pass numpy.frombuffer(audio, "
                        "'int16') for raw samples of 16 bits.")
    try:
        if isinstance(audio, torch.Tensor):
            tensor = audio.detach().cpu()
            # NumPy has no such type
            return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
        return np.asarray(audio)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"{name} cannot be converted to an array of samples ({first_line(error)}); pass "
                        "numbers.") from error
