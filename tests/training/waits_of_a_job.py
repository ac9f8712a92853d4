"""Run a job on the pretended device, and print where the host waits inside its minibatches.

    python -m tests.training.waits_of_a_job sgd ce FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.cluster.fingerprint import kernels
from ngsgd.config import OptimizerConfig
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training import worker as worker_module
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import Task, seeded_model
from ngsgd.training.worker import Worker
from tests import toy
from tests.device import pretended
from tests.tasks import test_sequences


class WatchedWorker(Worker):
    """Counts the waits of each minibatch."""

    def __init__(self, spec: SpeechTaskSpec, watch: pretended.Watch) -> None:
        super().__init__(spec, 0)
        self.watch = watch
        self.waits: list[dict[str, int]] = []

    def _load(self, job: Job) -> Vector:
        return job.start.model.read()

    def _train(self, *arguments: Any) -> None:
        with self.watch.step():
            super()._train(*arguments)
        self.waits.append({place: count for place, count in self.watch.waits.items() if count})


def main(kind: Any, objective: str, folder: Path) -> None:
    pretended.register()
    worker_module.choose_device = lambda *_: pretended.device()

    def on_device(task: Task, seed: int) -> torch.nn.Module:
        model = pretended.moved(seeded_model(task, seed))
        # torch moves no module to a device that Python stands in for
        model.to = lambda device: model  # type: ignore[assignment, method-assign]
        return model
    vars(worker_module)["seeded_model"] = on_device
    made = toy.Run(folder) if objective == "ce" else test_sequences.run(folder, objective)
    config = replace(made.config, optimizer=OptimizerConfig(kind))
    # tried once in a process, as its fingerprint does before the first job
    kernels()
    with pretended.Watch() as watch:
        worker = WatchedWorker(SpeechTaskSpec(config, str(made.egs), made.spec.sequences), watch)
        start = np.zeros(worker.layout.size, np.float32)
        trained = worker.train(Job(0, 0, 1, (WorkItem(Shard(0, 0), 0, 0),), JobInit(LocalRef(start)), 0.01, 1.0))
        objf, _ = trained.sums.means()
    print(json.dumps({"waits": worker.waits, "objf": objf}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
