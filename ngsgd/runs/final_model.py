"""The final model of a run on disk: parameters, shapes, class priors, checksums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ngsgd import interface
from ngsgd.config import ModelConfig, RunConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import CheckpointError
from ngsgd.files import new_directory, read_json, sealed, sha256, unsealed, write_text
from ngsgd.models import DataStatistics
from ngsgd.models.build import rebuild
from ngsgd.models.growing import StagedModel
from ngsgd.models.statistics import statistics_for
from ngsgd.runs import trust as permission
from ngsgd.runs.limits import require_memory
from ngsgd.runs.run_folder import RunFolder
from ngsgd.tasks.frame_scores import average_posterior

_TRANSFORM = "input_transform.safetensors"
# SHA-256 of every other file of a final model
DIGESTS = "digests.json"


def _again(final: Path) -> str:
    return f"restore it from a copy, or recreate it from the checkpoints of the run with: {interface.resume(final.parent)}"


def save_final(folder: RunFolder, config: RunConfig, model: nn.Module, reader: EgsReader) -> None:
    """Write the parameters, and the data needed to use them: shapes, features, class priors."""
    # the divisor in decoding: the priors of a sequence objective, or the average posterior
    if config.objective.kind != "ce":
        prior_P = np.asarray(np.exp(load_arrays(folder.denominator)["log_prior"]))
    else:
        prior_P = average_posterior(model, reader, skip_damaged=config.egs.on_corrupt == "quarantine")
    about = {"model": asdict(config.model), "features": asdict(config.features), "num_inputs": reader.info.num_inputs,
             "num_classes": reader.info.num_classes, "left_context": reader.info.left_context,
             "right_context": reader.info.right_context, "feature_dim": reader.info.feature_dim,
             "side_dim": reader.info.side_dim, "priors": prior_P.tolist(),
             "stage": asdict(model.stage) if isinstance(model, StagedModel) else None}
    statistics = statistics_for(config.model, reader) or DataStatistics()
    about |= {"class_counts": list(statistics.class_counts), "objective": config.objective.kind}
    if config.model._target_:
        about["run_id"] = folder.run_id
    if config.ivectors.dim:
        about["ivectors"] = asdict(config.ivectors)
    write_final(folder.final, model, about, statistics.input_transform,
                extractor=folder.ivectors if config.ivectors.dim else None,
                adaptation=folder.adaptation if folder.adaptation.exists() else None)


def write_final(path: Path, model: nn.Module, about: Mapping[str, Any], transform: Tensor | None,
                extractor: Path | None = None, adaptation: Path | None = None) -> None:
    """Write a folder for `open_final`; `extractor` and `adaptation` compute the model input."""
    with new_directory(path) as temporary:
        # copies: tied weights share memory, which safetensors rejects
        state = {name: t.detach().clone().contiguous() for name, t in model.state_dict().items()}
        save_file(state, temporary / "model.safetensors")
        if transform is not None:
            save_file({"input_transform": transform.contiguous()}, temporary / _TRANSFORM)
        for file, name in ((extractor, RunFolder.IVECTORS), (adaptation, RunFolder.ADAPTATION)):
            if file is not None:
                shutil.copyfile(file, temporary / name)
        write_text(temporary / "model.json", json.dumps(about, indent=1))
        digests = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
        write_text(temporary / DIGESTS, json.dumps(sealed("final model", digests), indent=1))


def check_final(path: Path) -> None:
    """Raise CheckpointError unless all files match, or FileNotFoundError as for a partial copy."""
    if not (path / DIGESTS).exists():
        raise CheckpointError(f"{path} has no {DIGESTS}, so its files cannot be verified; {_again(path)}")
    try:
        digests = unsealed("final model", read_json(path / DIGESTS))
        # plain names only: a malicious file must not make this function read a device
        wrong = [name for name, digest in digests.items() if Path(name).name != name or sha256(path / name) != digest]
        wrong += [name for name in ("model.json", "model.safetensors") if name not in digests]
        wrong += [name for name in (_TRANSFORM, RunFolder.IVECTORS, RunFolder.ADAPTATION)
                  if name not in digests and (path / name).exists()]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / DIGESTS} cannot be read ({type(error).__name__}: {error}); {_again(path)}") from error
    if wrong:
        raise CheckpointError(f"{path / wrong[0]} was changed (its SHA-256 differs from {DIGESTS}); {_again(path)}")


def load_final(folder: RunFolder, *, trust: bool = False) -> tuple[nn.Module, npt.NDArray[np.float64]]:
    """Return (model, priors) of a finished run; `trust` allows importing its module."""
    try:
        return open_final(folder.final, trust=trust)
    except OSError as error:
        raise CheckpointError(f"{folder.path} has no readable final model ({error}); finish it "
                              f"with: {interface.resume(folder.path)}") from error


def open_final(path: Path, *, trust: bool = False, own: ModelConfig | None = None) -> tuple[nn.Module, npt.NDArray[np.float64]]:
    """Return (model, priors) from a folder written by `save_final`.

    Args:
        path: the folder.
        trust: import the module that it names, regardless of who began its run.
        own: model of the run that starts from it, whose module is imported if both name the same.

    Raises OSError, CheckpointError, or ConfigError for a module whose import is not allowed.
    """
    about = permission.read_about(path)
    check_final(path)
    settings = permission.as_own(about["model"], own)
    permission.require(settings, path / "model.json", about["run_id"], trust=trust)
    try:
        state = load_file(path / "model.safetensors")
        transform = load_file(path / _TRANSFORM)["input_transform"] if (path / _TRANSFORM).exists() else None
        require_memory(ModelConfig(**settings), about["num_inputs"], about["num_classes"])
        return rebuild(about, settings, state, transform)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"the final model in {path} cannot be used ({type(error).__name__}: "
                              f"{str(error).partition(chr(10))[0]}); {_again(path)}") from error
