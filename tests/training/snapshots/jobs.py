"""Jobs that are interrupted at a minibatch and continued by another worker, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ngsgd.config import FailureConfig, OptimizerConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.schedules import Shard
from ngsgd.tasks.datasets import DatasetTask
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.tasks.streams import StreamTask
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block, Header
from ngsgd.training.task import Task, TaskSpec
from ngsgd.training.worker import Worker
from tests import toy
from tests.simulation.production import SimulatedMemory
from tests.tasks import test_sequences

# a snapshot after every minibatch
ALWAYS = FailureConfig(snapshots="on", snapshot_interval_s=0.0, snapshot_cost=1.0)


class Interrupted(Exception):
    """The worker ended in the middle of a job."""


class MortalWorker(Worker):
    """Ends after some minibatches, and takes a snapshot after each of them."""

    ends_after = -1

    def __init__(self, spec: TaskSpec, index: int) -> None:
        super().__init__(spec, index)
        # due at every boundary, however long the last one took
        self.snapshots.timer.max_cost = math.inf

    def _train(self, *arguments: Any) -> None:
        if self.ends_after == 0:
            raise Interrupted
        super()._train(*arguments)
        self.ends_after -= 1


@dataclass(frozen=True)
class Given:
    """A spec of a task of this process."""

    settings: EngineSettings
    make: Callable[[], Task]

    def task(self, device: torch.device) -> Task:
        return self.make()


class NoisyExamples(Dataset[tuple[Tensor, Tensor]]):
    """Examples with noise of the global generators."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x_D = torch.linspace(-1.0, 1.0, 6).roll(index) + 0.1 * torch.randn(6)
        return x_D, torch.tensor(index % 3)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 8), nn.LayerNorm(8),
                         nn.PReLU(), nn.Linear(8, 3))


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def noisy_task() -> DatasetTask:
    return DatasetTask(NoisyExamples(), small_model, cross_entropy, shard_size=150, valid=0.1)


def plain_task() -> DatasetTask:
    return DatasetTask(NoisyExamples(), plain_model, cross_entropy, shard_size=150, valid=0.1)


def chain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def chain_task() -> DatasetTask:
    """For KFRA, which takes chains of layers with Kronecker factors."""
    return DatasetTask(NoisyExamples(), chain_model, cross_entropy, shard_size=150, valid=0.1)


def _read(source: str) -> Any:
    generator = torch.Generator().manual_seed(len(source))
    return ((torch.randn(6, generator=generator), n % 3) for n in range(200))


def stream_task() -> StreamTask:
    return StreamTask(["a", "bb"], _read, small_model, cross_entropy, examples_per_source=170, valid=list(_read("ccc")),
                      shuffle_buffer=40)


def _read_with_noise(source: str) -> Any:
    return ((x_D + 0.1 * torch.randn(6), label) for x_D, label in _read(source))


def noisy_stream_task() -> StreamTask:
    return StreamTask(["a", "bb"], _read_with_noise, small_model, cross_entropy, examples_per_source=170, valid=list(_read("ccc")),
                      shuffle_buffer=40)


def sequence_spec(folder: Path, objective: Any) -> TaskSpec:
    """The spec of a small task of chunks with a sequence objective."""
    made = test_sequences.run(folder, objective).spec
    schedule = replace(made.config.schedule, minibatch_size=100)
    return replace(made, config=replace(made.config, schedule=schedule, failure=ALWAYS))


def dataset_spec(optimizer: OptimizerConfig, make: Callable[[], Task] = noisy_task) -> TaskSpec:
    """The spec of a small custom task."""
    return Given(EngineSettings(ScheduleConfig(minibatch_size=16, num_jobs_final=2), optimizer, OuterConfig("average"),
                                failure=ALWAYS, seed=3), make)


def frame_spec(folder: Path, config: RunConfig) -> TaskSpec:
    """The spec of a small task of speech frames."""
    config = replace(config, failure=ALWAYS)
    egs = prepare_archives(toy.frame_set(3600, seed=1), toy.frame_set(300, seed=2), config.egs, num_classes=toy.NUM_CLASSES,
                           digest="toy", cache_root=folder)
    return SpeechTaskSpec(config, str(egs))


def job_of(worker: Worker, **settings: Any) -> Job:
    """A job over two work items, the second of which is not complete."""
    start = worker.layout.flatten(worker.model.state_dict())
    pieces = (WorkItem(Shard(0, 0), 0, 0), WorkItem(Shard(1, 0), 0, 0, 1, 4))
    return Job(**{"outer_iter": 0, "job": 0, "attempt": 1, "pieces": pieces, "start": JobInit(LocalRef(start)), "lr": 0.01,
                  "lr_factor": 1.0, "keep_fisher": True, **settings})


def interrupted(spec: TaskSpec, job: Job, place: int, memory: SimulatedMemory) -> None:
    """Run a job on a worker that ends after some minibatches."""
    worker = MortalWorker(spec, job.attempt)
    worker.ends_after, worker.snapshots.memory = place, memory
    try:
        worker.run(job)
    except Interrupted:
        return
    raise AssertionError(f"the job has fewer than {place} minibatches")


def header(block: Block) -> Header:
    """The valid header of a block."""
    found = Header.decode(block[:HEADER_BYTES].tobytes())
    assert found is not None
    return found


def continued(spec: TaskSpec, job: Job, *places: int, memory: SimulatedMemory | None = None) -> JobResult:
    """The result of the last of several workers, each of which continues the job of the one before.

    Each worker ends after the minibatches of its place.
    """
    memory = memory or SimulatedMemory()
    for attempt, place in enumerate(places, start=1):
        interrupted(spec, replace(job, attempt=attempt), place, memory)
    worker = MortalWorker(spec, 0)
    worker.snapshots.memory = memory
    return worker.run(replace(job, attempt=1 + len(places)))


def contents(result: JobResult) -> dict[str, Any]:
    """Everything in a result that does not depend on the worker, the attempt and the time."""
    fisher = {name: {key: np.asarray(value).tobytes() for key, value in state.items()}
              for name, state in (result.fisher or {}).items()}
    return {"sent": result.sent.read().tobytes(), "fisher": fisher, "digest": result.digest, "objf": result.objf,
            "frames": result.num_frames, "minibatches": result.num_minibatches, "accuracy": result.accuracy,
            "shares": (result.max_change_share, result.max_param_change_share), "skipped": result.num_skipped,
            "health": result.health, "bad": result.bad_batches, "norms": result.deltas.norms_E.tobytes() if result.deltas else b""}
