"""i-vectors of a run: extractor and i-vectors of all sets, from the cache or computed.

Both are stored with the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.ivectors import model as extractor_file
from ngsgd.asr.ivectors.model import IvectorModel
from ngsgd.asr.ivectors.training import TRAIN_UTTERANCES, extract_each, train
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import RunConfig
from ngsgd.data import mapped
from ngsgd.data.frames import Side
from ngsgd.files import cache_name
from ngsgd.phase import Phase
from ngsgd.pipeline.runs.run_folder import RunFolder, folder_of_model

# increase it if the same settings would give other i-vectors
RECIPE_VERSION = 2
_SETS = ("train", "valid", "test")
_INDEX = "index.json"
# settings that do not change the extractor
_OF_EXTRACTION = ("max_count", "period")
# consecutive utterances that share the state of a speaker, as in nnet3 recipes; 0: all
_UTTERANCES = {"train": TRAIN_UTTERANCES, "valid": 0, "test": 0}

Report = Callable[[str], None]


def extractor_of(config: RunConfig, corpus: Corpus, cache_root: Path, report: Report, folder: RunFolder | None) -> Path:
    """Return the extractor of the run or of its initial model, or train one on the training set."""
    if folder is not None and folder.ivectors.exists():
        return folder.ivectors
    if config.init_model and (given := folder_of_model(config.init_model) / "final" / RunFolder.IVECTORS).exists():
        return given
    settings = {name: value for name, value in asdict(config.ivectors).items() if name not in _OF_EXTRACTION}
    path = cache_root / f"{cache_name('ivectors', version=RECIPE_VERSION, corpus=corpus.digest, settings=settings)}.safetensors"
    if path.exists() and not extractor_file.is_sound(path):
        report(f"{path} is damaged; training it again.")
        path.unlink()
    if not path.exists():
        report(Phase("training the i-vector extractor"))
        extractor_file.write(train(corpus.train, config.ivectors, report), path)
    return path


def with_ivectors(config: RunConfig, corpus: Corpus, extractor: Path, cache_root: Path, report: Report = print) -> Corpus:
    """Add an i-vector to every frame of the corpus; its digest identifies the extractor."""
    folder = cache_root / cache_name("ivectors", version=RECIPE_VERSION, corpus=corpus.digest,
                                     extractor=extractor_file.digest(extractor), settings=asdict(config.ivectors))
    if not _is_there(folder, corpus, config, report):
        # shared_directory keeps a directory that has an index
        (folder / _INDEX).unlink(missing_ok=True)
        report(Phase("extracting i-vectors"))
        _store(folder, corpus, extractor_file.read(extractor, config.ivectors))
    sets: dict[str, Any] = {
        name: _with_rows(getattr(corpus, name), np.load(folder / f"{name}.npy", mmap_mode="r"), config.ivectors.period)
        for name in _SETS}
    return replace(corpus, **sets, content=hashlib.sha256((corpus.digest + folder.name).encode()).hexdigest())


def _store(folder: Path, corpus: Corpus, model: IvectorModel) -> None:
    with files.shared_directory(folder, _INDEX) as new:
        for name in _SETS:
            speech: SpeechSet = getattr(corpus, name)
            num_rows = int(_num_rows(speech, model.front.config.period).sum())
            mapped.write_rows(new / f"{name}.npy", (num_rows, model.front.config.dim),
                              extract_each(speech, model, most_utterances=_UTTERANCES[name]))
        index = files.sealed("i-vectors", {"sha256": {name: files.sha256(new / f"{name}.npy") for name in _SETS}})
        (new / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _is_there(folder: Path, corpus: Corpus, config: RunConfig, report: Report) -> bool:
    if not folder.is_dir():
        return False
    try:
        _check(folder, corpus, config)
    except (OSError, ValueError, KeyError) as error:
        report(f"{folder} is damaged ({error}); preparing it again.")
        return False
    return True


def _check(folder: Path, corpus: Corpus, config: RunConfig) -> None:
    """Raise for files that do not match their digests or the corpus."""
    digests = files.unsealed("i-vectors", files.read_json(folder / _INDEX))["sha256"]
    for name in _SETS:
        if files.sha256(folder / f"{name}.npy") != digests[name]:
            raise ValueError(f"{name}.npy does not match its checksum")
    for name in _SETS:
        lengths = np.diff(getattr(corpus, name).frames.offsets)
        rows_RS = np.load(folder / f"{name}.npy", mmap_mode="r")
        if rows_RS.shape != (int((-(-lengths // config.ivectors.period)).sum()), config.ivectors.dim):
            raise ValueError(f"{name}.npy has the shape {rows_RS.shape}")


def _num_rows(speech: SpeechSet, period: int) -> npt.NDArray[np.int64]:
    return np.asarray(-(-np.diff(speech.frames.offsets) // period))


def _with_rows(speech: SpeechSet, rows_RS: npt.NDArray[np.float32], period: int) -> SpeechSet:
    lengths = np.diff(speech.frames.offsets)
    num_rows_U = -(-lengths // period)
    first_U = np.cumsum(num_rows_U) - num_rows_U
    row_T = np.concatenate([first + np.arange(length) // period for first, length in zip(first_U, lengths, strict=True)])
    return replace(speech, frames=replace(speech.frames, side=Side(rows_RS, row_T.astype(np.int32))))
