"""Step times of five optimizers on five networks and three batch sizes, interleaved within one
process.

A round takes a period of four steps of each optimizer. The fraction of curvature updates of NG-SGD
and K-FAC is then that of a run. `ratio` is the median over rounds of the time relative to SGD in
the same round.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict

import torch

from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.roofline import OperationCounter, Peaks, measure_peaks
from benchmarks.gpu.training import (
    DRY_WORKLOADS,
    OPTIMIZERS,
    PERIOD,
    WARM_UP,
    WORKLOADS,
    TrainingStep,
    Workload,
)
from ngsgd.ops.kernels import native

_ROUNDS = 9


def run(measurement: Measurement) -> None:
    peaks = Peaks(1.0, 1.0, 1.0, 1.0)
    with measurement.case("peaks") as figures:
        peaks = measure_peaks(measurement)
        figures |= {name: float(f"{value:.4g}") for name, value in asdict(peaks).items()}
    for net, workload in (DRY_WORKLOADS if measurement.dry_run else WORKLOADS).items():
        for size in (workload.dry_batch,) if measurement.dry_run else workload.batches:
            _compare(measurement, net, workload, size, peaks)


def _compare(
    measurement: Measurement, net: str, workload: Workload, size: int, peaks: Peaks
) -> None:
    """All optimizers on one network and batch size."""
    warm_up, period, num_rounds = (2, 1, 1) if measurement.dry_run else (WARM_UP, PERIOD, _ROUNDS)
    steps: dict[str, TrainingStep] = {}
    counts: dict[str, OperationCounter] = {}
    for name in OPTIMIZERS:
        # a failure here is recorded, and the other optimizers are timed without this one
        with measurement.case(f"{net} {size} {name} warm-up"):
            step = TrainingStep(workload, size, name, measurement.device)
            step.repeat(warm_up)
            counts[name] = _count(step, peaks, period)
            steps[name] = step
    rounds = []
    with measurement.case(f"{net} {size} rounds"):
        for _ in range(num_rounds):
            rounds.append({name: measurement.seconds(step, period) for name, step in steps.items()})
    for name, step in steps.items():
        with measurement.case(f"{net} {size} {name}") as figures:
            step_s = statistics.median(one[name] for one in rounds)
            found = counts[name].counts
            figures |= {
                "net": net,
                "batch": size,
                "optimizer": name,
                "step_ms": round(1e3 * step_s, 4),
                "host_ms": round(1e3 * _host_s(measurement, step, period), 4),
                "ratio": round(statistics.median(one[name] / one["SGD"] for one in rounds), 3)
                if "SGD" in steps
                else None,
                "operations": round(found.num_operations / period, 1),
                "gflops": round(found.flops / period / 1e9, 4),
                "mbytes": round(found.num_bytes / period / 1e6, 2),
                "of_roofline": float(f"{found.roofline_s / period / step_s:.3g}"),
                "of_flops": float(f"{found.flops / period / step_s / peaks.float32:.3g}"),
                "of_bytes": float(f"{found.num_bytes / period / step_s / peaks.copy:.3g}"),
            }


def _count(step: TrainingStep, peaks: Peaks, period: int) -> OperationCounter:
    """The operations of a period of steps, on a CPU without compiled kernels and oneDNN, which
    cannot be counted.
    """
    counter = OperationCounter(peaks)
    on_cpu = step.x.device.type == "cpu"
    without_onednn = torch.backends.mkldnn.flags(enabled=False) if on_cpu else nullcontext()
    with native.in_torch_operations(), without_onednn, counter:
        step.repeat(period)
    return counter


def _host_s(measurement: Measurement, step: TrainingStep, period: int) -> float:
    """Seconds until a step is submitted: if close to the step time, the host is the limit and a
    CUDA graph helps.
    """
    measurement.synchronize()
    start = time.perf_counter()
    step.repeat(period)
    return (time.perf_counter() - start) / period
