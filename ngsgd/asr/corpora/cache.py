"""Prepared speech on disk: arrays, and a manifest with the SHA-256 of each file and of itself.

    manifest.json                      source settings, language, checksums
    lm.arpa, HCLG.fst                  if the corpus has them
    train.json, valid.json, test.json  utterance ids, words, speakers
    train.features_TD.npy, ...         arrays of `FrameSet`; features are memory-mapped for reading
    train.raw_TD.npy, ...              features before normalization (features.cmvn=online)
    train.cmvn.npz, ...                statistics of the normalization; not part of the digest,
                                       because they follow from the features
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.lang.language import Language
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.data import columns
from ngsgd.data.columns import Selected, Strings, WordLists
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError

MANIFEST = "manifest.json"
LANGUAGE_FILES = ("lm.arpa", "HCLG.fst")
ARRAYS = ("features_TD", "pdf_T", "offsets")
_CMVN = ".cmvn.npz"
# lists of train.json and so on
_COLUMN_OF: Mapping[str, Callable[[Iterable[Any]], Sequence[Any]]] = {"utt_ids": Strings, "texts": WordLists, "speakers": Strings}
_MAX_NAMES_BYTES = 1 << 34  # names and words of a set


class DamagedError(Exception):
    """A prepared folder is damaged; the message names the file. The caller prepares it again."""


def store(folder: Path, sets: Mapping[str, SpeechSet], language: Language, *, made_from: Mapping[str, Any]) -> None:
    """Write the sets atomically, unless another process has done so."""
    with files.shared_directory(folder, MANIFEST) as new:
        for name, speech in sets.items():
            for array in ARRAYS:
                _save(new / f"{name}.{array}.npy", getattr(speech.frames, array))
            if speech.raw_TD is not None:
                _save(new / f"{name}.raw_TD.npy", speech.raw_TD)
            if speech.cmvn is not None:
                units = list(speech.cmvn.stats)
                place = {unit: at for at, unit in enumerate(units)}
                np.savez(new / f"{name}{_CMVN}", names=np.array(units, dtype=np.str_),
                         stats=np.array(list(speech.cmvn.stats.values())),
                         unit_U=np.array([place[unit] for unit in speech.cmvn.unit_of], np.int64))
            words = {"utt_ids": speech.frames.utt_ids, "texts": speech.texts, "speakers": speech.speakers}
            with (new / f"{name}.json").open("w", encoding="utf-8") as file:
                columns.write_json(file, words)
        for name, content in language.files().items():
            (new / name).write_bytes(content)
        checksums = {path.name: files.sha256(path) for path in sorted(new.iterdir())}
        manifest = {"made_from": made_from, "language": language.to_json(), "sets": list(sets), "sha256": checksums}
        (new / MANIFEST).write_text(json.dumps(files.sealed("corpus", manifest), indent=1), encoding="utf-8")


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    """Save an array as .npy; the complete file of a map is linked instead of copied."""
    source = getattr(array, "filename", None)
    if source is None or isinstance(array.base, np.ndarray):
        np.save(path, array)
        return
    try:
        os.link(source, path)
    except OSError:
        # a file system without links
        shutil.copyfile(source, path)


def load(folder: Path) -> tuple[dict[str, SpeechSet], Language, str]:
    """Load sets, language and a digest of all files; DamagedError if one is missing or changed."""
    try:
        manifest = files.unsealed("corpus", files.read_json(folder / MANIFEST))
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder / MANIFEST} is missing or damaged ({error})") from error
    if set(manifest) != {"made_from", "sets", "sha256", "language"} \
            or not isinstance(manifest["sha256"], dict):
        raise DamagedError(f"{folder / MANIFEST} has missing or unknown entries")
    for name, expected in manifest["sha256"].items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise DamagedError(f"{path} is missing")
        if files.sha256(path) != expected:
            raise DamagedError(f"{path} does not match the checksum in its manifest")
    content = {name: checksum for name, checksum in manifest["sha256"].items() if not name.endswith(_CMVN)}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    try:
        sets = {name: _load_set(folder, name, manifest["sha256"]) for name in manifest["sets"]}
        files_of_language = {name: (folder / name).read_bytes() for name in LANGUAGE_FILES if name in manifest["sha256"]}
        return sets, Language.from_json(manifest["language"], files_of_language), digest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, DataError) as error:
        raise DamagedError(f"{folder} cannot be read ({error!r})") from error


def _load_set(folder: Path, name: str, listed: Mapping[str, str]) -> SpeechSet:
    words = {key: _COLUMN_OF[key](items) for key, items in
             columns.read_json(files.read_regular_text(folder / f"{name}.json", _MAX_NAMES_BYTES))}
    features_TD, pdf_T, offsets = (np.load(folder / f"{name}.{array}.npy", mmap_mode="r") for array in ARRAYS)
    frames = FrameSet(features_TD=features_TD, pdf_T=pdf_T, offsets=np.array(offsets), utt_ids=words["utt_ids"])
    raw, units = folder / f"{name}.raw_TD.npy", None
    # only files with verified checksums
    if f"{name}{_CMVN}" in listed:
        with np.load(folder / f"{name}{_CMVN}") as arrays:
            names = arrays["names"].tolist()
            units = CmvnStats(dict(zip(names, arrays["stats"], strict=True)), Selected(names, map(int, arrays["unit_U"])))
    return SpeechSet(frames, words["texts"], words["speakers"], units,
                     np.load(raw, mmap_mode="r") if raw.name in listed else None)
