"""A classification task, as a module for `task=` and functions for `ngsgd.train`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ngsgd.tasks import DatasetTask

NUM_EXAMPLES, DIM, NUM_CLASSES = 1000, 6, 4


def dataset() -> TensorDataset:
    """Points around one mean per class."""
    random = torch.Generator().manual_seed(7)
    means_CD = 2.0 * torch.randn(NUM_CLASSES, DIM, generator=random)
    y_N = torch.randint(NUM_CLASSES, (NUM_EXAMPLES,), generator=random)
    return TensorDataset(means_CD[y_N] + torch.randn(NUM_EXAMPLES, DIM, generator=random), y_N)


class Rows(Dataset[dict[str, Tensor]]):
    """The same examples one at a time, as dictionaries; it records which were read."""

    def __init__(self) -> None:
        self.tensors = dataset().tensors
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": self.tensors[0][index], "y": self.tensors[1][index]}


def make_model(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, NUM_CLASSES))


def _xy(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x_ND, y_N = _xy(batch)
    return nn.functional.cross_entropy(model(x_ND), y_N)


def summed_loss(model: nn.Module, batch: Any) -> Tensor:
    x_ND, y_N = _xy(batch)
    return nn.functional.cross_entropy(model(x_ND), y_N, reduction="sum")


def accuracy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x_ND, y_N = _xy(batch)
    return {"accuracy": (model(x_ND).argmax(dim=1) == y_N).float().mean()}


def make_task(shard_size: int = 60) -> DatasetTask:
    return DatasetTask(dataset(), make_model, mean_loss, metrics_fn=accuracy, shard_size=shard_size)


def slow_loss(model: nn.Module, batch: Any) -> Tensor:
    """Jobs last long enough for a worker to be killed in one."""
    time.sleep(0.02)
    return mean_loss(model, batch)


def make_slow_task() -> DatasetTask:
    return DatasetTask(dataset(), make_model, slow_loss, shard_size=120)


def no_task() -> str:
    return "not a task"
