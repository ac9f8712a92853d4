"""Segmentation of a stream of N samples into speech, in constant memory, independent of chunks.

Silence longer than two seconds is skipped, but half a second at each end of the speech. A segment
longer than ten seconds is split in the middle of the next pause of half a second, and one of thirty
seconds at its quietest point in the last ten. WebRTC's voice-activity detection classifies frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd import imports

Samples = npt.NDArray[np.float32]

_FRAME_S = 0.03
# silence that ends a segment of any length, and the part of it that is kept
_LONG_PAUSE, _KEPT = round(2.0 / _FRAME_S), round(0.5 / _FRAME_S)
# from this length a shorter pause suffices
_SHORT_PAUSE, _ENOUGH, _MOST = round(0.5 / _FRAME_S), round(10.0 / _FRAME_S), round(30.0 / _FRAME_S)
# frames searched for a quiet point, and number of consecutive quiet frames
_SEARCHED, _QUIET = round(10.0 / _FRAME_S), 5
# rates of the detector; others are interpolated to the second
_RATES_HZ = (8000, 16000, 32000, 48000)
_LOSES_LEAST = 0
# initial frames in which the detector may classify noise as speech; they are used only in
# recordings of less than a second
_ADAPTATION, _SHORT = 6, round(1.0 / _FRAME_S)


@dataclass(frozen=True)
class Stretch:
    """A segment of speech, and the index of its first sample in the stream."""

    first: int
    samples: Samples


class Segmenter:
    """Segments one channel: call `accept` for each chunk of samples, then `finish`."""

    def __init__(self, sample_rate_hz: int) -> None:
        self._frame = round(_FRAME_S * sample_rate_hz)
        self._vad_rate_hz = sample_rate_hz if sample_rate_hz in _RATES_HZ else _RATES_HZ[1]
        webrtcvad = imports.load("webrtcvad", extra="asr", purpose="Finding speech in recordings")
        self._vad = webrtcvad.Vad(_LOSES_LEAST)
        # frames of the current segment, followed by an incomplete frame
        self._frames: list[Samples] = []
        self._is_speech: list[bool] = []
        self._rest = np.zeros(0, np.float32)
        self._first = 0
        self._num_detected = 0
        self._starts_with_speech = False

    @property
    def current(self) -> Stretch | None:
        """The current segment; None while there is only silence."""
        if not any(self._is_speech):
            return None
        return Stretch(self._first, np.concatenate([*self._frames, self._rest]))

    def accept(self, samples_N: Samples) -> Iterator[Stretch]:
        """Accept samples at 16-bit scale; yield the segments that end in them."""
        samples_N = np.concatenate([self._rest, samples_N])
        num_frames = len(samples_N) // self._frame
        self._rest = samples_N[num_frames * self._frame :]
        for number in range(num_frames):
            frame = samples_N[number * self._frame : (number + 1) * self._frame]
            self._frames.append(frame)
            self._is_speech.append(self._detect(frame))
            if (end := self._end()) is not None:
                stretch = Stretch(self._first, np.concatenate(self._frames[:end]))
                is_speech = any(self._is_speech[:end])
                self._remove(end)
                if is_speech:
                    yield stretch
                # silence up to the beginning of the next segment is skipped
                if self._pause() == len(self._frames) > _KEPT:
                    self._remove(len(self._frames) - _KEPT)

    def finish(self) -> Stretch | None:
        """Return the last segment if it contains speech."""
        if self._num_detected <= _SHORT and self._starts_with_speech:
            self._is_speech[0] = True
        stretch = self.current
        self._remove(len(self._frames))
        return stretch

    def _detect(self, frame: Samples) -> bool:
        size = round(_FRAME_S * self._vad_rate_hz)
        if len(frame) != size:
            at = np.linspace(0, len(frame) - 1, size)
            frame = np.interp(at, np.arange(len(frame)), frame).astype(np.float32)
        pcm = np.clip(frame, -32768, 32767).astype("<i2").tobytes()
        is_speech = bool(self._vad.is_speech(pcm, self._vad_rate_hz))
        self._num_detected += 1
        if self._num_detected <= _ADAPTATION:
            self._starts_with_speech |= is_speech
            return False
        return is_speech

    def _end(self) -> int | None:
        """Number of frames of a completed segment; None if it is not complete."""
        length, pause = len(self._frames), self._pause()
        if pause == length:
            # no speech yet
            return length - _KEPT if length > _LONG_PAUSE else None
        if pause >= _LONG_PAUSE:
            return length - pause + _KEPT
        if length >= _ENOUGH and pause >= _SHORT_PAUSE:
            return length - pause // 2
        if length < _MOST:
            return None
        # at the quietest point
        power_F = np.array([np.square(frame, dtype=np.float64).mean() for frame in self._frames[-_SEARCHED:]])
        smooth = np.convolve(power_F, np.ones(_QUIET), mode="valid")
        return length - len(power_F) + int(smooth.argmin()) + _QUIET // 2

    def _pause(self) -> int:
        ends_first = enumerate(reversed(self._is_speech))
        return next((pause for pause, flag in ends_first if flag), len(self._is_speech))

    def _remove(self, num_frames: int) -> None:
        self._first += num_frames * self._frame
        del self._frames[:num_frames], self._is_speech[:num_frames]
