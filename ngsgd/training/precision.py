"""Number format of the GEMMs of a worker, `cluster.precision`.

Parameters, gradients, Fisher estimates and averages are float32 at every precision.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

from ngsgd.errors import ConfigError

Precision = Literal["float32", "tf32", "bf16"]
# compute capability of the first GPUs with TF32 (Ampere)
_FIRST_WITH_TF32 = (8, 0)


def set_precision(precision: Precision, device: torch.device) -> None:
    """Set torch's float32 precision for GEMMs and convolutions of this process on a GPU.

    The default of torch is TF32 for convolutions, and float32 for GEMMs.

    Args:
        precision: the number format; "bf16" is applied by `autocast`.
        device: the device of the worker.

    Raises:
        ConfigError: the precision has no effect on the device.
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
