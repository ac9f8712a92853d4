"""Minibatches with a non-finite loss or gradient: detection, and the names of their examples.

Detection adds no synchronization: the flags stay on the device until the end of a job. Names are
computed only if there is such a minibatch, from the deterministic order of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.training.job import BadBatch, WorkItem
from ngsgd.training.task import Batch, Task

# a job with a larger fraction of bad minibatches diverges, unless few rows of each are at fault:
# its objective stays non-finite, and the coordinator rejects it
_MOST_BAD, _FEW_ROWS = 0.1, 0.5
# minibatches of a job that are named; each is read again
_MOST_NAMED = 16
# names in a message
_MOST_SHOWN = 5
INPUT, LOSS, GRADIENT = "an input is not finite", "the loss is not finite", "the gradient is not finite"


class BatchLog:
    """Losses and skipped steps of the minibatches of a job: numbers, or 0-d tensors of a GPU."""

    def __init__(self, on_cpu: bool) -> None:
        # tensors kept between the gradients of two minibatches would fragment the memory of a CPU
        self._keep: Callable[[Tensor], Tensor | float] = Tensor.item if on_cpu else Tensor.detach
        # summed loss; sums for the objective; norm of the update, NaN if it was skipped
        self.losses: list[Tensor | float] = []
        self.corrects: list[Tensor | float] = []
        self.weights: list[Tensor | float] = []
        self.updates: list[Tensor | float | None] = []

    def add(self, loss: Tensor, num_correct: Tensor | float, weight: Tensor | float, update: Tensor | None) -> None:
        keep = self._keep
        self.losses.append(keep(loss))
        self.corrects.append(keep(num_correct) if isinstance(num_correct, Tensor) else num_correct)
        self.weights.append(keep(weight) if isinstance(weight, Tensor) else weight)
        self.updates.append(update if update is None else keep(update))

    def settle(self) -> None:
        """Replace all tensors by numbers; waits for the device."""
        self.load_state(self.state())

    def sums(self) -> tuple[float, float, float]:
        """(objf, correct, weight), each added in the order of the minibatches."""
        return -_in_order(self.losses), _in_order(self.corrects), _in_order(self.weights)

    def state(self) -> dict[str, list[float | None]]:
        """All values as numbers, for `load_state`."""
        return {name: _numbers(getattr(self, name)) for name in ("losses", "corrects", "weights", "updates")}

    def load_state(self, state: dict[str, list[Any]]) -> None:
        """Continue from `state` of another process."""
        self.losses, self.corrects, self.weights, self.updates = (
            list(state[name]) for name in ("losses", "corrects", "weights", "updates"))

    def bad(self) -> dict[int, str]:
        """Index of a bad minibatch -> LOSS or GRADIENT."""
        found = {}
        for index, (loss, update) in enumerate(zip(self.losses, self.updates, strict=True)):
            if not math.isfinite(loss):
                found[index] = LOSS
            elif update is not None and math.isnan(update):
                found[index] = GRADIENT
        return found

    def means_without(self, bad: dict[int, str], found: Sequence[BadBatch]) -> tuple[float, float] | None:
        """(objf, accuracy) per unit of weight of the finite minibatches; None if the job diverges.

        Args:
            bad: minibatches of `bad()`.
            found: the same with names.
        """
        infinite = {index for index, reason in bad.items() if reason == LOSS}
        is_data = len(infinite) <= max(1.0, _MOST_BAD * len(self.losses)) or all(one.share <= _FEW_ROWS for one in found)
        if not infinite or not is_data or len(infinite) == len(self.losses):
            return None
        kept = [index for index in range(len(self.losses)) if index not in infinite]
        objf = -math.fsum(float(self.losses[index]) for index in kept)
        correct, weight = (math.fsum(float(values[index]) for index in kept) for values in (self.corrects, self.weights))
        return objf / weight, correct / weight


def named(task: Task, model: nn.Module, bad: dict[int, str], places: Sequence[tuple[WorkItem, int]],
          size_of: Callable[[WorkItem], int], seed: int, to_device: Callable[[Any], Any]) -> tuple[BadBatch, ...]:
    """Name the examples of bad minibatches.

    Args:
        task: reads the minibatches again.
        model: the model after the job, which scores examples alone if all inputs are finite.
        bad: index of a minibatch of the job -> reason.
        places: work item and number of each minibatch of the job.
        size_of: examples per minibatch of a work item.
        seed: seed of the run.
        to_device: moves the data of a minibatch to the device of the model.
    """
    found = []
    for index, reason in sorted(bad.items())[:_MOST_NAMED]:
        piece, number = places[index]
        size = size_of(piece)
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
    rows = [row for row in range(len(ids)) if not all(map(_is_finite, _tensors(_row(batch.data, row, len(ids)))))]
    if rows:
        return [ids[row] for row in rows], INPUT
    if reason != LOSS:
        return ids, reason
    was_training = model.training
    # batch statistics of a single example are not defined
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        rows = [row for row in range(len(ids))
                if not _is_finite(task.loss(model, to_device(_row(batch.data, row, len(ids)))).total)]
    model.train(was_training)
    return ([ids[row] for row in rows] if 0 < len(rows) < len(ids) else ids), reason


def _numbers(values: Sequence[Tensor | float | None]) -> list[float | None]:
    """Numbers of values of which some are 0-d tensors; waits for the device once."""
    tensors = [value.to(torch.float64) for value in values if isinstance(value, Tensor)]
    known = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(known) if isinstance(value, Tensor) else value for value in values]


def _in_order(values: Sequence[Tensor | float]) -> float:
    """Sum of float64 numbers; `sum` of newer versions of Python compensates, with other bits."""
    total = 0.0
    for value in values:
        total += float(value)
    return total


def _row(data: Any, row: int, count: int) -> Any:
    """One example of a minibatch: of each tensor with `count` rows the given one."""
    if isinstance(data, Tensor):
        return data[row:row + 1] if data.ndim and len(data) == count else data
    if isinstance(data, dict):
        return {key: _row(value, row, count) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_row(value, row, count) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_row(value, row, count) for value in data)
    return data


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _tensors(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _tensors(value)


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
