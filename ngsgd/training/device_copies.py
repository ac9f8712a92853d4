"""Minibatches on their way to a GPU: pinned memory, and a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ngsgd.training.task import Batch, map_tensors, to_device

Left = TypeVar("Left")


def on_device(batches: Iterable[tuple[Batch | None, Left]], device: torch.device
              ) -> Iterator[tuple[Batch | None, Left]]:
    """The same minibatches with their tensors on `device`; what comes with each is unchanged.

    On a GPU the host queues each copy and continues. Steps are queued as well, so the copy of a
    minibatch runs while the GPU computes the step before it. The step waits for its copy on the GPU.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for batch, left in batches:
        if batch is None:
            yield batch, left
        elif stream is None:
            yield batch._replace(data=to_device(batch.data, device)), left
        else:
            yield batch._replace(data=_copied(batch.data, device, stream)), left


def _copied(data: Any, device: torch.device, stream: torch.cuda.Stream) -> Any:
    """The data on the device; whatever is queued on the current stream from now on sees them complete."""
    with torch.cuda.stream(stream):
        copies = to_device(map_tensors(data, _pinned), device)
        done = torch.cuda.Event()
        done.record(stream)
    compute = torch.cuda.current_stream(device)
    compute.wait_event(done)
    # the memory belongs to the copy stream: without this a later copy could be given it while the
    # step still reads it
    map_tensors(copies, lambda tensor: tensor.record_stream(compute))
    return copies


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory: from other memory a copy makes the host wait."""
    # torch keeps pinned memory until the copies that read it are done, so nobody has to hold it
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain and not tensor.is_pinned() else tensor
