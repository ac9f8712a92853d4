"""Run a job on the pretended device, and print where the host waits inside its minibatches.

    python -m tests.training.waits_of_a_job sgd FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.config import ClusterConfig, OptimizerConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training import worker as worker_module
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.worker import Worker
from tests import toy
from tests.device import pretended


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


def main(kind: Any, folder: Path) -> None:
    pretended.register()
    worker_module.choose_device = lambda *_: pretended.device()
    make_model = worker_module.seeded_model

    def on_device(*arguments: Any) -> torch.nn.Module:
        model = pretended.moved(make_model(*arguments))
        # torch moves no module to a device that Python stands in for
        model.to = lambda device: model  # type: ignore[assignment, method-assign, misc]
        return model
    worker_module.seeded_model = on_device
    config = toy.config(optimizer=OptimizerConfig(kind), cluster=ClusterConfig(threads_per_worker=1))
    egs = prepare_archives(toy.frame_set(1200, 1), toy.frame_set(300, 2), config.egs, num_classes=toy.NUM_CLASSES,
                           digest="toy", cache_root=folder)
    with pretended.Watch() as watch:
        worker = WatchedWorker(SpeechTaskSpec(config, str(egs)), watch)
        start = np.zeros(worker.layout.size, np.float32)
        trained = worker.train(Job(0, 0, 1, (WorkItem(Shard(0, 0), 0, 0),), JobInit(LocalRef(start)), 0.01, 1.0))
        objf, _ = trained.sums.means()
    print(json.dumps({"waits": worker.waits, "objf": objf}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
