"""Speech recognition with a trained model: recordings, arrays and live streams.

    recognizer = Recognizer.load("runs/RUN")
    print(recognizer.transcribe("recording.wav").text)

Letters: N samples, C channels, T frames, D features, S side values (i-vectors), P pdfs.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.arguments import checks_arguments
from ngsgd.asr import front_end, recording
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode.decoding import StreamingDecoder
from ngsgd.asr.decode.words import recognized
from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.front_end import FRAME_S, Speaker, features_of
from ngsgd.asr.ivectors.model import IvectorStream
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.asr.recording import Recording, Resampler, Samples
from ngsgd.asr.segmentation import Segmenter, Stretch
from ngsgd.asr.transcript import Partial, Segment, Transcript
from ngsgd.errors import ArgumentError, DataError

# beam of the lattices for confidences and further hypotheses (nats); segments are long, and with
# twice this beam determinization takes 20 times as long as everything else
LATTICE_BEAM = 4.0
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
        hotwords: file of phrases to prefer, one per line, perhaps with a bonus in nats such as
            `:6`, else 3 per word. Default: none.
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
                 hotwords: str | Path | None = None, scale: float | None = None, penalty: float | None = None) -> None:
        if bundle.features.kind == "given":
            raise DataError(f"{bundle.path} was trained on precomputed features (features.kind=given), so "
                            "it cannot process audio; train a model on recordings (features.kind=fbank or "
                            "mfcc).")
        if bundle.features.cmvn == "online":
            _ = bundle.statistics
        files = (None if path is None else Path(path) for path in (lexicon, words, lm, grammar, hotwords))
        self.bundle = bundle.with_words(Vocabulary(*files), scale=scale, penalty=penalty)

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False, lm: str | Path | None = None,
             words: str | Path | None = None, lexicon: str | Path | None = None, grammar: str | Path | None = None,
             hotwords: str | Path | None = None, scale: float | None = None, penalty: float | None = None) -> Recognizer:
        """Read a model.

        Args:
            path: a run folder, its folder `final/`, or a file of `ngsgd export --format bundle`.
            trust: import the module of a custom network, which runs its code. Default: False.
            lm, words, lexicon, grammar, hotwords, scale, penalty: as for `Recognizer`.

        Raises:
            ArgumentError: an argument has a wrong type or value.
            CheckpointError: the model is damaged, unfinished, or of another version.
            ConfigError: the model has a custom network, and `trust` is False.
            DataError: the model does not accept audio, or a file of words does not match it.
        """
        return cls(Bundle.load(path, trust=trust), lm=lm, words=words, lexicon=lexicon, grammar=grammar,
                   hotwords=hotwords, scale=scale, penalty=penalty)

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
        with front_end.opened(audio, sample_rate_hz, self.sample_rate_hz) as source:
            return self._transcribe(source, num_best)

    def _transcribe(self, audio: Recording, num_best: int) -> Transcript:
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
        rate_hz = front_end.rate_of(sample_rate_hz, self.sample_rate_hz)
        recording.check_rate("the stream", rate_hz)
        channel = _Channel(self, 1, rate_hz, num_best)
        draft: _Draft | None = None
        peak = num_samples = 0
        for chunk in chunks:
            chunk_N = front_end.array_of(chunk, "the stream")
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

class _Channel:
    """One channel: resampling, segmentation, and recognition of each segment."""

    def __init__(self, recognizer: Recognizer, number: int, sample_rate_hz: int, num_best: int) -> None:
        self._bundle, self._number, self._num_best = recognizer.bundle, number, num_best
        self.segmenter = Segmenter(recognizer.sample_rate_hz)
        self._resampler = Resampler(sample_rate_hz, recognizer.sample_rate_hz)
        self.speaker = Speaker()

    def accept(self, samples_N: Samples) -> Iterator[Segment]:
        """Yield the segments that end in these samples."""
        yield from map(self._segment, self.segmenter.accept(self._resampler.accept(samples_N)))

    def finish(self) -> Iterator[Segment]:
        """Yield the remaining segments."""
        rest_N = self._resampler.accept(np.zeros(0, np.float32), is_last=True)
        yield from map(self._segment, self.segmenter.accept(rest_N))
        if (stretch := self.segmenter.finish()) is not None:
            yield self._segment(stretch)

    def _segment(self, stretch: Stretch) -> Segment:
        bundle = self._bundle
        features_TD, side, self.speaker = features_of(bundle, stretch.samples, self.speaker)
        found = recognized(bundle.graph, bundle.log_likelihoods(features_TD, side), bundle.search,
                           lattice_beam=LATTICE_BEAM, frame_shift_s=FRAME_S,
                           num_best=self._num_best, calibration=bundle.calibration)
        rate_hz = bundle.features.sample_rate_hz
        start_s, end_s = stretch.first / rate_hz, (stretch.first + len(stretch.samples)) / rate_hz
        return Segment(self._number, start_s, end_s, tuple(replace(one, words=tuple(
            word._replace(start_s=start_s + word.start_s, end_s=min(start_s + word.end_s, end_s))
            for word in one.words)) for one in found))


class _Draft:
    """A segment, decoded as its samples arrive, and its words so far."""

    def __init__(self, bundle: Bundle, first: int, speaker: Speaker) -> None:
        self.first, self._num_samples, self._num_frames = first, 0, 0
        self._features = filterbank.stream(bundle.features)
        self._rate_hz = bundle.features.sample_rate_hz
        self._words: tuple[str, ...] = ()
        self._mean: cmvn.OnlineMean | None = None
        if bundle.all_speech is not None:
            self._mean = cmvn.OnlineMean(bundle.all_speech, speaker.mean)
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
                normal_TD = self._mean.normalized(raw_TD)
            self._decoder.accept(normal_TD)
        if (words := self._decoder.words()) == self._words:
            return None
        self._words = words
        return Partial(words, self.first / self._rate_hz, (self.first + len(samples_N)) / self._rate_hz)


def _check_num_best(num_best: Any) -> None:
    if isinstance(num_best, bool) or not isinstance(num_best, numbers.Integral) or num_best < 1:
        raise ArgumentError(f"num_best is {num_best!r}; pass an integer from 1.")
