"""Speech made ready for training: features, the HMM state of every frame, words, and the topology to decode with.

    corpus = prepare(config.data, config.features, cache_root, print)
    corpus.train.frames      # features (normalised, not spliced) and pdf ids
    corpus.test.texts[0]     # the words of the first test utterance

Who is heard where.  digits: train, valid and test have different voices.  fsdd, data.split=speaker: test is two
speakers never trained on, valid the training speakers' held-out recordings; data.split=official: all speakers are in
all sets, with different recordings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.asr import augment, cache, digit_labels, digits, features, fsdd, fsdd_source, speech_set, synthesis
from ngsgd.asr.fsdd_segments import load_catalogue, split
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.topology import SILENCE_PDF, Topology
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig

RECIPE_VERSION = 2  # raise it when the same settings would give other data, so that old caches are not taken for new

Report = Callable[[str], None]

__all__ = ["Corpus", "SpeechSet", "check_source", "prepare"]


@dataclass(frozen=True)
class Corpus:
    """Everything about the speech that training and decoding need."""

    name: str
    train: SpeechSet
    valid: SpeechSet
    test: SpeechSet
    topology: Topology
    digest: str  # SHA-256 over all prepared files

    @property
    def num_pdfs(self) -> int:
        return self.topology.num_pdfs


def check_source(data: DataConfig) -> None:
    """Raises when the speech cannot be got at; takes no longer than looking into a folder."""
    features.toolkit()
    if data.corpus == "digits":
        synthesis.require()
    elif data.source:
        fsdd_source.locate(data.source)


def prepare(data: DataConfig, feature_config: FeatureConfig, cache_root: Path, report: Report, *,
            augment_config: AugmentConfig | None = None) -> Corpus:
    """The corpus, from the cache when it was prepared before with the same settings; damaged files are prepared again.

    `augment_config` changes the training set alone.
    """
    check_source(data)
    changes = augment_config or AugmentConfig()
    key = {**_what_decides(data, feature_config), **augment.what_decides(changes)}
    folder = cache_root / f"{data.corpus}-{cache.short_hash(key)}"
    if folder.exists():
        try:
            return _load(data.corpus, folder)
        except cache.DamagedError as damage:
            report(f"{damage}; preparing it again.")
    sets, topology = (_make_digits if data.corpus == "digits" else _make_fsdd)(
        data, feature_config, changes, cache_root, report)
    cache.store(folder, sets, about={"made_from": key, "topology": topology.to_json()})
    return _load(data.corpus, folder)


def _what_decides(data: DataConfig, feature_config: FeatureConfig) -> dict[str, Any]:
    """All that the content of the prepared files depends on."""
    settings = {name: value for name, value in asdict(data).items() if name not in ("source", "cache_dir")}
    if data.corpus == "digits":
        settings.pop("split")
    made_with = ["numpy", "kaldi-native-fbank", *(["espeakng-loader", "soxr"] if data.corpus == "digits" else [])]
    return {"recipe_version": RECIPE_VERSION, "data": settings, "features": asdict(feature_config),
            "packages": {package: metadata.version(package) for package in made_with}}


def _load(name: str, folder: Path) -> Corpus:
    sets, about, digest = cache.load(folder)
    return Corpus(name=name, topology=Topology.from_json(about["topology"]), digest=digest, **sets)


def _make_digits(
    data: DataConfig, feature_config: FeatureConfig, changes: AugmentConfig, _cache_root: Path, report: Report,
) -> tuple[Mapping[str, SpeechSet], Topology]:
    sets = {}
    for name, minutes in _minutes_of_sets(data).items():
        made: Iterable[Utterance] = digits.utterances(name, data, minutes=minutes, num_at_once=_num_cores())
        made = augment.for_set(name, made, changes, silence_pdfs=[SILENCE_PDF])
        sets[name] = speech_set.build(made, feature_config)
        report(_describe(name, sets[name]))
    return sets, digit_labels.TOPOLOGY


def _make_fsdd(
    data: DataConfig, feature_config: FeatureConfig, changes: AugmentConfig, cache_root: Path, report: Report,
) -> tuple[Mapping[str, SpeechSet], Topology]:
    catalogue = load_catalogue()
    pools = split(catalogue.segments, data.split)
    place = fsdd_source.locate(data.source) if data.source else fsdd_source.download(cache_root / "downloads", report)
    samples = fsdd_source.read_recordings(place, catalogue.segments)
    sets = {}
    for name, minutes in _minutes_of_sets(data).items():
        pool = fsdd.Pool(segments=pools[name], babble=pools["train"], samples=samples, pdf_T=catalogue.pdf_T)
        made = augment.for_set(name, fsdd.utterances(name, data, pool, minutes=minutes), changes, silence_pdfs=[SILENCE_PDF])
        sets[name] = speech_set.build(made, feature_config)
        report(_describe(name, sets[name]))
    return sets, catalogue.topology


def _minutes_of_sets(data: DataConfig) -> dict[str, float]:
    return {"train": data.train_minutes, "valid": data.valid_minutes, "test": data.test_minutes}


def _describe(name: str, speech: SpeechSet) -> str:
    return (f"{name}: {speech.frames.num_frames / 6000:.1f} minutes, {len(speech.texts)} utterances, {speech.num_words} words, "
            f"{len(np.unique(speech.speakers))} voices")


def _num_cores() -> int:
    return os.cpu_count() or 1
