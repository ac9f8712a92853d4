"""Implementations of `ngsgd.training.task.Task`: what the engine can train."""

from ngsgd.tasks.datasets import DatasetTask
from ngsgd.tasks.streams import StreamTask

__all__ = ["DatasetTask", "StreamTask"]
