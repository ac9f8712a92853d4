"""Implementations of `ngsgd.training.task.Task`: what the engine can train."""

from ngsgd.tasks.datasets import DatasetTask

__all__ = ["DatasetTask"]
