"""One of a corpus' three sets, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr import features
from ngsgd.asr.utterance import UNALIGNED, FramedUtterance, PdfIds, Utterance, num_frames
from ngsgd.config import FeatureConfig
from ngsgd.egs.frames import FrameSet
from ngsgd.errors import DataError


@dataclass(frozen=True)
class SpeechSet:
    """Labelled frames of U utterances, with what is said in each and by whom."""

    frames: FrameSet                     # normalised, not spliced
    texts: tuple[tuple[str, ...], ...]   # words of each utterance
    speakers: tuple[str, ...]

    def __post_init__(self) -> None:
        num_utterances = len(self.frames.utt_ids)
        if len(self.texts) != num_utterances or len(self.speakers) != num_utterances:
            raise DataError(f"{num_utterances} utterances, {len(self.texts)} texts and {len(self.speakers)} speakers do not fit "
                            "together; prepare the data again.")

    @property
    def num_words(self) -> int:
        return sum(map(len, self.texts))

    @property
    def is_aligned(self) -> bool:
        """Whether the state of every frame is known."""
        return not (self.frames.pdf_T == UNALIGNED).any()

    def split_features(self) -> list[npt.NDArray[np.float32]]:
        """T x D features of each utterance."""
        return np.split(self.frames.features_TD, self.frames.offsets[1:-1])

    def split_pdfs(self) -> list[PdfIds]:
        """The states of each utterance's frames."""
        return np.split(self.frames.pdf_T, self.frames.offsets[1:-1])

    def labelled(self, pdf_T_by_utt: Mapping[str, PdfIds]) -> SpeechSet:
        """The same with other labels; an utterance that the mapping lacks is left out."""
        keep = [u for u, utt_id in enumerate(self.frames.utt_ids) if utt_id in pdf_T_by_utt]
        utt_ids = tuple(self.frames.utt_ids[u] for u in keep)
        features, labels = self.split_features(), [pdf_T_by_utt[utt_id] for utt_id in utt_ids]
        frames = FrameSet(np.concatenate([features[u] for u in keep]), np.concatenate(labels).astype(np.int32),
                          np.cumsum([0, *map(len, labels)], dtype=np.int64), utt_ids)
        return SpeechSet(frames, tuple(self.texts[u] for u in keep), tuple(self.speakers[u] for u in keep))


def build(utterances: Iterable[Utterance], config: FeatureConfig) -> SpeechSet:
    """The set of these utterances; their audio is let go of one by one."""
    return assemble([frame(utterance, config) for utterance in utterances], config)


def frame(utterance: Utterance, config: FeatureConfig) -> FramedUtterance:
    """The utterance's features, with its labels."""
    _check_length(utterance, config)
    return FramedUtterance(utterance.utt_id, utterance.speaker, utterance.words, features.extract(utterance.samples, config),
                           utterance.pdf_T)


def assemble(utterances: Sequence[FramedUtterance], config: FeatureConfig) -> SpeechSet:
    """The set of these utterances, normalised over the unit that `config` names."""
    raw, speakers = [one.features_TD for one in utterances], [one.speaker for one in utterances]
    offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    frames = FrameSet(features_TD=np.concatenate(features.normalise(raw, speakers, config)),
                      pdf_T=np.concatenate([one.pdf_T for one in utterances]), offsets=offsets,
                      utt_ids=tuple(one.utt_id for one in utterances))
    return SpeechSet(frames=frames, texts=tuple(one.words for one in utterances), speakers=tuple(speakers))


def _check_length(utterance: Utterance, config: FeatureConfig) -> None:
    expected = num_frames(len(utterance.samples), config.sample_rate_hz)
    if len(utterance.pdf_T) != expected:
        seconds = len(utterance.samples) / config.sample_rate_hz
        raise DataError(f"Utterance {utterance.utt_id} has {len(utterance.pdf_T)} labels for {expected} frames "
                        f"({seconds:.2f} s); its alignment belongs to other audio: make it again.")
