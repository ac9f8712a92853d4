"""Descriptions from which worker processes build a custom task."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ngsgd import imports
from ngsgd.config import TaskConfig
from ngsgd.errors import ConfigError
from ngsgd.training.settings import EngineSettings
from ngsgd.training.task import Task


@dataclass(frozen=True)
class ImportedTask:
    """A task named by `task._target_`; every process imports the module and calls the function."""

    settings: EngineSettings
    config: TaskConfig

    def task(self, device: torch.device) -> Task:
        """Call the function with `task.args`."""
        name = self.config._target_
        factory = imports.find(name, self.config.search_path, "task", "an ngsgd.training.task.Task")
        return _called(factory, name, dict(self.config.args or {}))


@dataclass(frozen=True)
class GivenTask:
    """A task, or a function that returns one, from a Python program."""

    settings: EngineSettings
    given: Task | Callable[[], Task]

    def task(self, device: torch.device) -> Task:
        """Return the task, or call the function."""
        if isinstance(self.given, Task):
            return self.given
        return _called(self.given, name_of(self.given), {})

    def require_picklable(self) -> None:
        """Raise ConfigError if the task cannot be sent to a worker process."""
        try:
            pickle.dumps(self.given)
        except Exception as error:
            raise ConfigError(
                f"the task cannot be sent to worker processes ({imports.first_line(error)}). "
                "Define its functions with def at the top of a module or script, or pass "
                "ngsgd.train a function that returns the task, or train in this process with "
                "cluster='in_process'.") from error


def name_of(given: Task | Callable[[], Task]) -> str:
    """Name of a task or of the function that returns it."""
    return getattr(given, "__name__", type(given).__name__)


def _called(factory: Callable[..., Any], name: str, args: dict[str, Any]) -> Task:
    try:
        task = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} failed when called with {args} ({imports.first_line(error)}); "
                          "correct the function or task.args.") from error
    if not isinstance(task, Task):
        raise ConfigError(f"{name} returned a {type(task).__name__}; return a task, such as "
                          "ngsgd.tasks.DatasetTask.")
    return task
