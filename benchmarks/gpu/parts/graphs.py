"""Training steps as CUDA graphs: torch's optimizers captured by hand, NG-SGD with `GraphedStep`,
ratios of their times, and a job of a worker with and without graphs.

Each step runs on three copies: two without graphs, whose difference is that of sums in another
order, and one with. On a CPU steps without graphs replace them, so that everything except
the capture runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measurement import Failed, Measurement
from benchmarks.gpu.training import DRY_WORKLOADS, PERIOD, WARM_UP, WORKLOADS, TrainingStep, Workload
from ngsgd.optim import NGSGD
from ngsgd.optim.graphed_step import GraphedStep

_ROUNDS, _STEPS = 5, 16
# steps on a side stream before a capture, as torch.cuda.graphs requires
_SIDE_STEPS = 3
# times the difference between two runs without graphs, and relative to the change: a graph may
# choose other algorithms of cuBLAS and cuDNN, in float32
_MOST_NOISE, _TOLERANCE = 20.0, 1e-3
# frames of the job of a worker, and of its minibatches
_NUM_FRAMES, _MINIBATCH = 60_000, 256


def run(measurement: Measurement) -> None:
    for net in DRY_WORKLOADS if measurement.dry_run else WORKLOADS:
        for optimizer in ("SGD", "AdamW", "NG-SGD"):
            with measurement.case(f"{net} {optimizer}") as figures:
                figures.update(_measure(measurement, net, optimizer))
                measurement.need_gpu("capture of a CUDA graph")
    for net, workload in (DRY_WORKLOADS if measurement.dry_run else WORKLOADS).items():
        for size in (workload.dry_batch,) if measurement.dry_run else workload.batches[:2]:
            with measurement.case(f"{net} {size} ratios") as figures:
                figures.update(_ratios(measurement, workload, size))
                measurement.need_gpu("capture of a CUDA graph")
    for kind in ("ngsgd", "sgd"):
        with measurement.case(f"job of a worker, TDNN, {kind}") as figures:
            figures.update(_job(measurement, kind))
            measurement.need_gpu("capture of a CUDA graph")


def _measure(measurement: Measurement, net: str, optimizer: str) -> dict[str, float]:
    """Milliseconds of a step with and without a graph."""
    workload = (DRY_WORKLOADS if measurement.dry_run else WORKLOADS)[net]
    size = workload.dry_batch if measurement.dry_run else workload.batches[0]
    one, other, captured = (
        TrainingStep(workload, size, optimizer, measurement.device, capturable=measurement.on_gpu) for _ in range(3))
    for step in (one, other, captured):
        step.repeat(2 if measurement.dry_run else WARM_UP)
    graphed = _graphed(measurement, captured)
    before = _vector(one)
    for step in (one, other):
        step.repeat(_SIDE_STEPS + _STEPS)
    for _ in range(_STEPS + (0 if optimizer != "NG-SGD" else _SIDE_STEPS)):
        graphed()
    measurement.synchronize()
    vector = _vector(one)
    change, noise, difference = (
        float((a - b).norm()) for a, b in ((vector, before), (_vector(other), vector), (_vector(captured), vector)))
    # also true of NaN
    if not difference <= _MOST_NOISE * noise + _TOLERANCE * change:
        raise Failed(
            f"after {_STEPS} steps with a graph the parameters differ by {difference:.2g}; they changed by "
            f"{change:.2g}, and two runs without a graph differ by {noise:.2g}")
    rounds = 1 if measurement.dry_run else _ROUNDS
    # the steps with a graph that a recording of a new kind delays are not measured
    for _ in range(PERIOD * 4):
        graphed()
    found = [(measurement.seconds(one, 4 * PERIOD), measurement.seconds(graphed, 4 * PERIOD)) for _ in range(rounds)]
    plain_s, graph_s = (statistics.median(times) for times in zip(*found, strict=True))
    return {
        "batch": size,
        "eager_ms": round(1e3 * plain_s, 4),
        "graph_ms": round(1e3 * graph_s, 4),
        "speed_up": round(statistics.median(a / b for a, b in found), 2),
        "difference": float(f"{difference / max(change, 1e-30):.2g}"),
        "noise": float(f"{noise / max(change, 1e-30):.2g}"),
    }


def _ratios(measurement: Measurement, workload: Workload, size: int) -> dict[str, float]:
    """Milliseconds of steps with graphs, interleaved, and NG-SGD relative to each rival."""
    steps: dict[str, Callable[[], object]] = {}
    for name in ("SGD", "NG-SGD", "AdamW", "Muon"):
        step = TrainingStep(workload, size, name, measurement.device, capturable=measurement.on_gpu)
        step.repeat(2 if measurement.dry_run else WARM_UP)
        steps[name] = _graphed(measurement, step)
        for _ in range(PERIOD if measurement.dry_run else 8 * PERIOD):
            steps[name]()
    rounds = [{name: measurement.seconds(step, 4 * PERIOD) for name, step in steps.items()}
              for _ in range(1 if measurement.dry_run else _ROUNDS)]
    milliseconds = {f"{name}_ms": round(1e3 * statistics.median(one[name] for one in rounds), 4) for name in steps}
    return milliseconds | {f"NG / {name}": round(statistics.median(one["NG-SGD"] / one[name] for one in rounds), 3)
                           for name in steps if name != "NG-SGD"}


def _graphed(measurement: Measurement, step: TrainingStep) -> Callable[[], object]:
    """The step with graphs: by GraphedStep for NG-SGD, otherwise captured by hand."""
    optimizer = step.optimizers[0]
    if not measurement.on_gpu:
        step.repeat(0 if isinstance(optimizer, NGSGD) else _SIDE_STEPS)
        return step
    if isinstance(optimizer, NGSGD):
        def run(x: Tensor, y: Tensor) -> list[Tensor | float]:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(step.model(x), y)
            loss.backward()
            optimizer.step()
            return [loss.detach()]

        graphed: Any = GraphedStep(optimizer, run)
        return lambda: graphed(step.x, step.y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.repeat(_SIDE_STEPS)
    torch.cuda.current_stream().wait_stream(side)
    # gradients are then allocated in the memory pool of the graph
    for one in step.optimizers:
        one.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _vector(step: TrainingStep) -> Tensor:
    return torch.cat([p.detach().double().view(-1) for p in step.model.parameters()])


def _job(measurement: Measurement, kind: str) -> dict[str, Any]:
    """Frames per second of a job with and without graphs, and whether the results are equal."""
    measurement.need("safetensors", "yaml")
    num_frames = _NUM_FRAMES // 20 if measurement.dry_run else _NUM_FRAMES
    found: dict[str, list[tuple[float, np.ndarray[Any, Any], float]]] = {"off": [], "auto": []}
    with TemporaryDirectory() as folder:
        for _ in range(1 if measurement.dry_run else 3):
            for graphs, results in found.items():
                results.append(_one_job(measurement, Path(folder), num_frames, kind, graphs))
    measured = {graphs: statistics.median(seconds for seconds, *_ in results) for graphs, results in found.items()}
    plain, again, graphed = found["off"][0][1], found["off"][-1][1], found["auto"][-1][1]
    return {
        "frames_per_s": round(num_frames / measured["off"]),
        "graphed_frames_per_s": round(num_frames / measured["auto"]),
        "speed_up": round(measured["off"] / measured["auto"], 2),
        "bitwise_identical": bool(np.array_equal(plain, graphed)),
        "repeat_is_identical": bool(np.array_equal(plain, again)),
        "objf": [round(found[graphs][-1][2], 5) for graphs in found],
    }


def _one_job(
    measurement: Measurement, folder: Path, num_frames: int, kind: Any, graphs: Any
) -> tuple[float, Any, float]:
    """(seconds, parameters, objf) of a job."""
    from ngsgd.config import ClusterConfig, EgsConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
    from ngsgd.data.archives import prepare_archives
    from ngsgd.schedules import Shard
    from ngsgd.tasks.speech import SpeechTaskSpec
    from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
    from ngsgd.training.worker import Worker

    config = RunConfig(
        egs=EgsConfig(left_context=9, right_context=5, frames_per_eg=8, samples_per_iter=num_frames, num_diagnostic_frames=500),
        model=ModelConfig(kind="tdnn", hidden_dim=64 if measurement.dry_run else 512),
        schedule=ScheduleConfig(num_epochs=1.0, minibatch_size=_MINIBATCH),
        optimizer=OptimizerConfig(kind=kind),
        cluster=ClusterConfig(kind="local", num_workers=1, cuda_graphs=graphs))
    train, valid = (_frames(count, seed) for count, seed in ((num_frames, 1), (2000, 2)))
    egs = prepare_archives(train, valid, config.egs, num_classes=200, digest="gpu", cache_root=folder)
    worker = Worker(SpeechTaskSpec(config, str(egs)), 0)
    start = worker.layout.flatten(worker.model.state_dict())
    job = Job(outer_iter=0, job=0, attempt=1, pieces=(WorkItem(Shard(0, 0), 0, 0),), start=JobInit(LocalRef(start)),
              lr=0.002, lr_factor=1.0)
    begin = time.perf_counter()
    result = worker.run(job)
    measurement.synchronize()
    return time.perf_counter() - begin, result.sent.read().copy(), result.objf


def _frames(count: int, seed: int) -> Any:
    from ngsgd.data.frames import FrameSet

    random = np.random.default_rng(seed)
    means = np.random.default_rng(9).normal(size=(200, 40))
    pdf = np.repeat(random.integers(0, 200, count // 5 + 1), 5)[:count].astype(np.int32)
    features = (means[pdf] + random.normal(size=(count, 40))).astype(np.float32)
    offsets = np.append(np.arange(0, count, 500), count)
    return FrameSet(features, pdf, offsets, tuple(f"u{u}" for u in range(len(offsets) - 1)))
