"""Transcribed speech of any corpus, a Kaldi data directory or lhotse manifests, scored by a model.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.asr import speech_set
from ngsgd.asr.adapt.speakers import FindPath
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.corpora import data_dir, manifests
from ngsgd.asr.ivectors.training import extract
from ngsgd.data.frames import Side
from ngsgd.errors import DataError


@dataclass(frozen=True)
class ScoredSet:
    """Utterances with their references and the scores of a model."""

    utt_ids: Sequence[str]
    speakers: Sequence[str]
    texts: Sequence[tuple[str, ...]]
    logliks: tuple[npt.NDArray[np.float32], ...]  # T x P each, log posterior minus log prior
    # such as the gender, for each utterance
    attributes: Mapping[str, Sequence[str]]


def read(bundle: Bundle, folder: Path, find_path: FindPath | None = None) -> ScoredSet:
    """Read a folder, compute features as in training, and score them. `find_path` is the first pass
    of speaker adaptation. Raises DataError if files are missing or damaged, or do not match the
    model.
    """
    # as transcription does: the rate is that of the model
    config = replace(bundle.features, resample=True)
    listed = _utterances(folder, given_features=config.kind == "given")
    if not any(one.words for one in listed):
        raise DataError(f"{folder} has no words in its transcripts, so the WER is undefined; choose a set "
                        "with speech.")
    attributes = data_dir.attributes(folder, [one.speaker for one in listed])
    if config.kind == "given":
        framed = list(data_dir.given(listed, folder))
        dim = framed[0].features_TD.shape[1]
        given = data_dir.given_cmvn(listed, folder, dim) if config.cmvn == "given" else None
        speech = speech_set.assemble(framed, config, given)
    else:
        speech = speech_set.build(data_dir.spoken(listed, config), config)
        if config.cmvn == "online":
            speech = speech_set.normalized_online(speech, bundle.statistics)
    dim = speech.frames.features_TD.shape[1]
    expected = bundle.adaptation.input_dim if bundle.adaptation else bundle.window.feature_dim
    if dim != expected:
        raise DataError(f"{folder} has {dim} features per frame, but the model expects {expected}; use "
                        "features of the kind that it was trained on.")
    features = speech.split_features()
    sides: list[Side | None] = [None] * len(speech.texts)
    if bundle.adaptation is not None:
        # of all utterances of a speaker at once
        for numbers in speech.utterances_by_speaker().values():
            found = bundle.adaptation.adapt_speaker([features[u] for u in numbers],
                                                    find_path or bundle.find_path,
                                                    bundle.log_likelihoods)
            for u, x_TD in zip(numbers, found, strict=True):
                features[u] = x_TD
    if bundle.ivectors is not None:
        period = bundle.ivectors.front.config.period
        rows = extract(speech, bundle.ivectors, most_utterances=0)
        sides = [Side(rows_RS, (np.arange(length) // period).astype(np.int32))
                 for rows_RS, length in zip(rows, np.diff(speech.frames.offsets), strict=True)]
    logliks = tuple(bundle.log_likelihoods(np.asarray(x_TD), side) for x_TD, side in zip(features, sides, strict=True))
    return ScoredSet(speech.frames.utt_ids, speech.speakers, speech.texts, logliks, attributes)


def _utterances(folder: Path, *, given_features: bool) -> Sequence[data_dir.UtteranceEntry]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; use a Kaldi data directory, or a folder with "
                        "recordings.jsonl.gz and supervisions.jsonl.gz of lhotse.")
    if (folder / "text").is_file():
        return data_dir.read(folder, given_features=given_features)
    if (found := manifests.read_folder(folder)) is not None:
        if given_features:
            raise DataError(f"{folder} has recordings, but the model was trained on precomputed features "
                            "(features.kind=given); use a Kaldi data directory with feats.scp.")
        return found
    raise DataError(f"{folder} contains neither text of Kaldi nor manifests of lhotse; use a folder with "
                    "text, utt2spk and wav.scp, or with recordings.jsonl.gz and supervisions.jsonl.gz.")
