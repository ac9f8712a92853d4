"""Check of `ngsgd doctor --device`: memory of a training step, and largest minibatch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.launcher.doctor.machine import Finding
from ngsgd.planning.batch_size import FittingBatch, fitting_batch
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import choose_device


def batch_size(config: RunConfig, spec: Callable[[], TaskSpec]) -> Iterator[Finding]:
    """Yield one finding; `spec` prepares the task."""
    try:
        device = choose_device(config.cluster.device)
        found = fitting_batch(config, spec().task(device), device, _free_bytes(device))
    except ConfigError as error:
        yield Finding("warn", "batch size", str(error))
        return
    asked = config.schedule.minibatch_size
    fits = found.size >= asked
    yield Finding(
        "ok" if fits else "fail",
        "batch size",
        _summary(found, device),
        ""
        if fits
        else f"schedule.minibatch_size={max(found.size, 1)} instead of {asked}, or a smaller model",
    )


def _free_bytes(device: torch.device) -> int:
    """Free bytes of the GPU, or of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _summary(found: FittingBatch, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's memory"
    how = (
        "measured with two sizes"
        if found.is_measured
        else "predicted, without a GPU"
    )
    if found.is_verified:
        how += f", and a step of {found.size} was run"
    return (
        f"up to {counted(found.size, 'example')} in {found.free_bytes / 2**30:.1f} GiB free of {where}; a "
        f"step takes {found.fixed_bytes / 2**20:.1f} MiB and {found.bytes_per_example / 2**10:.1f} "
        f"KiB per example ({how})"
    )
