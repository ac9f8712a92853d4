"""Copies of minibatches to a GPU with pinned memory and a separate stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngsgd.training.task import Batch, data_to_device, map_tensors

Left = TypeVar("Left")


def on_device(batches: Iterable[tuple[Batch | None, Left]], device: torch.device
              ) -> Iterator[tuple[Batch | None, Left]]:
    """Yield the same minibatches with their tensors on `device`; the second value is unchanged.

    On a GPU the host queues each copy and continues. Steps are queued as well, so the copy of a
    minibatch runs while the GPU computes the previous step. The step waits for its copy on the GPU.
    """
    # a task reads its data into the memory of the CPU
    if device.type == "cpu":
        return iter(batches)
    return _copies(batches, device)


def _copies(batches: Iterable[tuple[Batch | None, Left]], device: torch.device) -> Iterator[tuple[Batch | None, Left]]:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for batch, left in batches:
        if batch is None:
            yield batch, left
        elif stream is None:
            yield batch._replace(data=data_to_device(batch.data, device)), left
        else:
            yield batch._replace(data=_copied(batch.data, device, stream)), left


def _copied(data: Any, device: torch.device, stream: torch.cuda.Stream) -> Any:
    """Copy the data; operations queued later on the current stream read the complete copy."""
    with torch.cuda.stream(stream):
        copies = data_to_device(map_tensors(data, _pinned), device)
        done = torch.cuda.Event()
        done.record(stream)
    compute = torch.cuda.current_stream(device)
    compute.wait_event(done)
    # the memory belongs to the copy stream: otherwise a later copy could reuse it while the step
    # still reads it
    map_tensors(copies, lambda tensor: tensor.record_stream(compute))
    return copies


def _pinned(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned memory; a copy from other memory blocks the host."""
    # torch keeps pinned memory until the copies that read it are done
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain and not tensor.is_pinned() else tensor
