"""Alignment of recordings with their text: words and phones with times and confidences.

    aligner = Aligner.load("runs/RUN")
    print(aligner.align("recording.wav", "one two three").words)

Letters: N samples, T frames, P pdfs, F phones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.arguments import checks_arguments
from ngsgd.asr import front_end
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode import decoding
from ngsgd.asr.decode.decoding import Scores, Search
from ngsgd.asr.decode.words import Hypothesis, Word
from ngsgd.asr.front_end import FRAME_S, Speaker
from ngsgd.asr.lang import graphs, lexicon, vocabulary
from ngsgd.asr.lang.graphs import GARBAGE, Deviations, TextUnit
from ngsgd.asr.lang.topology import SILENCE_PHONE
from ngsgd.asr.recording import Recording, Resampler, Samples
from ngsgd.asr.segmentation import Segmenter, Stretch
from ngsgd.asr.transcript import Alignment, Segment
from ngsgd.errors import DataError, warn
from ngsgd.interface import option

# chosen on strings of digits with removed, inserted and replaced words (see docs/align.md)
DEVIATIONS = Deviations(skip=10.0, garbage=15.0)
# nats that a frame of garbage is worse than the best phone
GARBAGE_MARGIN = 2.5
_SEARCH = Search(acoustic_scale=1.0, beam=300.0, max_active=1_000_000)
# longer recordings are split at pauses, as in recognition
_LONGEST_S = 30.0


class Timed(NamedTuple):
    """A unit of a text and its frames [first, end)."""

    unit: TextUnit
    first: int
    end: int


class Aligner:
    """Aligns recordings with their text by a model of `ngsgd train`.

    The speech may deviate from the text: words may be missing, and there may be other speech. Both
    are reported. A word without a pronunciation is aligned with any speech, and reported.
    Time and memory are linear in the length of the recording.

    Args:
        bundle: the model; see `Aligner.load` for reading one.
        lexicon: file of pronunciations in the phones of the model, in addition to those of the
            model; they replace those of the same words. Default: none.

    Raises:
        ArgumentError: an argument has a wrong type.
        DataError: the model has a decoding graph without phones, or the lexicon does not match it.

    Example:
        With a finished run in runs/RUN:

            aligner = ngsgd.asr.Aligner.load("runs/RUN")
            alignment = aligner.align("recording.wav", "one two three")
            for phone, start_s, end_s, confidence in alignment.phones:
                print(phone, start_s, end_s, confidence)
    """

    @checks_arguments()
    def __init__(self, bundle: Bundle, *, lexicon: str | Path | None = None) -> None:
        language = bundle.language
        if language.given or not language.topology.lexicon or (
                not language.tree and language.num_pdfs != language.topology.num_pdfs):
            raise DataError(f"{bundle.path} was trained with a decoding graph (data.graph), so its "
                            "phones are unknown; align with a model trained on a lexicon.")
        topology = language.topology
        if lexicon is not None:
            added = vocabulary.pronunciations(topology, Path(lexicon), warn)
            topology = replace(topology, lexicon={**topology.lexicon, **added})
        self.bundle, self._language = bundle, replace(language, topology=topology)
        self._in_context = graphs.graphs_in_context(language, has_garbage=True) if language.tree else None
        self._phones = (SILENCE_PHONE, *topology.phones)
        # which phones have a state that is tied to a pdf
        self._is_of_PF = np.zeros((language.num_pdfs, len(self._phones)), np.float32)
        for number, phone in enumerate(self._phones):
            for state, untied in enumerate(topology.pdfs_of_phone(phone)):
                pdfs = language.tree.pdfs(number + 1, state) if language.tree else (untied,)
                self._is_of_PF[list(pdfs), number] = 1.0

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False, lexicon: str | Path | None = None) -> Aligner:
        """Read a run folder, its folder `final/`, or a bundle; `trust` as for `Recognizer.load`.

        Raises:
            ArgumentError: an argument has a wrong type.
            CheckpointError: the model is damaged, unfinished, or of another version.
            ConfigError: the model has a custom network, and `trust` is False.
            DataError: the model has no phones, or the lexicon does not match it.
        """
        return cls(Bundle.load(path, trust=trust), lexicon=lexicon)

    def align(self, audio: str | Path | npt.ArrayLike | Recording, text: str | Sequence[str],
              sample_rate_hz: int | None = None) -> Alignment:
        """Align a recording of one channel with its words.

        Args:
            audio: a file, or samples, as for `Recognizer.transcribe`.
            text: the words, separated by spaces, in the spelling of the lexicon.
            sample_rate_hz: sampling rate of an array in Hz; None for the rate of the model. Not
                allowed for files.

        Raises:
            ArgumentError: the rate is not a number.
            DataError: the audio cannot be read, has several channels or no speech; the model does
                not accept audio; or the text is empty or does not fit the speech.
        """
        bundle, words = self.bundle, self.checked(text)
        if bundle.features.kind == "given":
            raise DataError(f"{bundle.path} was trained on precomputed features "
                            "(features.kind=given), so it cannot process audio; align a data "
                            "directory with feats.scp: ngsgd align MODEL --data DIR")
        rate_hz = bundle.features.sample_rate_hz
        with front_end.opened(audio, sample_rate_hz, rate_hz) as source:
            if source.num_channels > 1:
                raise DataError(f"{source.name} has {source.num_channels} channels, and a text "
                                "belongs to one; extract it: ffmpeg -i INPUT -af 'pan=mono|c0=c0' OUTPUT.wav")
            resampler = Resampler(source.sample_rate_hz, rate_hz)
            blocks = [resampler.accept(block_NC[:, 0]) for block_NC in source.blocks()]
            samples_N = np.concatenate([*blocks, resampler.accept(np.zeros(0, np.float32), is_last=True)])
        logliks, time_T, speaker = list[Scores](), list[npt.NDArray[np.floating[Any]]](), Speaker()
        for stretch in _stretches(samples_N, rate_hz):
            features_TD, side, speaker = front_end.features_of(bundle, stretch.samples, speaker)
            logliks.append(bundle.log_likelihoods(features_TD, side))
            time_T.append(stretch.first / rate_hz + FRAME_S * np.arange(len(features_TD)))
        if not logliks:
            raise DataError(f"{source.name} has no speech; use the recording of the text.")
        return self._aligned(source.name, np.concatenate(logliks), words, np.concatenate(time_T),
                             len(samples_N) / rate_hz, source.sample_rate_hz)

    def align_scores(self, loglik_TP: Scores, text: str | Sequence[str], name: str = "the utterance") -> Alignment:
        """Align scores of an utterance (see `Bundle.log_likelihoods`) with its words.

        Raises:
            DataError: the text is empty, or does not fit the speech of this `name`.
        """
        num_frames = len(loglik_TP)
        return self._aligned(name, loglik_TP, self.checked(text), FRAME_S * np.arange(num_frames), FRAME_S * num_frames,
                             self.bundle.features.sample_rate_hz)

    def checked(self, text: str | Sequence[str]) -> tuple[str, ...]:
        """Return the words of a text; DataError if there are none, or none has a pronunciation."""
        words = tuple(text.split() if isinstance(text, str) else text)
        if not words:
            raise DataError("The text is empty; write the words of the recording.")
        known = self._language.topology.lexicon
        if not any(word in known for word in words):
            raise DataError(f"No word of the text has a pronunciation, such as {words[0]}"
                            f"{lexicon.alike(words[0], known)}; write the words as in the lexicon "
                            f"of the model, or give one ({option('lexicon', 'FILE')}).")
        return words

    def _aligned(self, name: str, loglik_TP: Scores, words: Sequence[str], time_T: npt.NDArray[np.floating[Any]],
                 duration_s: float, sample_rate_hz: int) -> Alignment:
        found, cost = self.units(loglik_TP, words)
        posterior_TF = np.exp(loglik_TP + np.log(self.bundle.prior_P)) @ self._is_of_PF
        log_TF = np.log(np.maximum(posterior_TF, np.finfo(np.float32).tiny))

        def timed(text: str, units: Sequence[Timed]) -> Word:
            # geometric mean of the posterior of the phone of each frame
            logs = [log_TF[one.first:one.end, self._phones.index(one.unit.phone)]
                    for one in units if one.unit.phone != GARBAGE]
            confidence = min(1.0, math.exp(float(np.concatenate(logs).mean()))) if logs else 0.0
            end_s = min(float(time_T[units[-1].end - 1]) + FRAME_S, duration_s)
            return Word(text, float(time_T[units[0].first]), end_s, confidence)
        spoken: dict[int, list[Timed]] = {}
        for one in found:
            if one.unit.word is not None:
                spoken.setdefault(one.unit.word, []).append(one)
        aligned = {at: timed(words[at], units) for at, units in spoken.items()}
        known = self._language.topology.lexicon
        if not any(words[at] in known for at in aligned):
            raise DataError(f"None of the {len(words)} words of the text was found in {name}; check "
                            "that they belong together, and the language of the model.")
        missing, before_s = list[Word](), 0.0
        for at, word in enumerate(words):
            if at in aligned:
                before_s = aligned[at].end_s
            else:
                missing.append(Word(word, before_s, before_s, 0.0))
        hypothesis = Hypothesis(tuple(aligned.values()), cost, is_complete=True)
        phones = tuple(timed(one.unit.phone, [one]) for one in found
                       if one.unit.phone not in (GARBAGE, SILENCE_PHONE))
        extra = tuple(timed("", [one]) for one in found if one.unit == TextUnit(GARBAGE, None))
        unknown = tuple(word for at, word in aligned.items() if word.word not in known)
        return Alignment((Segment(1, 0.0, duration_s, (hypothesis,)),), duration_s, sample_rate_hz, 1,
                         phones, tuple(missing), extra, unknown)

    def units(self, loglik_TP: Scores, words: Sequence[str]) -> tuple[list[Timed], float]:
        """Return the units of the best path and their frames, and its cost; DataError if none."""
        if len(loglik_TP) == 0:
            raise DataError("There are no frames to align; check that the recording has speech.")
        graph, units = graphs.of_text(self._language, words, DEVIATIONS, self._in_context)
        speech_P = self._is_of_PF[:, 1:].any(axis=1)
        garbage_T = loglik_TP[:, speech_P].max(axis=1) - GARBAGE_MARGIN
        path, frames = decoding.timed_path(graph, np.column_stack([loglik_TP, garbage_T]), _SEARCH)
        if not path.is_complete:
            raise DataError(f"The {len(words)} words of the text cannot be aligned with "
                            f"{len(loglik_TP)} frames; check that they belong together.")
        along = [units[int(label)] for label in path.words]
        if self._in_context:
            # phones have their labels one unit early; garbage and ends do not
            frames = [here if unit.phone in (GARBAGE, graphs.END) else after
                      for unit, here, after in zip(along, frames, [*frames[1:], len(loglik_TP)], strict=True)]
        kept = [(unit, first) for unit, first in zip(along, frames, strict=True) if unit.phone != graphs.END]
        ends = [first for _, first in kept[1:]] + [len(loglik_TP)]
        return [Timed(unit, first, end) for (unit, first), end in zip(kept, ends, strict=True)], path.cost


def _stretches(samples_N: Samples, rate_hz: int) -> Sequence[Stretch]:
    if len(samples_N) <= _LONGEST_S * rate_hz:
        return [Stretch(0, samples_N)] if len(samples_N) else []
    segmenter = Segmenter(rate_hz)
    found = [*segmenter.accept(samples_N), segmenter.finish()]
    return [stretch for stretch in found if stretch is not None]
