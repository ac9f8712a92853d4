"""Implementations of `ngsgd.training.task.Task`."""

from ngsgd.tasks.datasets import DatasetTask
from ngsgd.tasks.streams import StreamTask

__all__ = ["DatasetTask", "StreamTask"]
