"""Eigenvalues of the Fisher factors of a run, measured by one additional job."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.files import read_json
from ngsgd.models.statistics import model_for
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.storage.checkpoint import CheckpointStore
from ngsgd.training.worker import Worker


def fisher_spectra(folder: RunFolder, config: RunConfig) -> dict[str, list[float]]:
    """Return the eigenvalues of every Fisher factor over their mean, the largest first.

    One job trains on one archive from the newest checkpoint, and its result is dropped.

    Args:
        folder: folder of the run.
        config: configuration of the run.

    Returns:
        Eigenvalues by "layer/side"; the last one represents all directions outside the factor.

    Raises:
        ConfigError: the model or the objective of the run is not supported.
        DataError: the examples or the checkpoint are gone.
    """
    if config.task._target_:
        raise ConfigError("the run trains a custom task, but spectra require a speech model")
    if config.model._target_:
        raise ConfigError("the model is a custom module (model._target_), which is not imported "
                          "for a report")
    if config.objective.kind != "ce":
        raise ConfigError(f"objective.kind is {config.objective.kind}, but spectra require an "
                          "objective of single frames")
    try:
        egs = read_json(folder.data)["egs"]
        layout = FlatLayout.of(model_for(config, EgsReader(Path(egs))))
        store = CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep)
        checkpoint, _ = store.latest()
    except NgsgdError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(str(error)) from None
    if checkpoint is None:
        raise DataError("the run has no checkpoint")
    outer_iter = checkpoint.progress.outer_iter
    job = Job(outer_iter, 0, 1, (WorkItem(Shard(0, 0), outer_iter, 0),),
              JobInit(LocalRef(checkpoint.parameters)), config.schedule.lr_final, 1.0, 1.0,
              keep_fisher=True)
    states = Worker(SpeechTaskSpec(config, egs), 0).run(job).fisher or {}
    found = {}
    for name, state in states.items():
        if "d" not in state:
            continue
        d_R, rho = np.asarray(state["d"], dtype=np.float64), float(state["rho"])
        dim = np.asarray(state["W"]).shape[1]
        mean = (d_R.sum() + dim * rho) / dim
        layer, _, side = name.rpartition(".")
        found[f"{layer}/{side}"] = [*sorted(((d_R + rho) / mean).tolist(), reverse=True), rho / mean]
    return found
