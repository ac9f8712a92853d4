"""A training step as one CUDA graph: forward, backward and optimizer step, captured once and
replayed.

NG-SGD is captured between Fisher updates (frozen estimates), and as a period of four steps with one
update.  The parameters after replays are compared with those after eager steps of a copy.  On a CPU
eager steps replace the graph, so that everything except the capture runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.gpu.measurement import Failed, Measurement, Skipped
from benchmarks.gpu.training import DRY_WORKLOADS, PERIOD, WARM_UP, WORKLOADS, TrainingStep
from ngsgd import NGSGD

_ROUNDS, _REPLAYS = 5, 8
# steps on a side stream before the capture
_SIDE_STEPS = 3
# for the change of the parameters: a graph may choose other algorithms of cuBLAS and cuDNN, in
# float32
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class _Case:
    optimizer: str
    title: str
    # NG-SGD without updates of the Fisher estimates
    frozen: bool = False
    steps_per_graph: int = 1
    # other cases may not support capture, which is not a failure
    must_work: bool = False


# cases that may leave a broken capture come last
_CASES = (
    _Case("SGD", "SGD", must_work=True),
    _Case("AdamW", "AdamW", must_work=True),
    _Case("Muon", "Muon"),
    _Case("NG-SGD", "NG-SGD without Fisher update", frozen=True, must_work=True),
    _Case("NG-SGD", "NG-SGD, a period with a Fisher update", steps_per_graph=PERIOD),
    _Case("K-FAC", "K-FAC"),
)


class _Graph(Protocol):
    def replay(self) -> None: ...


def run(measurement: Measurement) -> None:
    for case in _CASES:
        # the second is limited by the device, the first by the host
        for net in ("mlp",) if measurement.dry_run else ("resnet14", "mlp"):
            with measurement.case(f"{net} {case.title}") as figures:
                figures.update(_measure(measurement, net, case))
                measurement.need_gpu("capture of a CUDA graph")


def _measure(measurement: Measurement, net: str, case: _Case) -> dict[str, float]:
    """Milliseconds of a step eagerly and in a graph."""
    workload = (DRY_WORKLOADS if measurement.dry_run else WORKLOADS)[net]
    size = workload.dry_batch if measurement.dry_run else workload.batches[0]
    eager, captured = (
        TrainingStep(
            workload, size, case.optimizer, measurement.device, capturable=measurement.on_gpu
        )
        for _ in range(2)
    )
    for step in (eager, captured):
        step.repeat(2 if measurement.dry_run else WARM_UP)
        for optimizer in step.optimizers:
            if case.frozen and isinstance(optimizer, NGSGD):
                optimizer.freeze(True)
    graph = _prepared(measurement, captured, case)
    eager.repeat(_SIDE_STEPS * case.steps_per_graph)
    before = _vector(eager)
    for _ in range(_REPLAYS):
        graph.replay()
    eager.repeat(_REPLAYS * case.steps_per_graph)
    measurement.synchronize()
    change, difference = (
        float((_vector(eager) - before).norm()),
        float((_vector(captured) - _vector(eager)).norm()),
    )
    # also true of NaN
    if not difference <= _TOLERANCE * change:
        raise Failed(
            f"after {_REPLAYS} replays the parameters differ from eager ones by {difference:.2g}; they changed by "
            f"{change:.2g}"
        )
    rounds = 1 if measurement.dry_run else _ROUNDS
    eager_s = min(measurement.seconds(eager, PERIOD) for _ in range(rounds))
    graph_s = (
        min(measurement.seconds(graph.replay, PERIOD) for _ in range(rounds)) / case.steps_per_graph
    )
    return {
        "batch": size,
        "eager_ms": round(1e3 * eager_s, 4),
        "graph_ms": round(1e3 * graph_s, 4),
        "speed_up": round(eager_s / graph_s, 2),
        "difference": float(f"{difference / max(change, 1e-30):.2g}"),
    }


def _prepared(measurement: Measurement, step: TrainingStep, case: _Case) -> _Graph:
    """A graph, after warm-up steps on a side stream, as torch.cuda.graphs requires; raises Skipped
    if an optional capture fails.
    """
    if not measurement.on_gpu:
        step.repeat(_SIDE_STEPS * case.steps_per_graph)
        return _EagerGraph(step, case.steps_per_graph)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.repeat(_SIDE_STEPS * case.steps_per_graph)
    torch.cuda.current_stream().wait_stream(side)
    # gradients are then allocated in the memory pool of the graph
    for optimizer in step.optimizers:
        optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step.repeat(case.steps_per_graph)
    except Exception as error:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        reason = f"cannot be captured: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise (Failed if case.must_work else Skipped)(reason) from error
    return graph


@dataclass(frozen=True)
class _EagerGraph:
    step: TrainingStep
    count: int

    def replay(self) -> None:
        self.step.repeat(self.count)


def _vector(step: TrainingStep) -> Tensor:
    return torch.cat([p.detach().double().view(-1) for p in step.model.parameters()])
