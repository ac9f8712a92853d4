"""Selection of Triton kernels on a GPU, with torch operations where there are none.

Triton belongs to torch's builds for GPUs. Without it, and if NGSGD_KERNELS is torch, operators run
as torch operations.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from ngsgd.ops.kernels import native
from ngsgd.ops.tensors import to_device

# types of devices whose operators are Triton kernels
DEVICES = {"cuda"}
# Kinds of minibatches, such as utterances of many lengths, whose tables are kept.
_MOST_TABLES = 1000
Table = TypeVar("Table")


class Tables(Generic[Table]):
    """Tables and memory of kernels by kind of step; those that a CUDA graph reads stay."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Table] = {}
        self._recorded: list[Table] = []

    def get(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """Return what `make` returned for this key."""
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_TABLES:
                self._known.clear()
            found = self._known[key] = make()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._recorded.append(found)
        return found

    def __reduce__(self) -> tuple[type[Tables[Table]], tuple[()]]:
        # Copies of an optimizer make their own.
        return Tables, ()


def upload(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return an integer table on the device; the host does not wait."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


def are_available(device: torch.device) -> bool:
    """Return whether operators of this device are Triton kernels."""
    return device.type in DEVICES and (device.type != "cuda" or (version() != "" and native.is_allowed()))


_library = torch.library.Library("ngsgd", "FRAGMENT")


def register(module: str, schemas: Mapping[Callable[..., None], str], dtype: torch.dtype = torch.float32) -> None:
    """Make `torch.ops.ngsgd.<name>` of functions of torch operations, by their arguments.

    On a GPU an operator is the kernel of the same name in `ngsgd.ops.device.<module>_triton`. It is
    the function itself without Triton, and for tensors of another dtype.
    """
    for function, arguments in schemas.items():
        _library.define(f"{function.__name__}({arguments}) -> ()")
        _library.impl(function.__name__, function, "CompositeExplicitAutograd")
        _library.impl(function.__name__, _chosen(module, function, dtype), "CUDA")


def _chosen(module: str, fallback: Callable[..., None], dtype: torch.dtype) -> Callable[..., None]:
    @functools.wraps(fallback)
    def call(*args: Any) -> None:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if tensors[0].dtype == dtype and are_available(tensors[0].device):
            kernels = importlib.import_module(f"ngsgd.ops.device.{module}_triton")
            with torch.cuda.device(tensors[0].device):
                getattr(kernels, fallback.__name__)(*args)
        else:
            fallback(*args)
    return call


@functools.cache
def version() -> str:
    """Return the version of Triton; empty without it."""
    return "" if importlib.util.find_spec("triton") is None else importlib.metadata.version("triton")
