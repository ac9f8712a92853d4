"""Normalization of features (T x D) with statistics of Kaldi, offline and online."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.data import mapped
from ngsgd.errors import DataError

Features = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]
# 2 x (D + 1), as cmvn.ark of Kaldi: sums and the number of frames; sums of squares and 0
Stats = npt.NDArray[np.float64]

# of the online mean, as online-cmvn of Kaldi: its window, and the maximum number of frames of
# earlier utterances of the speaker and of all training speech that replace missing ones
WINDOW, SPEAKER_FRAMES, GLOBAL_FRAMES = 600, 600, 200
# a mel bin without an FFT point is constant; it becomes 0, not NaN
SMALLEST_DEVIATION = 1e-5
GLOBAL = "global"  # the unit of all training speech together


@dataclass(frozen=True)
class CmvnStats:
    """The statistics of a set of utterances, by speaker, by utterance or global."""

    stats: Mapping[str, Stats]
    unit_of: Sequence[str]         # unit of each utterance


def statistics(frames_TD: npt.NDArray[np.floating]) -> Stats:
    """Return the statistics of these frames; sums in float64."""
    stats = np.zeros((2, frames_TD.shape[1] + 1))
    stats[0, -1] = len(frames_TD)
    for block_TD in mapped.blocks(frames_TD):
        stats[0, :-1] = added(stats[0, :-1], block_TD)
        stats[1, :-1] = added(stats[1, :-1], np.square(block_TD, dtype=np.float64))
    return stats


def added(sum_D: Vector, frames_TD: npt.NDArray[np.floating]) -> Vector:
    """Add frames to a sum one after the other: bitwise the sum of all frames at once."""
    return np.asarray(np.concatenate([sum_D[None], frames_TD]).sum(axis=0))


def check(stats: npt.NDArray[np.floating], where: str, dim: int | None = None) -> Stats:
    """Return the matrix as statistics; raise DataError for an invalid matrix."""
    if stats.ndim != 2 or stats.shape[0] != 2 or stats.shape[1] < 2 or (dim is not None and stats.shape[1] != dim + 1):
        wanted = "D + 1" if dim is None else str(dim + 1)
        raise DataError(f"{where} is a matrix of {' x '.join(map(str, stats.shape))}; statistics "
                        f"of features are 2 x {wanted}: sums and the number of frames, sums of "
                        "squares and 0.")
    if not np.isfinite(stats).all() or stats[0, -1] < 1.0:
        raise DataError(f"{where} has {stats[0, -1]:g} frames, or numbers that are not finite; "
                        "compute the statistics again.")
    return np.asarray(stats, dtype=np.float64)


def mean_and_deviation(stats: Stats) -> tuple[Vector, Vector]:
    """(mean, standard deviation) of each feature."""
    count = stats[0, -1]
    mean_D = stats[0, :-1] / count
    variance_D = stats[1, :-1] / count - mean_D**2
    return mean_D, np.maximum(np.sqrt(np.maximum(variance_D, 0.0)), SMALLEST_DEVIATION)


def normalized(frames_TD: Features, stats: Stats) -> Features:
    """Normalize to zero mean and unit variance over the statistics (apply-cmvn --norm-vars)."""
    mean_D, deviation_D = mean_and_deviation(stats)
    return np.asarray((frames_TD - mean_D.astype(np.float32)) / deviation_D.astype(np.float32), dtype=np.float32)


def by_unit(features: Callable[[], Iterable[Features]], units: Sequence[object], dim: int) -> Iterator[Features]:
    """Normalize each unit, bitwise as all its frames at once; calls `features` three times."""
    place = {unit: s for s, unit in enumerate(dict.fromkeys(units))}
    unit_U = np.fromiter((place[unit] for unit in units), np.int32, len(units))
    count_S1, (sum_SD, square_SD) = np.zeros((len(place), 1)), np.zeros((2, len(place), dim))
    for s, raw_TD in zip(unit_U, features(), strict=True):
        count_S1[s] += len(raw_TD)
        sum_SD[s] = added(sum_SD[s], raw_TD)
    mean_SD = sum_SD / count_S1
    for s, raw_TD in zip(unit_U, features(), strict=True):
        square_SD[s] = added(square_SD[s], np.square(raw_TD - mean_SD[s]))
    deviation_SD = np.maximum(np.sqrt(square_SD / count_S1), SMALLEST_DEVIATION)
    shift_SD, scale_SD = mean_SD.astype(np.float32), deviation_SD.astype(np.float32)
    for s, raw_TD in zip(unit_U, features(), strict=True):
        yield (raw_TD - shift_SD[s]) / scale_SD[s]


def restored(frames_TD: Features, stats: Stats) -> Features:
    """Invert `normalized`, up to rounding of float32."""
    mean_D, deviation_D = mean_and_deviation(stats)
    return (frames_TD * deviation_D + mean_D).astype(np.float32)


def units(found: Iterable[Stats], names: Sequence[str]) -> CmvnStats:
    """Add the statistics of utterances, grouped by the names of their units."""
    stats: dict[str, Stats] = {}
    for one, name in zip(found, names, strict=True):
        stats[name] = stats[name] + one if name in stats else one
    return CmvnStats(stats, names)


@dataclass(frozen=True)
class CmnState:
    """Sums over the previous utterances of a speaker."""

    sum_D: Vector
    count: float = 0.0


class OnlineMean:
    """The mean of an utterance up to every frame: OnlineCmvn of Kaldi, without variances.

    It is over `WINDOW` frames; while there are fewer, with up to `SPEAKER_FRAMES` earlier frames of
    the speaker and up to `GLOBAL_FRAMES` of all training speech.
    """

    def __init__(self, all_speech: Stats, before: CmnState | None = None) -> None:
        self._global_mean_D, self._deviation_D = mean_and_deviation(all_speech)
        self._before = before or CmnState(np.zeros_like(self._global_mean_D))
        # sums over the utterance up to each of its last frames
        self._sums_WD = np.zeros((1, len(self._global_mean_D)))
        self._num_frames = 0

    def accept(self, frames_TD: npt.NDArray[np.floating]) -> Vector:
        """Return T x D means at each of the next frames."""
        # summed sequentially, so that the result is bitwise independent of the chunk size
        sums_TD = np.cumsum(np.concatenate([self._sums_WD[-1:], frames_TD]), axis=0)[1:]
        history = np.concatenate([self._sums_WD, sums_TD])
        # number of frames in the oldest sum
        first = self._num_frames + 1 - len(self._sums_WD)
        heard_T = np.arange(self._num_frames + 1, self._num_frames + 1 + len(frames_TD))
        # frames that have left the window
        gone_T = np.maximum(heard_T - WINDOW, 0)
        sum_TD = sums_TD - history[np.maximum(gone_T - first, 0)] * (gone_T > 0)[:, None]
        self._num_frames += len(frames_TD)
        self._sums_WD = history[-WINDOW - 1:]
        count_T, before = (heard_T - gone_T).astype(np.float64), self._before
        lent_T = np.minimum(WINDOW - count_T, min(SPEAKER_FRAMES, before.count))
        if before.count:
            sum_TD = sum_TD + (lent_T / before.count)[:, None] * before.sum_D
        count_T = count_T + lent_T
        lent_T = np.minimum(WINDOW - count_T, GLOBAL_FRAMES)
        return np.asarray((sum_TD + lent_T[:, None] * self._global_mean_D) / (count_T + lent_T)[:, None])

    def normalized(self, raw_TD: Features) -> Features:
        """Return the next frames minus their means, at unit variance over all training speech."""
        return np.asarray((raw_TD - self.accept(raw_TD)) / self._deviation_D, np.float32)

    def heard(self) -> CmnState:
        """Return the state for the next utterance of the speaker."""
        return CmnState(self._before.sum_D + self._sums_WD[-1], self._before.count + self._num_frames)
