"""Workers of one device without Ray: 1, 2 and 4 processes, and a run in which one of them is
killed.

The model and the data are random.  A run with a killed worker must end with the parameters of the
undisturbed run.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ngsgd
from benchmarks.gpu.measurement import Failed, Measurement
from ngsgd.files import read_json_lines
from ngsgd.tasks import DatasetTask

# environment variable with the path of a file; the worker that removes the file kills itself
_ARMED = "NGSGD_GPU_KILL_FILE"
# the process that must not be killed
_COORDINATOR = "NGSGD_GPU_COORDINATOR"
_DIM, _NUM_CLASSES = 64, 10
# relative to the norm of the parameters; cuBLAS may sum in another order on another stream
_TOLERANCE = 1e-3


def run(measurement: Measurement) -> None:
    with TemporaryDirectory() as folder:
        os.environ |= {_ARMED: str(Path(folder) / "armed"), _COORDINATOR: str(os.getpid())}
        whole: Tensor | None = None
        for num_workers in (2,) if measurement.dry_run else (1, 2, 4):
            with measurement.case(f"{num_workers} workers on one device") as figures:
                measurement.need("safetensors", "yaml")
                figures["train_s"], parameters = _train(measurement, num_workers, folder)
                whole = parameters if num_workers == 2 else whole
        with measurement.case("kill -9 of one of 2 workers") as figures:
            measurement.need("safetensors", "yaml")
            if whole is None:
                raise Failed("the undisturbed run did not end")
            Path(os.environ[_ARMED]).touch()
            figures["train_s"], parameters = _train(measurement, 2, folder)
            if Path(os.environ[_ARMED]).exists():
                raise Failed("no worker was killed")
            figures["bitwise_identical"] = torch.equal(parameters, whole)
            difference = float((parameters - whole).norm() / whole.norm())
            if not difference <= _TOLERANCE:
                raise Failed(
                    f"the parameters differ from the undisturbed run's by {difference:.2g} of their norm"
                )


def _train(measurement: Measurement, num_workers: int, folder: str) -> tuple[float, Tensor]:
    """(seconds in which jobs ran, final parameters)."""
    device = "cpu" if measurement.dry_run else "cuda"
    name = f"w{num_workers}-{time.time_ns()}"
    done = ngsgd.train(
        _small_task if measurement.dry_run else _task,
        num_workers=num_workers,
        name=name,
        output_dir=folder,
        cluster={"kind": "local", "device": device},
        num_epochs=1,
        seed=0,
        quiet=True,
    )
    events: list[dict[str, Any]] = read_json_lines(Path(done.folder.path) / "events.jsonl")
    seconds = sum(event["compute_s"] for event in events if event["event"] == "outer_iteration")
    return round(seconds, 3), torch.cat([p.detach().flatten() for p in done.model.parameters()])


def _task() -> DatasetTask:
    return _made(400_000, 1024, shard_size=50_000)


def _small_task() -> DatasetTask:
    return _made(2000, 16, shard_size=500)


def _made(num_examples: int, width: int, shard_size: int) -> DatasetTask:
    random = torch.Generator().manual_seed(3)
    y = torch.randint(_NUM_CLASSES, (num_examples,), generator=random)
    x = torch.randn(_NUM_CLASSES, _DIM, generator=random)[y] + torch.randn(
        num_examples, _DIM, generator=random
    )

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(_DIM, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, _NUM_CLASSES),
        )

    return DatasetTask(TensorDataset(x, y), model, _loss, shard_size=shard_size)


def _loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if os.environ[_COORDINATOR] != str(os.getpid()) and _is_condemned():
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _is_condemned() -> bool:
    """Whether this process is the first to find the file."""
    try:
        os.unlink(os.environ[_ARMED])
    except FileNotFoundError:
        return False
    return True
