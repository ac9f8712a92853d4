"""Everything inside a job that its remaining minibatches depend on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.optim import Optimizer
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.training.diagnostics.job_sums import JobSums
from ngsgd.training.task import Task

T = TypeVar("T")


@dataclass(frozen=True)
class JobState:
    """The objects that a job changes; parameters of layers that are not trained yet included."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    preconditioner: Preconditioner | None
    sums: JobSums
    device: torch.device

    def values(self) -> dict[str, Any]:
        """Return the current state; its tensors are not copied."""
        return {"parameters": [p.detach() for p in self.model.parameters()],
                "buffers": dict(self.model.named_buffers()),
                "optimizer": self.optimizer.training_state(),
                "preconditioner": self.preconditioner.state_dict() if self.preconditioner else None,
                "sums": self.sums.state(), "task": self.task.job_state(), "random": random_states(self.device)}

    def load(self, values: dict[str, Any]) -> None:
        """Continue from `values`, which another process may have returned."""
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values["parameters"], strict=True):
                p.copy_(value)
            for path, module in self.model.named_modules():
                for name, buffer in module._buffers.items():
                    if (value := values["buffers"].get(f"{path}.{name}" if path else name)) is None:
                        continue
                    if buffer is not None and buffer.shape == value.shape:
                        buffer.copy_(value)
                    else:
                        # such as a cache that grows with the longest input
                        module._buffers[name] = value.to(self.device)
        self.optimizer.load_training_state(values["optimizer"])
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(values["preconditioner"])
        self.sums.load_state(values["sums"])
        self.task.load_job_state(values["task"])
        # last, because the steps above may use random numbers
        set_random_states(values["random"], self.device)


def is_random_reader(batches: Iterator[T], device: torch.device) -> tuple[bool, Iterator[T]]:
    """Read one minibatch; return whether that used the global generators, and all minibatches.

    A task that reads the completed minibatches again before the next one can continue only if
    reading uses no global random numbers: the restored states are those after the completed ones.
    """
    before = _comparable(random_states(device))
    first = list(itertools.islice(batches, 1))
    return _comparable(random_states(device)) != before, itertools.chain(first, batches)


def _comparable(states: Any) -> Any:
    """Replace each array and tensor of nested values by its bytes."""
    if isinstance(states, dict):
        return {key: _comparable(value) for key, value in states.items()}
    if isinstance(states, tuple):
        return tuple(_comparable(value) for value in states)
    return np.asarray(states).tobytes() if isinstance(states, (np.ndarray, Tensor)) else states


def random_states(device: torch.device) -> dict[str, Any]:
    """States of the global generators of torch, NumPy and Python."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
