"""The outer iterations of a run: the only place that constructs a Coordinator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.task import TaskSpec, run_schedule, seeded_model
from ngsgd.training.tracking import Tracker, Trackers
from ngsgd.training.worker_pool import WorkerPool


def train(spec: TaskSpec, pool: WorkerPool, checkpoints: CheckpointStore, start: Checkpoint,
          ledger: Path, *,
          tracker: Tracker | None = None, stop: StopSignal | None = None,
          clock: Callable[[], float] = time.monotonic, on_start: Callable[[], None] = lambda: None,
          catch_signals: Callable[[], AbstractContextManager[None]] = nullcontext) -> Checkpoint:
    """Run the remaining outer iterations and return the last checkpoint.

    Args:
        spec: settings and task.
        pool: workers; started here and closed at the end.
        checkpoints: store for the model of every outer iteration.
        start: the checkpoint to continue from.
        ledger: path of the write-ahead record of shards.
        tracker: receives the records of outer iterations.
        stop: request to stop after the current outer iteration, or immediately.
        clock: seconds; simulated time in a simulation.
        on_start: called when the workers are ready.
        catch_signals: context that is active while outer iterations run.
    """
    settings = replace(spec.settings, num_averaging_threads=os.cpu_count() or 1)
    task = spec.task(torch.device("cpu"))
    written = Ledger(ledger, checkpoints.lock.fence if checkpoints.lock else 0)
    try:
        pool.start()
        on_start()
        coordinator = Coordinator(
            task, seeded_model(task, settings.seed), run_schedule(task, settings),
            pool, RunStorage(checkpoints, written, tracker or Trackers([])), settings,
            RunControl(stop or NeverStop(), clock))
        with catch_signals():
            return coordinator.train(start)
    finally:
        written.close()
        pool.close()
