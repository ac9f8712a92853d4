"""Tasks that fail, as users' tasks do."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor, nn

from ngsgd.tasks import DatasetTask
from tests.tasks import blobs, spoilt

# minibatches of a job before its process receives a signal
_QUIET = 40
_calls = {"loss": 0}


def make_task(fault: str) -> DatasetTask:
    """The task of `blobs` with a fault: a name of this module's loss functions, or "not_finite"."""
    _calls["loss"] = 0
    if fault == "not_finite":
        return spoilt.make_task("input")
    return DatasetTask(blobs.dataset(), blobs.make_model, LOSSES[fault], shard_size=240, num_eval_examples=50)


def plain(model: nn.Module, batch: Any) -> Tensor:
    return blobs.mean_loss(model, batch)


def wrong_type(model: nn.Module, batch: Any) -> Tensor:
    """A mistake in the program of the user, which shows during training."""
    if model.training and _has_begun():
        raise TypeError("unsupported operand type(s) for +: 'Tensor' and 'dict'")
    return blobs.mean_loss(model, batch)


def no_memory(model: nn.Module, batch: Any) -> Tensor:
    if model.training and _has_begun():
        raise MemoryError("Unable to allocate 93.1 GiB for an array")
    return blobs.mean_loss(model, batch)


def interrupted(model: nn.Module, batch: Any) -> Tensor:
    return _with_signal(signal.SIGINT, model, batch)


def terminated(model: nn.Module, batch: Any) -> Tensor:
    return _with_signal(signal.SIGTERM, model, batch)


def _with_signal(number: signal.Signals, model: nn.Module, batch: Any) -> Tensor:
    _calls["loss"] += 1
    if _calls["loss"] == _QUIET:
        os.kill(os.getpid(), number)
    return blobs.mean_loss(model, batch)


def _has_begun() -> bool:
    _calls["loss"] += 1
    return _calls["loss"] > _QUIET


# fault -> loss function
LOSSES = {"plain": plain, "wrong_type": wrong_type, "no_memory": no_memory, "interrupted": interrupted, "terminated": terminated}
