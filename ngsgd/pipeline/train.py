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
from ngsgd.training.records import Tracker, Trackers
from ngsgd.training.settings import EngineSettings
from ngsgd.training.sites.rounds import Rounds, open_exchange
from ngsgd.training.sites.site_average import SiteAverage, SiteClock
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.task import TaskSpec, run_schedule, seeded_model
from ngsgd.training.worker_pool import WorkerPool


def train(spec: TaskSpec, pool: WorkerPool, checkpoints: CheckpointStore, start: Checkpoint,
          ledger: Path, *,
          tracker: Tracker | None = None, stop: StopSignal | None = None,
          clock: Callable[[], float] = time.monotonic, report: Callable[[str], object] = lambda _line: None,
          on_start: Callable[[], None] = lambda: None,
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
        report: takes lines of progress.
        on_start: called when the workers are ready.
        catch_signals: context that is active while outer iterations run.
    """
    settings = replace(spec.settings, num_averaging_threads=os.cpu_count() or 1)
    task = spec.task(torch.device("cpu"))
    written = Ledger(ledger, checkpoints.lock.fence if checkpoints.lock else 0)
    try:
        pool.start()
        on_start()
        schedule, control = run_schedule(task, settings), RunControl(stop or NeverStop(), clock, report)
        coordinator = Coordinator(
            task, seeded_model(task, settings.seed), schedule,
            pool, RunStorage(checkpoints, written, tracker or Trackers([])), settings, control,
            _sites(settings, checkpoints, schedule.num_outer_iters, control))
        with catch_signals():
            return coordinator.train(start)
    finally:
        written.close()
        pool.close()


def _sites(settings: EngineSettings, checkpoints: CheckpointStore, num_outer_iters: int, control: RunControl) -> SiteAverage | None:
    """The averages over sites; None for a run of one site."""
    if not settings.sites.jobs:
        return None
    rounds = Rounds(open_exchange(settings.sites.exchange, checkpoints.layout.size))
    # the name of the run folder
    run = checkpoints.directory.parent.name
    return SiteAverage(rounds, settings, checkpoints.layout, num_outer_iters, run, SiteClock(control.stop, control.clock))
