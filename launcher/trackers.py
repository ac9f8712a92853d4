"""Trackers besides MLflow: TensorBoard, W&B, and functions and objects of the user."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError, MissingExtraError
from ngsgd.imports import first_line
from ngsgd.launcher.mlflow.metrics import Figures, of_machines, records_of, settings_of, storable
from ngsgd.masking import masked
from ngsgd.runs.run_folder import RunFolder, what_is_trained
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord, Tracker

Callback = Callable[[Mapping[str, float], int], object]
_METHODS = ("outer_iteration", "incident", "finished", "close")


class CallbackTracker(Tracker):
    """Calls a function with the figures and the samples processed, as MLflow shows them.

    It is called after each outer iteration, and with the figures of the final model.
    """

    def __init__(self, config: RunConfig, folder: Path, callback: Callback) -> None:
        self._figures, self._callback = Figures(config), callback
        # of the processes that trained before this one
        for _, record in records_of(folder):
            self._figures.count(record)

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        found = self._figures.of(record) | of_machines(record.jobs)
        self._callback({name: storable(value) for name, value in found.items()}, self._figures.step)
        self._figures.count(record)

    def incident(self, incident: Incident) -> None:
        self._figures.count_incident()

    def finished(self, report: FinalReport) -> None:
        self._callback(self._figures.of_result(report), self._figures.step)


class TensorBoardTracker(CallbackTracker):
    """Writes scalars and settings to RUN/tensorboard, for `tensorboard --logdir runs`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter
        super().__init__(config, folder, self._write)
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        settings = "\n".join(f"    {name}: {value}" for name, value in settings_of(config).items())
        self._writer.add_text("settings", settings)

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        # what a killed process has not written is lost
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class WandbTracker(CallbackTracker):
    """A run of W&B, by its variables, such as WANDB_MODE=offline; a resumed run continues it."""

    def __init__(self, config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> None:
        import wandb
        super().__init__(config, folder.path, self._write)
        given, around = config.tracking.experiment_name, os.environ.get("WANDB_PROJECT", "")
        if given and around not in ("", given):
            warn(f"tracking.experiment_name is {given}, so that WANDB_PROJECT, {around}, is not used")
        try:
            self._run = wandb.init(
                project=given or around or what_is_trained(config), name=folder.path.name, id=folder.run_id, resume="allow",
                dir=str(folder.path), config=settings_of(config), settings=wandb.Settings(console="off", silent=True))
        except Exception as error:
            raise ConfigError(f"W&B cannot start ({masked(first_line(error))}); log in with wandb login, or set WANDB_MODE=offline "
                              "or another tracking.kind.") from error

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finished(self, report: FinalReport) -> None:
        super().finished(report)
        self._run.summary.update(self._figures.of_result(report))

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "FINISHED"))


class _Guarded:
    """A tracker that gets no further calls once it has raised: training must continue."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._tracker, self._warn, self._is_sound = tracker, warn, True

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return partial(self._call, name)

    def _call(self, name: str, value: Any) -> None:
        try:
            if self._is_sound:
                getattr(self._tracker, name)(value)
        except Exception as error:
            self._is_sound = False
            self._warn(f"the tracker {type(self._tracker).__name__} failed in {name} ({masked(first_line(error))}); training "
                       "continues without it, and events.jsonl of the run folder has everything.")


def require_package(kind: str) -> None:
    """Raise MissingExtraError where the package of `tracking.kind` is not installed."""
    if kind in ("tensorboard", "wandb") and importlib.util.find_spec(kind) is None:
        raise MissingExtraError(kind, "trackers", f"tracking.kind={kind}")


def of_kind(config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> Tracker:
    """The tracker of `tracking.kind`, tensorboard or wandb."""
    is_wandb = config.tracking.kind == "wandb"
    found = WandbTracker(config, folder, warn) if is_wandb else TensorBoardTracker(config, folder.path)
    return cast(Tracker, _Guarded(found, warn))


def require_trackers(given: Sequence[Any]) -> None:
    """Raise ConfigError for one that is no function and lacks the four methods of a tracker."""
    for number, one in enumerate(given):
        missing = [name for name in _METHODS if not callable(getattr(one, name, None))]
        if isinstance(one, type) or (missing and not callable(one)):
            raise ConfigError(f"trackers[{number}] is {one!r}; pass a function of (figures, step), or an object with the "
                              f"methods of ngsgd.training.records.Tracker: {', '.join(_METHODS)}.")


def of_user(given: Sequence[Any], config: RunConfig, folder: Path, warn: Callable[[str], None]) -> list[Tracker]:
    """Trackers and functions that the user passed, which cannot end the training."""
    found = [one if all(hasattr(one, name) for name in _METHODS) else CallbackTracker(config, folder, one) for one in given]
    return [cast(Tracker, _Guarded(one, warn)) for one in found]
