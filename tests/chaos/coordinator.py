"""A coordinator in a separate process that is killed at a given point and resumed by its parent."""

from __future__ import annotations

import functools
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
        """Its exit code; minus a signal's number if that ended it. `meanwhile` receives its process
        id.
        """
        process = multiprocessing.get_context("forkserver").Process(target=_coordinate, args=(self,))
        process.start()
        try:
            assert process.pid
            meanwhile(process.pid)
        except BaseException:
            process.kill()
            raise
        process.join(120)
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
    points: dict[str, Callable[[], None]] = {
        "plan": lambda: strike_before(Ledger, "planned", lambda _, plan: plan.outer_iter == at, fault),
        "dispatch": lambda: strike_before(Ledger, "submitted", lambda _, job: job.outer_iter == at, fault),
        "waiting": lambda: strike_before(ProcessPool, "wait", it_runs, fault),
        "first result in": lambda: strike_after(Dispatcher, "_take", lambda _, round_, result: result.job.outer_iter == at, fault),
        "averaging": lambda: strike_before(OuterOptimizer, "step", it_averages, fault),
        "outer step": lambda: strike_after(OuterOptimizer, "step", it_averages, fault),
        "before tmp": lambda: strike_before(CheckpointStore, "save", it_saves, fault),
        "in tmp": lambda: strike_after(CheckpointStore, "_write", lambda _, folder, __: is_there in str(folder), fault),
        "before rename": lambda: strike_before(Path, "rename", lambda _, target: Path(target).name == is_there, fault),
        "before ledger line": lambda: strike_after(CheckpointStore, "save", it_saves, fault),
        "broadcast": lambda: strike_before(ProcessPool, "publish", _Count(at), fault),
        "final combine": lambda: None}
    points[fault.when]()


class _Count:
    """True at call number `chosen`, from 0."""

    def __init__(self, chosen: int) -> None:
        self.left = chosen

    def __call__(self, *_: Any) -> bool:
        self.left -= 1
        return self.left == -1


def strike_before(owner: Any, name: str, is_time: Callable[..., bool], fault: Fault) -> None:
    """Strikes before a method does its work."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def broken(*arguments: Any, **named: Any) -> Any:
        if is_time(*arguments, **named):
            fault.strike()
        return whole(*arguments, **named)
    setattr(owner, name, broken)


def strike_after(owner: Any, name: str, is_time: Callable[..., bool], fault: Fault) -> None:
    """Strikes when a method has done its work."""
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def broken(*arguments: Any, **named: Any) -> Any:
        found = whole(*arguments, **named)
        if is_time(*arguments, **named):
            fault.strike()
        return found
    setattr(owner, name, broken)
