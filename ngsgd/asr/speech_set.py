"""One of the three sets of a corpus, in memory or mapped from files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.utterance import UNALIGNED, FramedUtterance, PdfIds, Utterance, num_frames
from ngsgd.config import FeatureConfig
from ngsgd.data import mapped
from ngsgd.data.columns import selected
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import DataError

Features = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpeechSet:
    """Labeled frames of U utterances, with their words and speakers."""

    frames: FrameSet                     # normalized, not spliced
    texts: Sequence[tuple[str, ...]]  # words of each utterance
    speakers: Sequence[str]
    # statistics of the normalization; empty: not normalized; None: unknown
    cmvn: CmvnStats | None = None
    raw_TD: Features | None = None  # features before normalization, if `cmvn` cannot restore them

    def __post_init__(self) -> None:
        num = len(self.frames.utt_ids)
        if not num == len(self.texts) == len(self.speakers):
            raise DataError(f"{num} utterances, {len(self.texts)} texts and {len(self.speakers)} "
                            "speakers are inconsistent; prepare the data again.")

    @property
    def is_aligned(self) -> bool:
        """Whether the state of every frame is known."""
        return not any((block_T == UNALIGNED).any() for block_T in mapped.blocks(self.frames.pdf_T))

    def utterances_by_speaker(self) -> dict[str, list[int]]:
        """Speaker -> numbers of the utterances."""
        found: dict[str, list[int]] = {}
        for number, speaker in enumerate(self.speakers):
            found.setdefault(speaker, []).append(number)
        return found

    def split_features(self) -> list[npt.NDArray[np.float32]]:
        """T x D features of each utterance."""
        return np.split(self.frames.features_TD, self.frames.offsets[1:-1])

    def raw(self, utterance: int) -> Features:
        """Return the features of an utterance before normalization, up to rounding of float32."""
        rows = slice(*self.frames.offsets[utterance:utterance + 2])
        if self.raw_TD is not None:
            return self.raw_TD[rows]
        assert self.cmvn is not None
        features_TD = self.frames.features_TD[rows]
        if not self.cmvn.stats:
            return features_TD
        return cmvn.restored(features_TD, self.cmvn.stats[self.cmvn.unit_of[utterance]])

    def only(self, utterance: int) -> SpeechSet:
        """Return a set of one utterance in memory, without statistics."""
        frames, part = self.frames, slice(utterance, utterance + 1)
        offsets = frames.offsets[utterance:utterance + 2]
        rows = slice(*offsets)
        one = FrameSet(mapped.copied(frames.features_TD[rows]), frames.pdf_T[rows],
                       offsets - rows.start, frames.utt_ids[part],
                       side=frames.side and Side(frames.side.rows_RS, frames.side.row_T[rows]))
        return SpeechSet(one, (self.texts[utterance],), (self.speakers[utterance],))

    def split_pdfs(self) -> list[PdfIds]:
        """States of the frames of each utterance."""
        return np.split(self.frames.pdf_T, self.frames.offsets[1:-1])

    def labelled(self, pdf_T_by_utt: Mapping[str, PdfIds]) -> SpeechSet:
        """Return the set with other labels, without utterances that are not in the mapping."""
        keep = [u for u, utt_id in enumerate(self.frames.utt_ids) if utt_id in pdf_T_by_utt]
        utt_ids = selected(self.frames.utt_ids, keep)
        lengths = np.fromiter((len(pdf_T_by_utt[utt_id]) for utt_id in utt_ids), np.int64, len(keep))
        side = self.frames.side
        if side and len(keep) < len(self.texts):
            row_of = [side.row_T[slice(*self.frames.offsets[u:u + 2])] for u in keep]
            side = Side(side.rows_RS, np.concatenate(row_of))
        labels = (pdf_T_by_utt[utt_id].astype(np.int32, casting="same_kind", copy=False) for utt_id in utt_ids)
        pdf_T = mapped.concatenated(labels, (int(lengths.sum()),), self.frames.features_TD)
        frames = FrameSet(self._of(self.frames.features_TD, keep), pdf_T,
                          np.concatenate([[0], np.cumsum(lengths)]), utt_ids, side=side)
        units = self.cmvn and CmvnStats(self.cmvn.stats, selected(self.cmvn.unit_of, keep) if self.cmvn.unit_of else ())
        return SpeechSet(frames, selected(self.texts, keep), selected(self.speakers, keep), units,
                         None if self.raw_TD is None else self._of(self.raw_TD, keep))

    def _of(self, rows_TD: Features, keep: Sequence[int]) -> Features:
        """Return the rows of some utterances; those of all are not copied."""
        if len(keep) == len(self.texts):
            return rows_TD
        bounds = [slice(*self.frames.offsets[u:u + 2]) for u in keep]
        num_rows = sum(part.stop - part.start for part in bounds)
        return mapped.concatenated((rows_TD[part] for part in bounds), (int(num_rows), rows_TD.shape[1]), rows_TD)


def build(utterances: Iterable[Utterance], config: FeatureConfig) -> SpeechSet:
    """Build a set from utterances; their audio is freed one by one."""
    return assemble([frame(utterance, config) for utterance in utterances], config)


def frame(utterance: Utterance, config: FeatureConfig) -> FramedUtterance:
    """Return the features of the utterance, with its labels."""
    expected = num_frames(len(utterance.samples), config.sample_rate_hz)
    if len(utterance.pdf_T) != expected:
        seconds = len(utterance.samples) / config.sample_rate_hz
        raise DataError(f"Utterance {utterance.utt_id} has {len(utterance.pdf_T)} labels for "
                        f"{expected} frames ({seconds:.2f} s); its alignment belongs to other "
                        "audio: align it again.")
    features_TD = filterbank.extract(utterance.samples, config)
    return FramedUtterance(utterance.utt_id, utterance.speaker, utterance.words, features_TD, utterance.pdf_T)


def assemble(utterances: Sequence[FramedUtterance], config: FeatureConfig, given: CmvnStats | None = None) -> SpeechSet:
    """Build a set, normalized over the unit given by `config` or by statistics of the data. With
    `features.cmvn=online` `normalized_online` follows, with statistics of the training set.
    """
    raw, speakers = [one.features_TD for one in utterances], [one.speaker for one in utterances]
    utt_ids = tuple(one.utt_id for one in utterances)
    units = given or CmvnStats({}, ())
    if given is not None:
        normal = [cmvn.normalized(*one) for one in zip(raw, (given.stats[unit] for unit in given.unit_of), strict=True)]
    else:
        normal = filterbank.normalize(raw, speakers, config)
        if config.cmvn in ("utterance", "speaker"):
            units = cmvn.units(map(cmvn.statistics, raw), utt_ids if config.cmvn == "utterance" else tuple(speakers))
    offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    frames = FrameSet(features_TD=np.concatenate(normal), pdf_T=np.concatenate([one.pdf_T for one in utterances]),
                      offsets=offsets, utt_ids=utt_ids)
    return SpeechSet(frames, tuple(one.words for one in utterances), tuple(speakers), units)


def normalized_online(speech: SpeechSet, all_speech: cmvn.Stats) -> SpeechSet:
    """Subtract the online mean of each speaker, in the order of the set, and scale."""
    normal = online_normalized(speech.split_features(), speech.speakers, all_speech)
    units = CmvnStats({cmvn.GLOBAL: all_speech}, (cmvn.GLOBAL,) * len(speech.texts))
    return replace(speech, frames=replace(speech.frames, features_TD=np.concatenate(list(normal))), cmvn=units,
                   raw_TD=speech.frames.features_TD)


def online_normalized(features: Iterable[Features], speakers: Sequence[str], all_speech: cmvn.Stats) -> Iterator[Features]:
    """Yield the features of each utterance as `normalized_online` normalizes them."""
    heard: dict[str, cmvn.CmnState] = {}
    for raw_TD, speaker in zip(features, speakers, strict=True):
        stream = cmvn.OnlineMean(all_speech, heard.get(speaker))
        yield stream.normalized(raw_TD)
        heard[speaker] = stream.heard()
