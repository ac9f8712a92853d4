"""Files for speech recognition in `final/` besides the network, and bundles in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import __version__ as torch_version

import ngsgd
from ngsgd.asr import bundle_files
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.evaluation import DecodingResult
from ngsgd.asr.decode.tuning import DecodingWeights
from ngsgd.asr.features import cmvn
from ngsgd.asr.features.cmvn import Stats
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError
from ngsgd.files import new_file, read_json, read_regular_bytes
from ngsgd.runs import trust as permission
from ngsgd.runs.final_model import check_final
from ngsgd.runs.run_folder import RunFolder, find_run
from ngsgd.training.storage import lock

_MAX_BYTES = 1 << 34


def keep_recognizer(
    folder: RunFolder, config: RunConfig, corpus: Corpus, result: DecodingResult
) -> None:
    """Write all files for speech recognition to `final/`; the index is written last."""
    wer = {
        "valid": asdict(result.valid),
        "test": asdict(result.test),
        "test_interval_95": asdict(result.test_interval),
    }
    content_of = _content(folder, config, corpus, result.setting, result.calibration, wer)
    for name, content in content_of.items():
        path = folder.final / name
        # the index is the last entry of the mapping
        if name in bundle_files.MODEL_FILES or (
            path.is_file() and read_regular_bytes(path, _MAX_BYTES) == content
        ):
            continue
        with new_file(path) as temporary:
            temporary.write_bytes(content)


def open_bundle(model: str, *, trust: bool = False) -> Bundle:
    """Open a bundle, a run folder, or a run by its name under runs/.

    A custom network is imported if this user began the run, or with `trust` (see
    docs/own-model.md).
    """
    path = Path(model)
    if not path.is_file() and not (path / "model.json").is_file():
        path = find_run(model)
    final = path
    if (path / "config.yaml").is_file():
        folder = RunFolder(path)
        final = folder.final
        # the index is written at the end of the training
        if not (final / bundle_files.INDEX).is_file() and lock.holder_of(folder.lock):
            raise CheckpointError(
                f"{path} is still running and has no final model yet; wait for its end, and see "
                f"its state with: ngsgd status {path}."
            )
    if (final / "model.json").is_file():
        about = permission.read_about(final)
        permission.require(about["model"], final / "model.json", about["run_id"], trust=trust)
        trust = True
    return Bundle.load(path, trust=trust)


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
        raise CheckpointError(
            f"{path} has no scale and penalty ({type(error).__name__}: {error}); decode the run "
            f"first with: ngsgd decode {folder.path}."
        ) from error
    bundle_files.write_file(output, _content(folder, config, corpus, weights, calibration, wer))


def _content(
    folder: RunFolder,
    config: RunConfig,
    corpus: Corpus,
    weights: DecodingWeights,
    calibration: Calibration,
    wer: Mapping[str, Any],
) -> dict[str, bytes]:
    """Name -> content of every file of a bundle, the index last."""
    model_files = {
        name: read_regular_bytes(folder.final / name, _MAX_BYTES)
        for name in bundle_files.MODEL_FILES
        if (folder.final / name).is_file()
    }
    index = bundle_files.index_of(
        model_files,
        language=corpus.language,
        features=config.features,
        decode=config.decode,
        weights=weights,
        calibration=calibration,
        all_speech=_all_speech(corpus.train),
        provenance=_provenance(folder, config, corpus, wer),
    )
    return {**model_files, **corpus.language.files(), bundle_files.INDEX: index.encode()}


def _all_speech(speech: SpeechSet) -> Stats | None:
    """Statistics of all training frames, before they were normalized."""
    if speech.cmvn is None or not speech.cmvn.stats:
        return None
    stats = speech.cmvn.stats
    return np.asarray(
        stats[cmvn.GLOBAL] if cmvn.GLOBAL in stats else np.sum(list(stats.values()), axis=0)
    )


def _provenance(
    folder: RunFolder, config: RunConfig, corpus: Corpus, wer: Mapping[str, Any]
) -> dict[str, Any]:
    """Origin of the model, without paths or addresses of the training machine."""
    train = corpus.train
    return {
        "run": folder.path.name,
        "ngsgd": ngsgd.__version__,
        "torch": str(torch_version),
        "corpus": corpus.name,
        "corpus_sha256": corpus.digest,
        "train_utterances": len(train.texts),
        "train_hours": train.frames.num_frames / 360_000,
        "train_speakers": len(set(train.speakers)),
        "model": config.model.label,
        "objective": config.objective.kind,
        "optimizer": config.optimizer.kind,
        "seed": config.seed,
        "wer": dict(wer),
    }
