"""Peak memory of a training step (torch.cuda.max_memory_allocated) and the planner's prediction."""

from __future__ import annotations

import gc

import torch
from torch import nn

from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.training import DRY_WORKLOADS, WORKLOADS, TrainingStep, Workload
from ngsgd.planning.memory import MemoryUse, predict

_OPTIMIZERS = ("SGD", "NG-SGD", "AdamW")


def run(measurement: Measurement) -> None:
    for net, workload in (DRY_WORKLOADS if measurement.dry_run else WORKLOADS).items():
        for size in (workload.dry_batch,) if measurement.dry_run else workload.batches[::2]:
            for name in _OPTIMIZERS:
                with measurement.case(f"{net} {size} {name}") as figures:
                    expected = _predicted(measurement, workload, size, name)
                    figures |= {
                        "state_mb": _mega(expected.state),
                        "predicted_mb": _mega(expected.peak),
                    }
                    measurement.need_gpu("the measured peak")
                    peak = _measured(measurement, workload, size, name)
                    figures |= {
                        "measured_mb": _mega(peak),
                        "predicted_over_measured": round(expected.peak / peak, 3),
                    }


def _predicted(measurement: Measurement, workload: Workload, size: int, name: str) -> MemoryUse:
    step = TrainingStep(workload, size, name, measurement.device)
    (optimizer,) = step.optimizers
    return predict(
        step.model,
        optimizer,
        lambda model, data: nn.functional.cross_entropy(model(data[0]), data[1]),
        (step.x, step.y),
    )


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


def _mega(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 2)
