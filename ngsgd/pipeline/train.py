"""The outer iterations of a run: the only place that constructs a Coordinator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ngsgd.models.statistics import model_for
from ngsgd.tasks.frames import schedule_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.tracking import Tracker, Trackers
from ngsgd.training.worker_pool import WorkerPool


def train(spec: SpeechTaskSpec, pool: WorkerPool, checkpoints: CheckpointStore, start: Checkpoint, ledger: Path, *,
          tracker: Tracker | None = None, stop: StopSignal | None = None, clock: Callable[[], float] = time.monotonic,
          on_start: Callable[[], None] = lambda: None,
          catch_signals: Callable[[], AbstractContextManager[None]] = nullcontext) -> Checkpoint:
    """Run the remaining outer iterations and return the last checkpoint.

    Args:
        spec: configuration and examples.
        pool: workers; started here and closed at the end.
        checkpoints: store for the model of every outer iteration.
        start: the checkpoint to continue from.
        ledger: path of the write-ahead record of shards.
        tracker: receives the records of outer iterations.
        stop: request to stop after the current outer iteration, or at once.
        clock: seconds; simulated time in a simulation.
        on_start: called when the workers are ready.
        catch_signals: context that is active while outer iterations run.
    """
    config = spec.config
    written = Ledger(ledger, checkpoints.lock.fence if checkpoints.lock else 0)
    try:
        pool.start()
        on_start()
        coordinator = Coordinator(
            spec.task(), model_for(config, spec.frames()), schedule_of(config, spec.shards()), pool,
            RunStorage(checkpoints, written, tracker or Trackers([])),
            EngineSettings.of(config, num_averaging_threads=os.cpu_count() or 1),
            RunControl(stop or NeverStop(), clock))
        with catch_signals():
            return coordinator.train(start)
    finally:
        written.close()
        pool.close()
