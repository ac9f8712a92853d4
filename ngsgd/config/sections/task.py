"""Options of a task of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngsgd.config.option import option


@dataclass(frozen=True)
class TaskConfig:
    """What is trained in the place of a speech model: a model, data and a loss of the user's own."""

    _target_: str = option(
        "", "module:function that returns a task (ngsgd.tasks.DatasetTask or any subclass of Task); "
            "empty: speech recognition")
    args: Mapping[str, Any] | None = option(
        None, "keyword arguments of the function, such as {width: 64}", used="_target_")
    search_path: str = option(
        "", "folder to import the module from; empty: the current folder", used="_target_")

    @property
    def label(self) -> str:
        """The name of the task in run names."""
        return self._target_.replace(":", ".").rpartition(".")[2]
