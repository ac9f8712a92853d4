"""Minibatches with a non-finite loss or gradient: detection, and the names of their examples.

Detection adds no synchronization: the flags stay on the device until the end of a job. Names are
computed only if there is such a minibatch, from the deterministic order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.ops.averaging import is_statistic
from ngsgd.training.job import BadBatch, WorkItem
from ngsgd.training.task import Batch, Task, map_tensors

# minibatches of a job that are named; each is read again
_MOST_NAMED = 16
# names in a message
_MOST_SHOWN = 5
INPUT, LOSS, GRADIENT = "an input is not finite", "the loss is not finite", "the gradient is not finite"


@dataclass
class _Buffer:
    now: Tensor
    kept: Tensor
    # before the minibatch; None: torch counts none where it changes running statistics
    version: int | None


class Statistics:
    """Buffers that a model changes while it trains, such as those of batch normalization.

    A bad minibatch would leave NaN there, which all later ones keep. Nothing waits for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [_Buffer(buffer, buffer.clone(), None if is_statistic(name) else buffer._version)
                         for name, buffer in model.named_buffers() if buffer.is_floating_point()]

    @torch.no_grad()
    def settle(self, loss: Tensor, update: Tensor | None) -> None:
        """Restore the buffers if the loss is not finite, or the update is NaN: it was skipped."""
        changed = [one for one in self._buffers if one.version is None or one.version != one.now._version]
        if changed:
            is_good = loss.isfinite() if update is None else loss.isfinite() & ~update.isnan()
            for one in changed:
                torch.where(is_good, one.now, one.kept, out=one.kept)
                one.now.copy_(one.kept)
                one.version = None if one.version is None else one.now._version


def named(task: Task, model: nn.Module, bad: dict[int, str], places: Sequence[tuple[WorkItem, int]],
          size: int, seed: int, to_device: Callable[[Any], Any]) -> tuple[BadBatch, ...]:
    """Name the examples of bad minibatches, which the task reads again.

    If all inputs are finite, the model scores each example alone. `places` has the work item and
    the number of each minibatch of the job, and `size` is the minibatch size.
    """
    found = []
    for index, reason in sorted(bad.items())[:_MOST_NAMED]:
        piece, number = places[index]
        order = (seed, piece.outer_iter, piece.job)
        ids = task.example_ids(piece.shard, size, seed=order, number=number)
        if not ids:
            found.append(BadBatch(piece.shard, number, reason))
            continue
        batch = next(iter(task.batches(piece.shard, size, seed=order, first=number, stop=number + 1)))
        chosen, better = _narrowed(task, model, batch, ids, reason, to_device)
        found.append(BadBatch(piece.shard, number, better, tuple(dict.fromkeys(chosen)), len(chosen) / len(ids)))
    return tuple(found)


def _narrowed(task: Task, model: nn.Module, batch: Batch, ids: Sequence[str], reason: str,
              to_device: Callable[[Any], Any]) -> tuple[Sequence[str], str]:
    """The examples at fault, one entry per row, and the reason; all if they are not known."""
    if rows := [row for row in range(len(ids)) if not _row(batch.data, row, len(ids))[1]]:
        return [ids[row] for row in rows], INPUT
    if reason != LOSS:
        return ids, reason
    was_training = model.training
    # batch statistics of a single example are not defined
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        rows = [row for row in range(len(ids))
                if not _is_finite(task.loss(model, to_device(_row(batch.data, row, len(ids))[0])).total)]
    model.train(was_training)
    return ([ids[row] for row in rows] if 0 < len(rows) < len(ids) else ids), reason


def _row(data: Any, row: int, count: int) -> tuple[Any, bool]:
    """One example of a minibatch, and whether it is finite; tensors have `count` rows."""
    are_finite = []

    def chosen(tensor: Tensor) -> Tensor:
        part = tensor[row:row + 1] if tensor.ndim and len(tensor) == count else tensor
        are_finite.append(_is_finite(part))
        return part
    return map_tensors(data, chosen), all(are_finite)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


def message(bad: BadBatch, job: int, outer_iter: int, worker: int, policy: str) -> str:
    """One line about a bad minibatch, for every log."""
    more = f" and {len(bad.examples) - _MOST_SHOWN} more" if len(bad.examples) > _MOST_SHOWN else ""
    names = f"; examples: {', '.join(bad.examples[:_MOST_SHOWN])}{more}" if bad.examples else ""
    action = "are omitted from later outer iterations" if policy == "quarantine" and bad.examples else "was skipped"
    what = "its examples" if policy == "quarantine" and bad.examples else "it"
    return (f"minibatch {bad.number} of archive {bad.shard.archive} in job {job} of outer iteration {outer_iter + 1}, on worker "
            f"{worker}: {bad.reason}{names}; {what} {action}.")


def examples_of(batches: Sequence[BadBatch]) -> dict[str, str]:
    """Example -> reason; a minibatch without names is named by its place."""
    return {name: bad.reason for bad in batches
            for name in (bad.examples or (f"archive {bad.shard.archive}, minibatch {bad.number}",))}
