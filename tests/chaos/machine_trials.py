"""A machine that stands still, and a fork server that hangs or dies, also during a start."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ngsgd.cluster.fork_server import fork_server
from ngsgd.config import FailureConfig
from ngsgd.training.job import Job
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker
from tests.chaos import trials
from tests.chaos.cases import Case, Seen
from tests.chaos.coordinator import Ordeal
from tests.chaos.faults import Breaks, Fault
from tests.chaos.freeze import freeze
from tests.chaos.invariants import Surroundings, tagged
from tests.chaos.recorded import note_answer
from tests.chaos.watch import WatchedPool
from tests.tiers import HANGS_S
from tests.toy import Run

# of a worker, shorter than a freeze, and longer than a busy machine makes it wait
_DEADLINE_S = 5.0
_FREEZE_S = 6.0
_NUM_FREEZES = 2
_MINIBATCH_S = 0.02
_LOST = {"failed", "dropped", "quarantined", "deferred", "rejected"}


def try_machine(case: Case, folder: Path) -> Seen:
    """Freezes of all processes, of the coordinator, or of its workers."""
    who = case.how.removeprefix("freeze of ")
    plain = trials.settings(failure=FailureConfig(hang_timeout_s=_DEADLINE_S))
    run_config = replace(plain, schedule=replace(plain.schedule, num_epochs=2.0))
    fault = Fault("final combine", "nothing", str(folder / "ended"))
    ordeal = Ordeal(folder, run_config, fault, uuid.uuid4().hex, Paced)
    run, around = trials.run_in(folder, run_config), Surroundings(tag=ordeal.tag)
    families: list[set[int]] = []

    def freeze_it(coordinator: int) -> None:
        for number in range(_NUM_FREEZES):
            _wait_until(partial(_has_committed, run, 1 + 2 * number))
            families.append(set(tagged(ordeal.tag)))
            freeze(coordinator, ordeal.tag, _FREEZE_S, who)
    assert ordeal.run(freeze_it) == 0
    assert len(families) == _NUM_FREEZES and fault.strikes()
    trials.check(run, around, within=trials.reference(run_config))
    events = set(trials.all_events(run))
    assert not events & (_LOST - {"failed"}), events
    if who == "workers" and "failed" in events:  # a single busy worker looks like one that hangs
        return Seen("retried", True)
    assert "failed" not in events and len(set(map(frozenset, families))) == 1, "a worker was killed"
    return Seen("continued", True)


def try_fork_server(case: Case, folder: Path) -> Seen:
    """It hangs or dies together with all workers; or it, a newborn and the coordinator end."""
    if case.when == "start of a worker":
        return _try_birth(folder)
    run = trials.run_in(folder, trials.impatient(trials.settings()) if case.how == "SIGSTOP" else trials.settings())
    around, pool = Surroundings(), StrikesForkServer(run, signal.Signals[case.how])
    run.train(pool)
    assert pool.struck, "the fault never struck"
    trials.check(run, around, within=trials.reference(trials.settings()))
    assert "quarantined" not in trials.all_events(run)
    return Seen("replaced, retried", True)


class StrikesForkServer(WatchedPool):
    """Sends a signal to the fork server, and kills all workers, with a certain job."""

    def __init__(self, run: Run, number: signal.Signals) -> None:
        super().__init__(run)
        self.number = number
        self.struck = 0

    def submit(self, job: Job) -> None:
        super().submit(job)
        if job.identity == (2, 1, 1):
            self.struck = fork_server().process_id
            os.kill(self.struck, self.number)
            for process in self.process_ids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@dataclass(frozen=True)
class StopsAtBirth:
    """Makes workers; after the first fault, the replacement stops while it reads its job."""

    first: Fault
    second: Fault

    def __reduce__(self) -> tuple[Callable[[Fault, Fault], StopsAtBirth], tuple[Fault, Fault]]:
        return _read, (self.first, self.second)

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        worker = Breaks(self.first)(spec, index)
        # without this wait the other worker may end the run before a replacement is born
        worker.next_fault = self.second
        return worker


def _read(first: Fault, second: Fault) -> StopsAtBirth:
    if first.strikes():
        second.strike()
    return StopsAtBirth(first, second)


def _try_birth(folder: Path) -> Seen:
    run_config = trials.settings()
    first = Fault("mid shard", "SIGKILL", str(folder / "worker-struck"), others_wait=True)
    second = Fault("birth", "SIGSTOP", str(folder / "newborn-struck"))
    never = Fault("final combine", "nothing", str(folder / "ended"))
    ordeal = Ordeal(folder, run_config, never, uuid.uuid4().hex, StopsAtBirth(first, second))
    run, around = trials.run_in(folder, run_config), Surroundings(tag=ordeal.tag)

    def kill_it(coordinator: int) -> None:
        _wait_until(lambda: bool(second.strikes()))
        os.kill(coordinator, signal.SIGKILL)
    assert ordeal.run(kill_it) == -signal.SIGKILL
    # after the coordinator's death no process of its run stays
    _wait_until(lambda: not tagged(ordeal.tag))
    note_answer(folder)
    began, pool = time.time(), WatchedPool(run)
    run.train(pool)
    trials.check(run, around, within=trials.reference(run_config))
    return Seen("none is left, resumed", True, min(at_s for _, _, at_s in pool.submitted) - began)


class Paced(Worker):
    """Its minibatches last a while, so that a freeze finds it at work."""

    def _train(self, *arguments: object) -> None:
        super()._train(*arguments)  # type: ignore[arg-type]
        time.sleep(_MINIBATCH_S)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def _has_committed(run: Run, num_outer_iters: int) -> bool:
    return run.ledger_path.exists() and trials.all_events(run).count("committed") >= num_outer_iters
