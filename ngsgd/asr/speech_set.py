"""One of a corpus' three sets, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ngsgd.asr import features
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Utterance, num_frames
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


def build(utterances: Iterable[Utterance], config: FeatureConfig) -> SpeechSet:
    """The set of these utterances; their audio is let go of one by one."""
    raw, labels, ids, texts, speakers = [], [], [], [], []
    for utterance in utterances:
        _check_length(utterance)
        raw.append(features.extract(utterance.samples, config))
        labels.append(utterance.pdf_T)
        ids.append(utterance.utt_id)
        texts.append(utterance.words)
        speakers.append(utterance.speaker)
    offsets = np.cumsum([0, *map(len, labels)], dtype=np.int64)
    frames = FrameSet(features_TD=np.concatenate(features.normalise(raw, speakers, config)), pdf_T=np.concatenate(labels),
                      offsets=offsets, utt_ids=tuple(ids))
    return SpeechSet(frames=frames, texts=tuple(texts), speakers=tuple(speakers))


def _check_length(utterance: Utterance) -> None:
    expected = num_frames(len(utterance.samples))
    if len(utterance.pdf_T) != expected:
        seconds = len(utterance.samples) / SAMPLE_RATE_HZ
        raise DataError(f"Utterance {utterance.utt_id} has {len(utterance.pdf_T)} labels for {expected} frames "
                        f"({seconds:.2f} s); its alignment belongs to other audio: make it again.")
