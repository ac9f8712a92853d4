"""Copies of minibatches to a GPU with pinned memory and a separate stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import Batch, data_to_device, map_tensors

Left = TypeVar("Left")


def on_device(batches: Iterable[tuple[Batch | None, Left]], device: torch.device) -> Iterator[tuple[Batch | None, Left]]:
    """Yield the same minibatches with their tensors on `device`; the second value is unchanged.

    On a GPU the host queues each copy and continues. Steps are queued as well, so the copy of a
    minibatch runs while the GPU computes the previous step. The step waits for its copy on the GPU.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for batch, left in batches:
        # a task reads its data into the memory of the CPU
        if batch is None or device.type == "cpu":
            yield batch, left
        elif stream is None:
            yield batch._replace(data=data_to_device(batch.data, device)), left
        else:
            yield batch._replace(data=_copied(batch.data, device, stream)), left


def _copied(data: Any, device: torch.device, stream: torch.cuda.Stream) -> Any:
    """Copy the data; operations queued later on the current stream read the complete copy."""
    def pinned(tensor: Tensor) -> Tensor:
        # a copy from other memory blocks the host; torch keeps pinned memory until it was read
        is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
        return tensor.pin_memory() if is_plain and not tensor.is_pinned() else tensor

    with torch.cuda.stream(stream):
        copies = data_to_device(map_tensors(data, pinned), device)
        done = torch.cuda.Event()
        done.record(stream)
    compute = torch.cuda.current_stream(device)
    compute.wait_event(done)
    # it is the copy stream's memory: a later copy could reuse it while the step reads it
    map_tensors(copies, lambda tensor: tensor.record_stream(compute))
    return copies


Precision = Literal["float32", "tf32", "bf16"]
# compute capability of the first GPUs with TF32 (Ampere)
_FIRST_WITH_TF32 = (8, 0)


def set_precision(precision: Precision, device: torch.device) -> None:
    """Set torch's float32 precision for GEMMs and convolutions of this process on a GPU.

    "bf16" is applied by `autocast`. Raises ConfigError if it has no effect on the device. The
    default of torch is TF32 for convolutions, and float32 for GEMMs.
    """
    if device.type != "cuda":
        if precision == "tf32":
            raise ConfigError("cluster.precision is tf32, but this worker computes on the CPU, "
                              "which has no TF32; set cluster.precision=float32 or bf16.")
        return
    if precision == "tf32" and torch.cuda.get_device_capability(device) < _FIRST_WITH_TF32:
        raise ConfigError(f"cluster.precision is tf32, but {torch.cuda.get_device_name(device)} "
                          "has no TF32; set cluster.precision=float32.")
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"cluster.precision is bf16, but {torch.cuda.get_device_name(device)} "
                          "has no bfloat16; set cluster.precision=float32.")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context of a forward pass and its loss: bfloat16 autocast with "bf16", else no change.

    Example:
        >>> import torch
        >>> with autocast("bf16", torch.device("cpu")):
        ...     y = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> y.dtype
        torch.bfloat16
    """
    if precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


class Ranks:
    """A group of one process; larger groups override every method (`ngsgd.cluster.groups`)."""

    rank = 0
    size = 1
    # backend of the sums, if results depend on it
    summed_by = ""

    def start_vector(self, read: Callable[[], Vector], size: int) -> Vector:
        """Return the parameters before the first minibatch; only rank 0 calls `read`."""
        return read()

    def sum_gradients(self, model: nn.Module, num_examples: int) -> int:
        """Sum every gradient over the ranks in place; return the sum of their examples."""
        return num_examples

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor of the device over the ranks."""
        return tensor

    def sum_(self, values: Sequence[Tensor]) -> None:
        """Replace 0-d tensors by their sums over the ranks."""

    def any(self, flag: bool) -> bool:
        """Return True if the flag is True on any rank."""
        return flag


ALONE = Ranks()
