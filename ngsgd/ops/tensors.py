"""Checks and layouts of the tensors that users give, which read no values and wait for no device;
and contexts of autocast and of passes that are differentiated twice.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ngsgd.errors import ArgumentError, ConfigError

HALF = (torch.bfloat16, torch.float16)
FULL = (torch.float32, torch.float64)
REENTRANT = ("needs gradients of gradients, which reentrant activation checkpointing does not "
             "support; use checkpoint(.., use_reentrant=False).")
_DIMENSIONS = {0: "a number", 1: "a vector", 2: "a matrix, one row per sample"}


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense one; gradients of nn.Embedding(sparse=True) are sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Keep squares, factors and GEMMs in float32 if backward is called inside autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def refuse_sharded(model: nn.Module, owner: str, advice: str = "use DistributedDataParallel") -> None:
    """Raise ConfigError for parameters or buffers that are sharded over ranks: FSDP, DTensor."""
    sharded = sys.modules.get("torch.distributed.tensor")
    for name, module in model.named_modules():
        kind = "FSDP" if type(module).__name__ == "FullyShardedDataParallel" else ""
        if sharded is not None and any(isinstance(one, sharded.DTensor) for one in (*module._parameters.values(),
                                                                                     *module._buffers.values())):
            kind = "FSDP2 and other DTensor parameters"
        if kind:
            raise ConfigError(f"{owner} does not support {kind} ({name or 'the model'}): it needs the complete parameters of a "
                              f"layer; {advice}.")


def require_real(value: Any, name: str, owner: str, ndim: int | None = None, dtypes: tuple[torch.dtype, ...] = FULL + HALF) -> None:
    """Raise ArgumentError unless an argument is a dense tensor of real floating-point numbers.

    `ndim` None stands for any; messages contain `name` of the argument and `owner`, its function.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{owner}: {name} is of type {type(value).__name__}; give a tensor, as by torch.as_tensor().")
    if value.dtype not in dtypes:
        raise ArgumentError(f"{owner}: {name} is {value.dtype}; give {' or '.join(str(dtype) for dtype in dtypes)}.")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise ArgumentError(f"{owner}: {name} is sparse, nested or without values ({value.layout}, {value.device}); give a dense "
                            "tensor, as by to_dense().")
    if ndim is not None and value.ndim != ndim:
        raise ArgumentError(f"{owner}: {name} is of shape {tuple(value.shape)}; give {_DIMENSIONS[ndim]}.")


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers of the host to `device`, through pinned memory: the host does not wait."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


class DeviceNumbers:
    """Constant vectors on devices; they are copied there only when they change."""

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor, *values: float, dtype: torch.dtype | None = None) -> Tensor:
        key = (values, dtype or like.dtype, like.device)
        if (found := self._known.get(key)) is None:
            # Remove learning rates of past scheduler steps.
            if len(self._known) > 1000:
                self._known.clear()
            found = self._known[key] = to_device(torch.tensor(values, dtype=dtype or like.dtype), like.device)
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Copies of an optimizer make their own.
        return {"_known": {}}


def twice_differentiable() -> contextlib.AbstractContextManager[None]:
    """Context in which attention runs its MATH kernel, the only one with a second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def naming_missing(who: str) -> Iterator[None]:
    """Context that raises ConfigError and names an operation without a second derivative."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise ConfigError(f"{who} {REENTRANT}") from error
        if (missing := re.search(r"derivative for (\S+) is not implemented", str(error))) is None:
            raise
        raise ConfigError(f"{who} needs second derivatives, and torch has none for {missing[1]}; "
                          "replace that operation, let torch choose the kernel of an attention "
                          "(MATH has them), or choose a first-order method, such as KFAC.") from error
