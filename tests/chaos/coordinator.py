"""A coordinator in a separate process that is killed at a given point and resumed by its parent."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.cluster.worker_process import MakeWorker
from ngsgd.config import RunConfig
from ngsgd.errors import RunInterrupted
from ngsgd.launcher.signals import SignalStop, signals_to
from ngsgd.optim.outer import OuterOptimizer
from ngsgd.training.dispatcher import Dispatcher
from ngsgd.training.storage.checkpoint import CheckpointStore
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.worker import Worker
from tests.chaos.faults import Fault
from tests.chaos.invariants import TAG
from tests.chaos.recorded import RecordedRun
from tests.chaos.watch import WatchedPool
from tests.tiers import HANGS_S

INTERRUPTED = 130
_GRACE_S = 20.0


@dataclass(frozen=True)
class Ordeal:
    """A run in `folder` that is to be broken."""

    folder: Path
    config: RunConfig
    fault: Fault
    tag: str                             # of all the processes that it starts
    make_worker: MakeWorker = Worker

    def run(self, meanwhile: Callable[[int], None] = lambda coordinator: None) -> int | None:
        """Return its exit code, negative for a signal; `meanwhile` receives its process id."""
        process = multiprocessing.get_context("forkserver").Process(target=_coordinate, args=(self,))
        process.start()
        try:
            assert process.pid
            meanwhile(process.pid)
        except BaseException:
            process.kill()
            raise
        process.join(HANGS_S)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        return code


def _coordinate(ordeal: Ordeal) -> None:
    os.environ[TAG] = ordeal.tag
    break_coordinator(ordeal.fault)
    run = RecordedRun(ordeal.folder, ordeal.config)
    run.store.num_to_keep = 100
    stop = SignalStop(_GRACE_S, lambda text: None)
    try:
        with signals_to(stop), run.process(stop):
            run.train(WatchedPool(run, make_worker=ordeal.make_worker), stop)
            if ordeal.fault.when == "final combine":
                ordeal.fault.strike()
    except RunInterrupted:
        sys.exit(INTERRUPTED)


def break_coordinator(fault: Fault) -> None:
    """Make this process fail at the point and the outer iteration of the fault."""
    at = fault.at[0]
    is_there = f"iter-{at:06d}"

    def it_runs(pool: ProcessPool, *_: Any) -> bool:
        return any(slot.job is not None and slot.job.outer_iter >= at for slot in pool._slots)

    def it_averages(optimizer: OuterOptimizer, vectors: Any, weights: Any, info: Any, **_: Any) -> bool:
        return bool(info.outer_iter == at)

    def it_saves(store: CheckpointStore, progress: Any, *_: Any, **__: Any) -> bool:
        return bool(progress.outer_iter == at)
    calls = itertools.count()
    # owner and name of a method, when it is its turn, and whether to strike after its work
    points: dict[str, tuple[Any, str, Callable[..., bool], bool]] = {
        "plan": (Ledger, "planned", lambda _, plan: plan.outer_iter == at, False),
        "dispatch": (Ledger, "submitted", lambda _, job: job.outer_iter == at, False),
        "waiting": (ProcessPool, "wait", it_runs, False),
        "first result in": (Dispatcher, "_take", lambda *given: given[2].job.outer_iter == at,
                            True),
        "averaging": (OuterOptimizer, "step", it_averages, False),
        "outer step": (OuterOptimizer, "step", it_averages, True),
        "before tmp": (CheckpointStore, "save", it_saves, False),
        "before ledger line": (CheckpointStore, "save", it_saves, True),
        "in tmp": (CheckpointStore, "_write", lambda _, folder, __: is_there in str(folder), True),
        "before rename": (Path, "rename", lambda _, target: Path(target).name == is_there, False),
        "broadcast": (ProcessPool, "publish", lambda *_: next(calls) == at, False)}
    if fault.when != "final combine":
        owner, name, is_time, after = points[fault.when]
        strike_at(owner, name, is_time, fault, after=after)


def strike_at(owner: Any, name: str, is_time: Callable[..., bool], fault: Fault, *,
              after: bool = False) -> None:
    """Strike before or after a method does its work."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def broken(*arguments: Any, **named: Any) -> Any:
        if not after and is_time(*arguments, **named):
            fault.strike()
        found = whole(*arguments, **named)
        if after and is_time(*arguments, **named):
            fault.strike()
        return found
    setattr(owner, name, broken)
