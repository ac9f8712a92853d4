"""Implementations of `ngsgd.training.task.Task`: what the engine can train."""
