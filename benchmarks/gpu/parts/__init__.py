"""The parts of `python -m benchmarks.gpu`: each runs alone, in any order, within its own time
limit."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.gpu.measurement import Measurement


@dataclass(frozen=True)
class Part:
    """A module of this package with a function `run(measurement)`."""

    module: str
    title: str
    # time limit in seconds, on a GPU and on a CPU that may be busy
    limit_s: float
    dry_limit_s: float = 240.0

    def run(self, measurement: Measurement) -> None:
        importlib.import_module(f"benchmarks.gpu.parts.{self.module}").run(measurement)


# in order of importance, in case time runs out
PARTS = {
    part.module: part
    for part in (
        Part(
            "correctness",
            "Correctness against the CPU in float64 and against Kaldi's vectors",
            90.0,
        ),
        Part("steps", "Time of a training step, and its share of the roofline", 150.0),
        Part("graphs", "Training steps as CUDA graphs", 200.0),
        Part("memory", "Peak memory of a training step", 60.0),
        Part("exchange", "NCCL and gloo with tensors of the device", 60.0),
        Part("workers", "Workers of one device, and kill -9 of a worker", 90.0),
        Part("decoding", "Throughput of the acoustic model and of decoding", 45.0),
        Part("digits", "The recipe digits with 1, 2 and 4 workers on one device", 240.0),
    )
}
