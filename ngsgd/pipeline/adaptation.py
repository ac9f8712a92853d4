"""Projected and speaker-adapted features of a run, prepared or read from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from ngsgd.asr.adapt import fmllr, speakers
from ngsgd.asr.adapt.speakers import Features, Matrix, SpeakerAdaptation
from ngsgd.asr.corpora import cache
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import RunConfig
from ngsgd.files import DIGEST, digest_of_arrays, new_file, read_regular_bytes
from ngsgd.phase import Phase

# raise it when the same settings would give other features
_VERSION = 1
_SETS = ("train", "valid", "test")
_MAX_BYTES = 1 << 32

Report = Callable[[str], None]


def with_adaptation(config: RunConfig, corpus: Corpus, cache_root: Path,
                    report: Report) -> tuple[Corpus, Path]:
    """Return the corpus with adapted features, and the file of the adaptation.

    Training speakers are adapted with their labels, all others with a first pass of recognition.
    """
    key = {"version": _VERSION, "digest": corpus.digest, "adaptation": asdict(config.adaptation),
           "silence_prob": config.decode.silence_prob, "graph": config.decode.graph,
           "arpa": hashlib.sha256(corpus.language.arpa.encode()).hexdigest()}
    name = f"adaptation-{cache.short_hash(key)}"
    path, of_speakers = cache_root / f"{name}.safetensors", cache_root / f"{name}-speakers.safetensors"
    try:
        adaptation, transforms = read(path, corpus.num_pdfs), _load(of_speakers)
    except (OSError, ValueError):
        report(Phase(f"training {_kind(config)} on {len(set(corpus.train.speakers))} speakers"))
        adaptation, transforms = _trained(config, corpus)
        _save(path, adaptation.arrays())
        _save(of_speakers, transforms)
    sets: dict[str, Any] = {of: _applied(adaptation, getattr(corpus, of), transforms, of) for of in _SETS}
    digest = hashlib.sha256((corpus.digest + name).encode()).hexdigest()
    return replace(corpus, **sets, digest=digest), path


def read(path: Path, num_pdfs: int) -> SpeakerAdaptation:
    """Read the file of an adaptation.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    return SpeakerAdaptation.of_arrays(_load(path), num_pdfs)


def _kind(config: RunConfig) -> str:
    return "LDA, MLLT and fMLLR" if config.adaptation.fmllr else "LDA and MLLT"


def _trained(config: RunConfig,
             corpus: Corpus) -> tuple[SpeakerAdaptation, dict[str, npt.NDArray[Any]]]:
    """The adaptation, and the transforms of all speakers as "set/speaker"."""
    settings, train = config.adaptation, corpus.train
    num_silence = corpus.language.topology.num_silence_states
    found = speakers.train_projection(train.split_features(), train.frames.pdf_T,
                                      context=settings.context, dim=settings.lda_dim,
                                      num_silence=num_silence)
    if not settings.fmllr:
        return found, {}
    projected = _by_speaker(train, [found.project(x_TD) for x_TD in train.split_features()])
    found, of_train = speakers.train_fmllr(found, projected, _by_speaker(train, train.split_pdfs()),
                                           corpus.num_pdfs)
    transforms = {f"train/{speaker}": w_DE for speaker, w_DE in of_train.items()}
    find_path = evaluation.first_pass(evaluation.build_graph(corpus.language, config.decode))
    for name in ("valid", "test"):
        speech: SpeechSet = getattr(corpus, name)
        for speaker, utterances in _by_speaker(speech, speech.split_features()).items():
            transforms[f"{name}/{speaker}"] = found.transform_of(utterances, find_path)
    return found, transforms


def _by_speaker(speech: SpeechSet, values: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for speaker, value in zip(speech.speakers, values, strict=True):
        found.setdefault(speaker, []).append(value)
    return found


def _applied(adaptation: SpeakerAdaptation, speech: SpeechSet,
             transforms: Mapping[str, Matrix], name: str) -> SpeechSet:
    adapted: list[Features] = []
    for speaker, x_TD in zip(speech.speakers, speech.split_features(), strict=True):
        z_TD = adaptation.project(x_TD)
        w_DE = transforms.get(f"{name}/{speaker}")
        adapted.append((z_TD if w_DE is None else fmllr.apply(w_DE, z_TD)).astype(np.float32))
    return replace(speech, frames=replace(speech.frames, features_TD=np.concatenate(adapted)))


def _save(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()},
                   {DIGEST: digest_of_arrays(arrays)})
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read arrays; raises ValueError where they do not match the digest in the file."""
    try:
        arrays: dict[str, npt.NDArray[Any]] = load(read_regular_bytes(path, _MAX_BYTES))
        with safe_open(path, framework="np") as file:
            expected = (file.metadata() or {}).get(DIGEST)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if expected != digest_of_arrays(arrays):
        raise ValueError(f"{path} does not match its digest")
    return arrays

