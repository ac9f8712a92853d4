"""Files for speech recognition in `final/` besides the network, and bundles in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import __version__ as torch_version

import ngsgd
from ngsgd.asr import bundle
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode.evaluation import DecodingResult
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights
from ngsgd.asr.features import cmvn
from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError
from ngsgd.files import new_file, read_json, read_regular_bytes
from ngsgd.runs import trust as permission
from ngsgd.runs.final_model import check_final
from ngsgd.runs.run_folder import RunFolder, find_model
from ngsgd.training.storage import lock

_MAX_BYTES = 1 << 34


def keep_recognizer(folder: RunFolder, config: RunConfig, corpus: Corpus, result: DecodingResult) -> None:
    """Write all files for speech recognition to `final/`; the index is written last."""
    wer = {"valid": asdict(result.valid), "test": asdict(result.test), "test_interval_95": asdict(result.test_interval)}
    # the index is the last entry of the mapping
    for name, content in _content(folder, config, corpus, result.setting, result.calibration, wer).items():
        path = folder.final / name
        is_there = path.is_file() and read_regular_bytes(path, _MAX_BYTES) == content
        if name not in bundle.MODEL_FILES and not is_there:
            with new_file(path) as temporary:
                temporary.write_bytes(content)


def open_bundle(model: str | Path, *, trust: bool = False) -> bundle.Bundle:
    """Open a bundle, a run folder, or a run by its name; `trust` allows any custom network."""
    final = path = find_model(model)
    if (path / "config.yaml").is_file():
        folder = RunFolder(path)
        final = folder.final
        # the index is written at the end of the training
        if not (final / bundle.INDEX).is_file() and lock.holder_of(folder.lock):
            raise CheckpointError(f"{path} is still running and has no final model yet; wait for "
                                  f"its end, and see its state with: ngsgd status {path}.")
    if (final / "model.json").is_file():
        about = permission.read_about(final)
        permission.require(about["model"], final / "model.json", about["run_id"], trust=trust)
        trust = True
    return bundle.Bundle.load(path, trust=trust)


def export_bundle(folder: RunFolder, config: RunConfig, corpus: Corpus, output: Path) -> None:
    """Write a bundle in one file."""
    check_final(folder.final)
    path = folder.decode / "wer.json"
    try:
        scores = read_json(path)
        weights = DecodingWeights(float(scores["acoustic_scale"]), float(scores["word_penalty"]))
        calibration = Calibration(**scores["calibration"])
        wer = {name: scores[name] for name in ("valid", "test", "test_interval_95")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no scale and penalty ({type(error).__name__}: {error}); "
                              f"decode the run first with: ngsgd decode {folder.path}.") from error
    bundle.write_file(output, _content(folder, config, corpus, weights, calibration, wer))


def _content(folder: RunFolder, config: RunConfig, corpus: Corpus, weights: DecodingWeights,
             calibration: Calibration, wer: Mapping[str, Any]) -> dict[str, bytes]:
    """Name -> content of every file of a bundle, the index last."""
    model_files = {name: read_regular_bytes(folder.final / name, _MAX_BYTES)
                   for name in bundle.MODEL_FILES if (folder.final / name).is_file()}
    train = corpus.train
    # statistics of all training frames, before they were normalized
    stats = train.cmvn.stats if train.cmvn is not None else {}
    all_speech = stats[cmvn.GLOBAL] if cmvn.GLOBAL in stats else np.sum(list(stats.values()), axis=0)
    # without paths or addresses of the training machine
    provenance = {
        "run": folder.path.name, "ngsgd": ngsgd.__version__, "torch": str(torch_version),
        "corpus": corpus.name, "corpus_sha256": corpus.digest,
        "train_utterances": len(train.texts), "train_hours": train.frames.num_frames / 360_000,
        "train_speakers": len(set(train.speakers)), "model": config.model.label,
        "objective": config.objective.kind, "optimizer": config.optimizer.label,
        "seed": config.seed, "wer": dict(wer)}
    index = bundle.index_of(
        model_files, language=corpus.language, features=config.features, decode=config.decode,
        weights=weights, calibration=calibration, all_speech=np.asarray(all_speech) if stats else None, provenance=provenance)
    return {**model_files, **corpus.language.files(), bundle.INDEX: index.encode()}
