"""One of a corpus' three sets, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.utterance import UNALIGNED, FramedUtterance, PdfIds, Utterance, num_frames
from ngsgd.config import FeatureConfig
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import DataError

Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpeechSet:
    """Labelled frames of U utterances, with what is said in each and by whom."""

    frames: FrameSet                     # normalised, not spliced
    # words of each utterance
    texts: tuple[tuple[str, ...], ...]
    speakers: tuple[str, ...]
    # what features were normalised by; without statistics: not at all; None: not known
    cmvn: CmvnStats | None = None
    # features before they were, where `cmvn` cannot give them back
    raw_TD: Features | None = None

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

    def raw(self, utterance: int) -> Features:
        """The features of an utterance before they were normalised, to the rounding of float32."""
        rows = slice(*self.frames.offsets[utterance:utterance + 2])
        if self.raw_TD is not None:
            return self.raw_TD[rows]
        if self.cmvn is None:
            raise DataError("the prepared data is of an older version of ngsgd, which did not keep what features were normalised "
                            "by; remove its folder under data.cache_dir (or output_dir/data) and run again.")
        features_TD = self.frames.features_TD[rows]
        return cmvn.restored(features_TD, self.cmvn.stats[self.cmvn.unit_of[utterance]]) if self.cmvn.stats else features_TD

    def split_pdfs(self) -> list[PdfIds]:
        """The states of each utterance's frames."""
        return np.split(self.frames.pdf_T, self.frames.offsets[1:-1])

    def labelled(self, pdf_T_by_utt: Mapping[str, PdfIds]) -> SpeechSet:
        """The same with other labels; an utterance that the mapping lacks is left out."""
        keep = [u for u, utt_id in enumerate(self.frames.utt_ids) if utt_id in pdf_T_by_utt]
        utt_ids = tuple(self.frames.utt_ids[u] for u in keep)
        features, labels = self.split_features(), [pdf_T_by_utt[utt_id] for utt_id in utt_ids]
        at_T = np.concatenate([np.arange(*self.frames.offsets[u:u + 2]) for u in keep])
        side = self.frames.side and Side(self.frames.side.rows_RS, self.frames.side.row_T[at_T])
        frames = FrameSet(np.concatenate([features[u] for u in keep]), np.concatenate(labels).astype(np.int32),
                          np.cumsum([0, *map(len, labels)], dtype=np.int64), utt_ids, side=side)
        units = self.cmvn and CmvnStats(self.cmvn.stats, tuple(self.cmvn.unit_of[u] for u in keep if self.cmvn.unit_of))
        return SpeechSet(frames, tuple(self.texts[u] for u in keep), tuple(self.speakers[u] for u in keep), units,
                         None if self.raw_TD is None else np.asarray(self.raw_TD[at_T]))


def build(utterances: Iterable[Utterance], config: FeatureConfig) -> SpeechSet:
    """The set of these utterances; their audio is let go of one by one."""
    return assemble([frame(utterance, config) for utterance in utterances], config)


def frame(utterance: Utterance, config: FeatureConfig) -> FramedUtterance:
    """The utterance's features, with its labels."""
    _check_length(utterance, config)
    return FramedUtterance(utterance.utt_id, utterance.speaker, utterance.words, filterbank.extract(utterance.samples, config),
                           utterance.pdf_T)


def assemble(utterances: Sequence[FramedUtterance], config: FeatureConfig, given: CmvnStats | None = None) -> SpeechSet:
    """The set of these utterances, normalised over the unit that `config` names, or by statistics that came with them.

    With `features.cmvn=online` they are not yet, as that takes statistics of the training set (`normalised_online`).
    """
    raw, speakers = [one.features_TD for one in utterances], [one.speaker for one in utterances]
    utt_ids = tuple(one.utt_id for one in utterances)
    units = given or CmvnStats({}, ())
    if given is not None:
        normal = [cmvn.normalised(*one) for one in zip(raw, (given.stats[unit] for unit in given.unit_of), strict=True)]
    else:
        normal = filterbank.normalise(raw, speakers, config)
        if config.cmvn in ("utterance", "speaker"):
            units = cmvn.units(raw, utt_ids if config.cmvn == "utterance" else speakers)
    offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    frames = FrameSet(features_TD=np.concatenate(normal), pdf_T=np.concatenate([one.pdf_T for one in utterances]),
                      offsets=offsets, utt_ids=utt_ids)
    return SpeechSet(frames, tuple(one.words for one in utterances), tuple(speakers), units)


def normalised_online(speech: SpeechSet, all_speech: cmvn.Stats) -> SpeechSet:
    """The set with the mean of what its speakers have said so far taken away, divided by the deviation of `all_speech`.

    Speakers talk in the order of the set.
    """
    heard: dict[str, cmvn.CmnState] = {}
    normal = []
    deviation_D = cmvn.mean_and_deviation(all_speech)[1]
    for raw_TD, speaker in zip(speech.split_features(), speech.speakers, strict=True):
        stream = cmvn.OnlineMean(all_speech, heard.get(speaker))
        normal.append(((raw_TD - stream.accept(raw_TD)) / deviation_D).astype(np.float32))
        heard[speaker] = stream.heard()
    units = CmvnStats({cmvn.GLOBAL: all_speech}, (cmvn.GLOBAL,) * len(speech.texts))
    return replace(speech, frames=replace(speech.frames, features_TD=np.concatenate(normal)), cmvn=units,
                   raw_TD=speech.frames.features_TD)


def _check_length(utterance: Utterance, config: FeatureConfig) -> None:
    expected = num_frames(len(utterance.samples), config.sample_rate_hz)
    if len(utterance.pdf_T) != expected:
        seconds = len(utterance.samples) / config.sample_rate_hz
        raise DataError(f"Utterance {utterance.utt_id} has {len(utterance.pdf_T)} labels for {expected} frames "
                        f"({seconds:.2f} s); its alignment belongs to other audio: make it again.")
