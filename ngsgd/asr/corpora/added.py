"""Kaldi data directories added to the training set of a corpus (`data.added_dirs`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngsgd.asr.corpora import alignments, data_dir
from ngsgd.asr.corpora.alignments import Alignment
from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.features import augment
from ngsgd.asr.features.augment import Mix
from ngsgd.asr.lang import lexicon
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError


def read(data: DataConfig) -> Sequence[UtteranceEntry]:
    """Read the tables of all directories, whose utterances must have unique names."""
    return data_dir.Listing(one for folder in data.added_dirs
                            for one in data_dir.read(Path(folder).expanduser(), given_features=False))


def fingerprint(data: DataConfig) -> dict[str, Any]:
    """Identify the added speech, for the name of the prepared data; empty without any."""
    if not data.added_dirs:
        return {}
    seen = hashlib.sha256()
    for one in read(data):
        seen.update(f"{data_dir.identity(one, Path())}\n".encode())
    return {"added": {"speech": seen.hexdigest(), "copies": data.added_copies}}


def utterances(listed: Sequence[UtteranceEntry], data: DataConfig, features: FeatureConfig,
               changes: AugmentConfig, topology: Topology, *, labels: Alignment | None = None,
               mix: Mix | None = None) -> Iterable[Utterance]:
    """Yield `data.added_copies` copies of each utterance, augmented independently.

    Args:
        listed, data, features, changes, topology: utterances, sections of the settings, states.
        labels: HMM states of the frames; utterances without are omitted. Default: none has labels.
        mix: adds the noise of a generated corpus, except to the clean fraction.

    Raises:
        DataError: most utterances have no labels.
    """
    said: Iterable[Utterance] = data_dir.spoken(listed, features)
    if labels:
        missing = [one.utt_id for one in listed if one.utt_id not in labels.pdf_T]
        if len(missing) > alignments.MOST_MISSING * len(listed):
            raise DataError(f"{labels.path} has no states for {len(missing)} of the {len(listed)} "
                            f"utterances of data.added_dirs, the first is {missing[0]}; use an "
                            "alignment of this data, or leave data.alignment empty.")
        said = (_labelled(one, labels, topology.num_pdfs) for one in said if one.utt_id in labels.pdf_T)
    changes = replace(changes, num_copies=changes.num_copies * data.added_copies)
    if not mix and not changes.changes_audio:
        return said
    return augment.augmented(said, changes, sample_rate_hz=features.sample_rate_hz,
                             silence_pdfs=topology.silence_pdfs, mix=mix)


def _labelled(one: Utterance, labels: Alignment, num_pdfs: int) -> Utterance:
    pdf_T = labels.pdf_T[one.utt_id]
    alignments.check(pdf_T, one.utt_id, len(one.pdf_T), num_pdfs, labels.path)
    return replace(one, pdf_T=pdf_T)


def check_words(listed: Sequence[UtteranceEntry], topology: Topology, corpus: str) -> None:
    """Raise DataError for a word that the lexicon of a public corpus lacks."""
    for one in listed:
        unknown = [word for word in one.words if word not in topology.lexicon]
        if unknown or not one.words:
            reason = f"the word {unknown[0]}{lexicon.alike(unknown[0], topology.lexicon)}" if unknown else "no words"
            raise DataError(f"{one.where}: {one.utt_id} has {reason}, but the words of data.corpus={corpus} "
                            "are "
                            f"{', '.join(topology.words)}; correct or remove the utterance, or train with "
                            "recipe=kaldi and a lexicon.")
