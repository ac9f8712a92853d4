"""Speech recognition with a trained model: recordings, arrays and live streams.

    recognizer = Recognizer.load("runs/RUN")
    print(recognizer.transcribe("recording.wav").text)

Letters: N samples, C channels, T frames, D features, S side values (i-vectors), P pdfs.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ngsgd.arguments import checks_arguments
from ngsgd.asr import recording
from ngsgd.asr.adapt.projections import FmllrStats
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode.decoding import StreamingDecoder
from ngsgd.asr.decode.words import recognized
from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.ivectors.model import IvectorStream, SpeakerState
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.asr.recording import Recording, Resampler, Samples
from ngsgd.asr.segmentation import Segmenter, Stretch
from ngsgd.asr.transcript import Partial, Segment, Transcript
from ngsgd.data.frames import Side
from ngsgd.errors import ArgumentError, DataError
from ngsgd.imports import first_line

FRAME_S = 0.01
# beam of the lattices for confidences and further hypotheses (nats); segments are long, and with
# twice this beam determinization takes 20 times as long as everything else
LATTICE_BEAM = 4.0
_BLOCK_S = 5.0  # block length for arrays
# length of a stream after which the scale of its integers is certain
_SCALE_S = 10.0


class Recognizer:
    """Recognizes speech with a model of `ngsgd train`.

    A recording is split into segments of speech (`ngsgd.asr.segmentation`), each of which is
    decoded as one utterance. Memory is independent of the length of the recording. Channels are
    recognized separately. Features are normalized over each segment (`features.cmvn=utterance`),
    over the channel so far (`speaker`), or frame by frame (`online`), as in training.

    The arguments other than the model are those of `ngsgd transcribe` (see docs/transcribe.md).

    Args:
        bundle: the model; see `Recognizer.load` for reading one.
        lm: file of an n-gram language model in ARPA format. Default: that of the model.
        words: file of the words to recognize, one per line. Default: those of the model.
        lexicon: file of pronunciations in the phones of the model. Default: those of the model.
        grammar: file of a grammar in a subset of JSGF, instead of a language model. Default: none.
        scale: acoustic scale. Default: that of the model.
        penalty: cost per word. Default: that of the model.

    Raises:
        ArgumentError: an argument has a wrong type, or the scale or the penalty is out of range.
        ConfigError: a grammar and a language model.
        DataError: the model does not accept audio, or a file does not match it.

    Example:
        With a finished run in runs/RUN:

            recognizer = ngsgd.asr.Recognizer.load("runs/RUN")
            transcript = recognizer.transcribe("recording.wav")
            for word, start_s, end_s, confidence in transcript.words:
                print(word, start_s, end_s, confidence)
    """

    @checks_arguments()
    def __init__(self, bundle: Bundle, *, lm: str | Path | None = None, words: str | Path | None = None,
                 lexicon: str | Path | None = None, grammar: str | Path | None = None,
                 scale: float | None = None, penalty: float | None = None) -> None:
        if bundle.features.kind == "given":
            raise DataError(f"{bundle.path} was trained on precomputed features (features.kind=given), so "
                            "it cannot process audio; train a model on recordings (features.kind=fbank or "
                            "mfcc).")
        if bundle.features.cmvn == "online":
            _ = bundle.statistics
        files = (None if path is None else Path(path) for path in (lexicon, words, lm, grammar))
        self.bundle = bundle.with_words(Vocabulary(*files), scale=scale, penalty=penalty)

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False, lm: str | Path | None = None,
             words: str | Path | None = None, lexicon: str | Path | None = None, grammar: str | Path | None = None,
             scale: float | None = None, penalty: float | None = None) -> Recognizer:
        """Read a model.

        Args:
            path: a run folder, its folder `final/`, or a file of `ngsgd export --format bundle`.
            trust: import the module of a custom network, which runs its code. Default: False.
            lm, words, lexicon, grammar, scale, penalty: as for `Recognizer`.

        Raises:
            ArgumentError: an argument has a wrong type or value.
            CheckpointError: the model is damaged, unfinished, or of another version.
            ConfigError: the model has a custom network, and `trust` is False.
            DataError: the model does not accept audio, or a file of words does not match it.
        """
        return cls(Bundle.load(path, trust=trust), lm=lm, words=words, lexicon=lexicon, grammar=grammar,
                   scale=scale, penalty=penalty)

    @property
    def sample_rate_hz(self) -> int:
        """Sampling rate of the model in Hz; other audio is resampled by soxr."""
        return self.bundle.features.sample_rate_hz

    def transcribe(self, audio: str | Path | npt.ArrayLike | Recording,
                   sample_rate_hz: int | None = None, *, num_best: int = 1) -> Transcript:
        """Recognize a complete recording: segments with words, times and confidences.

        Args:
            audio: a file, or samples: N, N x C or C x N (NumPy array, torch tensor). Integers of 8,
                16 and 32 bits are scaled by their width; floating-point samples are in the range -1
                to 1. Lists of integers and other types have no scale and are errors.
            sample_rate_hz: sampling rate of an array in Hz; None for the rate of the model. Not
                allowed for files.
            num_best: maximum number of hypotheses per segment. Default: 1.

        Raises:
            ArgumentError: the rate or the number of hypotheses is not a number.
            DataError: the audio cannot be read, or has invalid values.
        """
        _check_num_best(num_best)
        if isinstance(audio, (str, Path)):
            if sample_rate_hz is not None:
                raise DataError(f"sample_rate_hz was given with the file {audio}, whose header specifies "
                                "it; omit sample_rate_hz.")
            with recording.opened(Path(audio)) as source:
                return self.transcribe(source, num_best=num_best)
        if not isinstance(audio, Recording):
            audio = self._recording(audio, sample_rate_hz)
        channels = [_Channel(self, number, audio.sample_rate_hz, num_best) for number in range(1, audio.num_channels + 1)]
        segments: list[Segment] = []
        num_samples = 0
        for block_NC in audio.blocks():
            num_samples += len(block_NC)
            for channel, samples_N in zip(channels, block_NC.T, strict=True):
                segments += channel.accept(samples_N)
        for channel in channels:
            segments += channel.finish()
        segments.sort(key=lambda one: (one.channel, one.start_s))
        rate_hz = audio.sample_rate_hz
        return Transcript(tuple(segments), num_samples / rate_hz, rate_hz, audio.num_channels)

    def stream(self, chunks: Iterable[npt.ArrayLike], sample_rate_hz: int | None = None, *,
               num_best: int = 1, partial: bool = True) -> Iterator[Partial | Segment]:
        """Recognize live speech; yields partial and final results in order.

        Every segment of speech ends with a `Segment`, whose words are those of `transcribe` for the
        same samples. Until then a `Partial` is yielded whenever the words so far change. With
        `features.cmvn=utterance` or `speaker` partial words use the mean so far, since the mean of
        the segment is not known yet.

        Args:
            chunks: samples of one channel, in chunks of any size.
            sample_rate_hz: sampling rate in Hz; None for the rate of the model.
            num_best: maximum number of hypotheses per segment. Default: 1.
            partial: also yield partial words, which about doubles the computing time. Default:
                True.

        Raises:
            ArgumentError: the rate or the number of hypotheses is not a number.
            DataError: a chunk has a wrong shape or invalid values.
        """
        _check_num_best(num_best)
        rate_hz = self._rate(sample_rate_hz)
        recording.check_rate("the stream", rate_hz)
        channel = _Channel(self, 1, rate_hz, num_best)
        draft: _Draft | None = None
        peak = num_samples = 0
        for chunk in chunks:
            chunk_N = _array(chunk, "the stream")
            peak, num_samples = max(peak, recording.peak_of_32_bits(chunk_N)), num_samples + chunk_N.size
            # the scale of a quiet chunk alone is unknown
            if num_samples >= _SCALE_S * rate_hz:
                recording.check_peak_of_32_bits(peak, "the stream")
            samples_N = recording.scaled(chunk_N, "the stream")
            if samples_N.ndim != 1:
                raise DataError(f"a chunk of the stream has the shape {samples_N.shape}; pass the samples "
                                "of one channel.")
            yield from channel.accept(samples_N)
            stretch = channel.segmenter.current if partial else None
            if stretch is None:
                draft = None
                continue
            if draft is None or draft.first != stretch.first:
                draft = _Draft(self.bundle, stretch.first, channel.speaker)
            if (changed := draft.update(stretch.samples)) is not None:
                yield changed
        recording.check_peak_of_32_bits(peak, "the stream")
        yield from channel.finish()

    def _rate(self, sample_rate_hz: Any) -> int:
        """The sampling rate of samples; raises ArgumentError for another type than a number."""
        if sample_rate_hz is None:
            return self.sample_rate_hz
        is_number = isinstance(sample_rate_hz, numbers.Real) and not isinstance(sample_rate_hz, bool)
        if not is_number or not float(sample_rate_hz).is_integer():
            raise ArgumentError(f"sample_rate_hz is {sample_rate_hz!r}; pass an integer, such as 16000.")
        return int(sample_rate_hz)

    def _recording(self, audio: npt.ArrayLike, sample_rate_hz: int | None) -> Recording:
        samples = _array(audio, "the array")
        if samples.ndim not in (1, 2):
            raise DataError(f"the samples have the shape {samples.shape}; pass one dimension, or samples "
                            "and channels.")
        # the shorter dimension is the channels
        samples_NC = samples[:, None] if samples.ndim == 1 else \
            samples.T if samples.shape[0] < samples.shape[1] else samples
        rate_hz = self._rate(sample_rate_hz)
        recording.check_rate("the array", rate_hz, samples_NC.shape[1])
        recording.check_peak_of_32_bits(recording.peak_of_32_bits(samples_NC), "the array")
        # also for an array without samples
        recording.scaled(samples_NC[:0], "the array")
        blocks = iter(range(0, len(samples_NC), round(_BLOCK_S * rate_hz)))

        def read(size: int) -> npt.NDArray[Any]:
            first = next(blocks, len(samples_NC))
            return samples_NC[first : first + size]
        return Recording("the array", rate_hz, samples_NC.shape[1], read)


class _Channel:
    """One channel: resampling, segmentation, and recognition of each segment."""

    def __init__(self, recognizer: Recognizer, number: int, sample_rate_hz: int, num_best: int) -> None:
        self._bundle, self._number, self._num_best = recognizer.bundle, number, num_best
        self.segmenter = Segmenter(recognizer.sample_rate_hz)
        self._resampler: Resampler | None = None
        if sample_rate_hz != recognizer.sample_rate_hz:
            self._resampler = Resampler(sample_rate_hz, recognizer.sample_rate_hz)
        self.speaker = _Speaker()

    def accept(self, samples_N: Samples) -> Iterator[Segment]:
        """Yield the segments that end in these samples."""
        yield from map(self._segment, self.segmenter.accept(self._resampled(samples_N)))

    def finish(self) -> Iterator[Segment]:
        """Yield the remaining segments."""
        if self._resampler is not None:
            rest_N = self._resampled(np.zeros(0, np.float32), is_last=True)
            yield from map(self._segment, self.segmenter.accept(rest_N))
        if (stretch := self.segmenter.finish()) is not None:
            yield self._segment(stretch)

    def _resampled(self, samples_N: Samples, *, is_last: bool = False) -> Samples:
        if self._resampler is None:
            return samples_N
        return self._resampler.accept(samples_N, is_last=is_last)

    def _segment(self, stretch: Stretch) -> Segment:
        bundle = self._bundle
        features_TD, side, self.speaker = _front(bundle, stretch.samples, self.speaker)
        found = recognized(bundle.graph, bundle.log_likelihoods(features_TD, side), bundle.search,
                           lattice_beam=LATTICE_BEAM, frame_shift_s=FRAME_S,
                           num_best=self._num_best, calibration=bundle.calibration)
        rate_hz = bundle.features.sample_rate_hz
        start_s, end_s = stretch.first / rate_hz, (stretch.first + len(stretch.samples)) / rate_hz
        return Segment(self._number, start_s, end_s, tuple(replace(one, words=tuple(
            word._replace(start_s=start_s + word.start_s, end_s=min(start_s + word.end_s, end_s))
            for word in one.words)) for one in found))


@dataclass(frozen=True)
class _Speaker:
    """Statistics of the segments of a channel so far."""

    stats: cmvn.Stats | None = None
    mean: cmvn.CmnState | None = None
    ivectors: SpeakerState | None = None
    fmllr: FmllrStats | None = None


def _front(bundle: Bundle, samples_N: Samples, speaker: _Speaker) -> tuple[npt.NDArray[np.float32], Side | None, _Speaker]:
    """(normalized features, i-vectors, state for the next segment of the channel)."""
    raw_TD = filterbank.extract(samples_N, bundle.features)
    if bundle.features.cmvn == "online":
        mean = cmvn.OnlineMean(bundle.statistics, speaker.mean)
        deviation_D = cmvn.mean_and_deviation(bundle.statistics)[1]
        normal_TD = ((raw_TD - mean.accept(raw_TD)) / deviation_D).astype(np.float32)
        speaker = replace(speaker, mean=mean.heard())
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


class _Draft:
    """A segment, decoded as its samples arrive, and its words so far."""

    def __init__(self, bundle: Bundle, first: int, speaker: _Speaker) -> None:
        self.first, self._num_samples, self._num_frames = first, 0, 0
        self._features = filterbank.stream(bundle.features)
        self._rate_hz = bundle.features.sample_rate_hz
        self._words: tuple[str, ...] = ()
        self._mean: cmvn.OnlineMean | None = None
        if bundle.all_speech is not None:
            self._mean = cmvn.OnlineMean(bundle.all_speech, speaker.mean)
            self._deviation_D = cmvn.mean_and_deviation(bundle.all_speech)[1]
        self._ivectors = IvectorStream(bundle.ivectors, speaker.ivectors) if bundle.ivectors else None
        self._decoder = StreamingDecoder(
            bundle.graph, bundle.scores, bundle.search, left_context=bundle.window.left_context,
            right_context=bundle.window.right_context, side=self._ivectors)

    def update(self, samples_N: Samples) -> Partial | None:
        """Return the words if they changed; `samples_N` are all samples of the segment."""
        self._features.accept_waveform(self._rate_hz, samples_N[self._num_samples :])
        self._num_samples = len(samples_N)
        ready = range(self._num_frames, self._features.num_frames_ready)
        if ready:
            self._num_frames += len(ready)
            normal_TD = raw_TD = np.stack([self._features.get_frame(t) for t in ready])
            if self._ivectors is not None:
                self._ivectors.accept(raw_TD)
            if self._mean is not None:
                mean_TD = self._mean.accept(raw_TD)
                normal_TD = ((raw_TD - mean_TD) / self._deviation_D).astype(np.float32)
            self._decoder.accept(normal_TD)
        if (words := self._decoder.words()) == self._words:
            return None
        self._words = words
        return Partial(words, self.first / self._rate_hz, (self.first + len(samples_N)) / self._rate_hz)


def _array(audio: npt.ArrayLike | Sequence[float], name: str) -> npt.NDArray[Any]:
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


def _check_num_best(num_best: Any) -> None:
    if isinstance(num_best, bool) or not isinstance(num_best, numbers.Integral) or num_best < 1:
        raise ArgumentError(f"num_best is {num_best!r}; pass an integer from 1.")
