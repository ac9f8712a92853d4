"""Peak memory of a training step (torch.cuda.max_memory_allocated)."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.training import DRY_WORKLOADS, WORKLOADS, TrainingStep, Workload

_OPTIMIZERS = ("SGD", "NG-SGD", "AdamW")


def run(measurement: Measurement) -> None:
    for net, workload in (DRY_WORKLOADS if measurement.dry_run else WORKLOADS).items():
        for size in (workload.dry_batch,) if measurement.dry_run else workload.batches[::2]:
            for name in _OPTIMIZERS:
                with measurement.case(f"{net} {size} {name}") as figures:
                    measurement.need_gpu("the measured peak")
                    figures["measured_mb"] = round(_measured(measurement, workload, size, name) / 1e6, 1)


def _measured(measurement: Measurement, workload: Workload, size: int, name: str) -> int:
    """Peak bytes allocated by steps, above those before the model was made."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = TrainingStep(workload, size, name, measurement.device)
    # workspaces of cuBLAS and cuDNN are allocated in the first steps and kept
    step.repeat(2)
    measurement.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.repeat(2)
    measurement.synchronize()
    return torch.cuda.max_memory_allocated() - before
