"""Measured peaks of the device, and the time that the operations of a step would take at these
peaks.

An operation takes at least max(FLOPs / peak FLOP/s, bytes / peak bytes/s); the roofline time of a
step is the sum over its operations.  The bytes of an operation are those of its inputs and outputs,
so a kernel that fuses two operations of torch can be faster than this roofline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.measurement import Measurement

_ROUNDS = 5


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of a float32 GEMM without TF32, with TF32, of a bfloat16 GEMM; bytes/s read and
    written by a copy."""

    float32: float
    tf32: float
    bfloat16: float
    copy: float


def measure_peaks(measurement: Measurement) -> Peaks:
    """Peaks of large GEMMs and of a copy: medians of rounds after a warm-up."""
    size, copied, repeat = (256, 2**20, 1) if measurement.dry_run else (8192, 2**28, 5)
    speeds = {}
    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
        ("bfloat16", torch.bfloat16, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=measurement.device, dtype=dtype) for _ in range(2))
        speeds[name] = 2.0 * size**3 / _least_s(measurement, lambda a=a, b=b: a @ b, repeat)
    torch.set_float32_matmul_precision("highest")
    source = torch.ones(copied, device=measurement.device)
    target = torch.empty_like(source)
    return Peaks(
        **speeds,
        copy=2.0 * source.nbytes / _least_s(measurement, lambda: target.copy_(source), repeat),
    )


def _least_s(measurement: Measurement, run: Any, repeat: int) -> float:
    run()
    return min(measurement.seconds(run, repeat) for _ in range(_ROUNDS))


@dataclass
class Counts:
    """Totals over the operations of a step."""

    num_operations: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0
    # at the peaks
    roofline_s: float = 0.0


class OperationCounter(TorchDispatchMode):
    """Counts operations that compute, their FLOPs and bytes; views and allocations are free.

    >>> import torch
    >>> with OperationCounter(Peaks(1e9, 1e9, 1e9, 1e9)) as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.counts.flops
    48.0
    """

    def __init__(self, peaks: Peaks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peaks, self.counts = peaks, Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func.is_view
            or func.namespace == "prim"
            or "empty" in func.name()
            or "detach" in func.name()
        ):
            return out
        tensors = _tensors((args, kwargs)), _tensors(out)
        num_bytes = float(sum(_unique_bytes(side) for side in tensors))
        flops = _flops(func, args, kwargs or {}, out)
        is_half = any(x.dtype in (torch.bfloat16, torch.float16) for x in tensors[0])
        peak = self.peaks.bfloat16 if is_half else self.peaks.float32
        self.counts.num_operations += 1
        self.counts.flops += flops
        self.counts.num_bytes += num_bytes
        self.counts.roofline_s += max(flops / peak, num_bytes / self.peaks.copy)
        return out


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    of_flops: Any = flop_registry.get(func._overloadpacket)
    if of_flops is None:
        return 0.0
    try:
        return float(of_flops(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, IndexError):
        # the formula expects another version of the operation; only its bytes count
        return 0.0


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    # a GEMM of a tensor with itself reads it once
    return sum({id(x): x.numel() * x.element_size() for x in tensors}.values())
