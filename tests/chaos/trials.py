"""Run a case of the matrix, check that the fault struck and nothing was lost, return its cost."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig, RunConfig
from ngsgd.errors import CheckpointError
from ngsgd.files import read_json_lines
from ngsgd.training.job import Job, JobResult
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.chaos import cases
from tests.chaos.cases import Case, Seen
from tests.chaos.coordinator import INTERRUPTED, Ordeal
from tests.chaos.faults import Breaks, Fault, Spoils
from tests.chaos.invariants import Surroundings, num_recomputed, problems
from tests.chaos.ray_trials import try_ray
from tests.chaos.recorded import RecordedRun, check_answer, note_answer
from tests.chaos.service import try_service
from tests.chaos.storage import PowerCut, Trouble, cut_short
from tests.chaos.watch import WatchedPool
from tests.toy import Run, config, undisturbed

# in cases in which a process hangs; elsewhere a busy machine must not make it look so
PROGRESS_TIMEOUT_S = 1.0
PATIENT_S = 600.0
_MANY = 4             # workers, where it takes more than two
_CHURN_ITERS = 20


def try_case(case: Case, folder: Path) -> Seen:
    """Dispatches on who breaks."""
    from tests.chaos import machine_trials  # which uses the settings below
    trials: dict[str, Callable[[Case, Path], Seen]] = {
        "worker": _try_worker, "result": _try_result, "storage": _try_storage,
        "coordinator": lambda case, folder: _break_and_resume(Ordeal(
            folder, settings(), Fault(case.when, case.how, str(folder / "struck")),
            uuid.uuid4().hex)),
        "combined": _try_combined, "service": try_service, "ray": try_ray,
        "machine": machine_trials.try_machine, "fork server": machine_trials.try_fork_server}
    seen = trials[case.who](case, folder)
    check_answer(case, folder)
    return seen


# Settings -----------------------------------------------------------------------------------------

def settings(name: str = "", **changes: Any) -> RunConfig:
    """A run of a second; `name` is one of cases.OUTER or cases.POLICIES."""
    outer = {"overlap": OuterConfig("average", overlap=True), "bmuf": OuterConfig("bmuf", gain=1.5),
             "streaming": OuterConfig("streaming", overlap=True)}
    policy: Any = name if name in cases.POLICIES else "retry"
    failure = FailureConfig(policy=policy, hang_timeout_s=PATIENT_S)
    return config(**{"outer": outer.get(name, OuterConfig("average")), "failure": failure, **changes})


def impatient(run_config: RunConfig) -> RunConfig:
    """The same for cases in which a process hangs; one that is only slow may be tried often."""
    return replace(run_config, failure=replace(run_config.failure, hang_timeout_s=PROGRESS_TIMEOUT_S, max_attempts=20))


def many_workers(num_workers: int = _MANY) -> RunConfig:
    """A worker for each of so many jobs."""
    plain = settings()
    schedule = replace(plain.schedule, num_jobs_initial=num_workers, num_jobs_final=num_workers, num_epochs=2.0)
    return settings(cluster=ClusterConfig(num_workers=num_workers, threads_per_worker=1), schedule=schedule)


def reference(run_config: RunConfig) -> str:
    """The hash of the final model without faults, made in one process."""
    return undisturbed(run_config).model_sha256


def run_in(folder: Path, run_config: RunConfig) -> RecordedRun:
    """One that keeps all its checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    run = RecordedRun(folder, run_config)
    run.store.num_to_keep = 100
    return run


def check(run: Run, around: Surroundings, *, pause_s: float | None = None, within: str = "") -> None:
    """All invariants."""
    found = problems(run, pause_s=pause_s, within=within) + around.problems(run.folder)
    assert not found, "\n".join(found)


# Workers ------------------------------------------------------------------------------------------

_GOES_ON = {("slow", when) for when in cases.WORKER_WHEN} | {
    # its job is done, or as good as
    ("SIGTERM", when) for when in ("last minibatch", "result built", "mid upload")}
_WITHOUT_JOB = ("start", "after ack", "idle")


def _try_worker(case: Case, folder: Path) -> Seen:
    goes_on = (case.how, case.when) in _GOES_ON
    run_config = settings(case.setting)
    if case.how in ("SIGSTOP", "deadlock"):
        run_config = impatient(run_config)
    run = run_in(folder, run_config)
    fault = Fault(case.when, case.how, str(folder / "struck"))
    around, pool = Surroundings(), WatchedPool(run, fault, Breaks(fault))
    end = run.train(pool)
    assert fault.strikes(), "the fault never struck"
    keeps_all = case.setting not in cases.POLICIES
    check(run, around, pause_s=pool.longest_pause_s, within=reference(settings(case.setting)) if keeps_all else "")
    events = events_at(run, fault.at)
    if goes_on:
        assert "failed" not in events, "a worker that goes on was taken for dead"
    elif case.when not in _WITHOUT_JOB:
        assert "failed" in events, "nobody noticed"
    if case.setting == "drop":
        assert (end.progress.frames_processed < 3600) == ("dropped" in all_events(run))
    else:
        assert end.progress.frames_processed == 3600
    outcome = "continued" if goes_on else {"defer": "deferred", "drop": "dropped"}.get(case.setting, "retried")
    if case.when in _WITHOUT_JOB and "failed" not in all_events(run) and not goes_on:
        outcome = "replaced"
    return Seen(outcome, keeps_all, None if goes_on else pool.recovery_s())


def events_at(run: Run, at: tuple[int, int]) -> list[str]:
    """The ledger's entry of a job."""
    return [line["event"] for line in read_json_lines(run.ledger_path) if (line.get("outer_iter"), line.get("job")) == at]


def all_events(run: Run) -> list[str]:
    return [line["event"] for line in read_json_lines(run.ledger_path)]


def _try_result(case: Case, folder: Path) -> Seen:
    # a worker whose result was not recognized is only missed by its silence
    run = run_in(folder, impatient(settings()) if case.how == "wrong outer iteration" else settings())
    fault = Fault("arriving", case.how, str(folder / "struck"))
    around, pool = Surroundings(), WatchedPool(run, fault, Spoils(fault))
    run.train(pool)
    assert fault.strikes(), "the fault never struck"
    is_lost = case.how in ("NaN", "Inf")
    check(run, around, pause_s=pool.longest_pause_s, within="" if is_lost else reference(settings()))
    if is_lost:  # a retry would give the same result: the job is dropped and named
        (incident,) = run.recorder.incidents
        assert incident.what == "job_rejected" and "not finite, the first in" in incident.message
        return Seen("rejected by name", False)
    num_discarded = pool.num_discarded + all_events(run).count("discarded")
    assert num_discarded == 1, f"{num_discarded} results were discarded"
    tried_again = "failed" in events_at(run, fault.at)
    assert tried_again == (case.how != "duplicate")
    return Seen("discarded, retried" if tried_again else "discarded", True, pool.recovery_s())


# Coordinator --------------------------------------------------------------------------------------

def _break_and_resume(ordeal: Ordeal) -> Seen:
    run = run_in(ordeal.folder, ordeal.config)
    around = Surroundings(tag=ordeal.tag)
    code = ordeal.run()
    assert ordeal.fault.strikes(), "the fault never struck"
    # asked to end after the last outer iteration it has nothing to interrupt
    orderly = (0,) if ordeal.fault.when == "final combine" else (INTERRUPTED,)
    assert code in ((-signal.SIGKILL,) if ordeal.fault.how == "SIGKILL" else orderly), f"the coordinator ended with {code}"
    # but for files, which the next process takes care of
    left = around.problems(ordeal.folder / "nowhere")
    assert not left, "\n".join(left)
    note_answer(ordeal.folder)
    began, pool = time.time(), WatchedPool(run)
    run.train(pool)
    check(run, around, pause_s=pool.longest_pause_s, within=reference(ordeal.config))
    again = num_recomputed(run)
    assert sum(again.values()) <= 1, f"outer iterations {dict(again)} were begun again"
    text = "resumed, one outer iteration repeated" if again else "resumed, nothing repeated"
    return Seen(text, True, min((at_s for _, _, at_s in pool.submitted), default=time.time()) - began)


# Storage ------------------------------------------------------------------------------------------

def _try_storage(case: Case, folder: Path) -> Seen:
    run = run_in(folder, settings())
    around, within = Surroundings(), reference(settings())
    is_read = case.when == "read"
    trouble = Trouble(case.when, case.how, 5 if is_read else 2)
    began = time.monotonic()
    if is_read:
        run.train(WatchedPool(run))
        if case.how == "half-written manifest":
            cut_short(run.store.directory / trouble.name)
            trouble.happened = True
    outcome, said = "continued", ""
    with trouble.active():
        try:
            run.train(WatchedPool(run))
        except CheckpointError as error:
            said = str(error)
            outcome = "stopped with an error, resumed"
        except PowerCut:
            outcome = "resumed"
    assert trouble.happened, "the fault never struck"
    assert not said or ("cannot be read" in said and "then resume" in said if is_read
                        else "could not be saved" in said and "ngsgd resume" in said)
    if outcome == "continued" and is_read and case.how != "slow":
        outcome = "older checkpoint, one outer iteration repeated"
    broke_s = time.monotonic() - began
    note_answer(folder)
    run.train(WatchedPool(run))
    check(run, around, within=within)
    assert sum(num_recomputed(run).values()) <= 1
    return Seen(outcome, True, None if outcome == "continued" else time.monotonic() - began - broke_s)


# Combined -----------------------------------------------------------------------------------------

def _try_combined(case: Case, folder: Path) -> Seen:
    trials: dict[str, Callable[[Path], Seen]] = {
        "all workers": lambda at: _kill_many(at, many_workers(), range(_MANY)),
        "all workers but one": lambda at: _kill_many(at, many_workers(), range(_MANY - 1)),
        "killed again in each retry": _poison, "replacement killed while it starts": _kill_the_replacement,
        "worker and coordinator": _kill_both, "churn": _churn}
    return trials[case.how](folder)


class WaitingWorker(Worker):
    """Its job of an outer iteration waits in its middle until the fault has struck."""

    def __init__(self, spec: TaskSpec, index: int, fault: Fault) -> None:
        super().__init__(spec, index)
        self.fault = fault

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        self._waits = job.outer_iter == self.fault.at[0]
        return super().run(job, place, should_stop)

    def _train(self, *arguments: Any) -> None:
        super()._train(*arguments)
        if self._waits:
            self.fault.wait()


class StormyPool(WatchedPool):
    """Kills workers as soon as a certain job is given out."""

    def __init__(self, run: Run, victims: Callable[[Job], list[int]], *given: Any) -> None:
        super().__init__(run, *given)
        self.victims = victims
        self.killed: list[int] = []

    def submit(self, job: Job) -> None:
        super().submit(job)
        for index in self.victims(job):
            process_id = self._slots[index].process.pid
            assert process_id
            os.kill(process_id, signal.SIGKILL)
            self.killed.append(process_id)
        if self.fault and self.killed:
            self.fault.strike()


def _kill_many(folder: Path, run_config: RunConfig, victims: range) -> Seen:
    run = run_in(folder, run_config)
    last = (2, run_config.cluster.num_workers - 1, 1)   # by then all have work
    fault = Fault("mid shard", "nothing", str(folder / "struck"))
    around = Surroundings()
    pool = StormyPool(run, lambda job: list(victims) if job.identity == last else [], fault, partial(WaitingWorker, fault=fault))
    run.train(pool)
    assert len(pool.killed) == len(victims) and fault.strikes()
    check(run, around, pause_s=pool.longest_pause_s, within=reference(run_config))
    assert all_events(run).count("failed") == len(victims)
    return Seen("retried", True)


def _poison(folder: Path) -> Seen:
    run = run_in(folder, settings())
    fault = Fault("mid shard", "SIGKILL", str(folder / "struck"), num_times=3)
    around, pool = Surroundings(), WatchedPool(run, fault, Breaks(fault))
    end = run.train(pool)
    assert len(fault.strikes()) == 3
    check(run, around, pause_s=pool.longest_pause_s)
    (told,) = [one for one in run.recorder.incidents if one.what == "shard_quarantined"]
    assert "archive" in told.message and "crashed 3 workers" in told.message
    assert end.progress.quarantined and end.progress.frames_processed < 3600
    return Seen("quarantined by name", False)


@dataclass(frozen=True)
class BreaksTwice:
    """The first fault ends a worker, the second its replacement, before it is ready."""

    first: Fault
    second: Fault

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        if index == self.first.at[1] and self.first.strikes():
            self.second.strike()
        return Breaks(self.first)(spec, index)


def _kill_the_replacement(folder: Path) -> Seen:
    run = run_in(folder, settings())
    first = Fault("mid shard", "SIGKILL", str(folder / "struck"))
    second = Fault("start", "SIGKILL", str(folder / "again"))
    around, pool = Surroundings(), WatchedPool(run, first, BreaksTwice(first, second))
    run.train(pool)
    assert first.strikes() and second.strikes()
    check(run, around, pause_s=pool.longest_pause_s, within=reference(settings()))
    return Seen("retried", True, pool.recovery_s())


def _kill_both(folder: Path) -> Seen:
    worker = Fault("mid shard", "SIGKILL", str(folder / "worker-struck"), others_wait=True)
    coordinator = Fault("first result in", "SIGKILL", str(folder / "struck"))
    seen = _break_and_resume(Ordeal(folder, settings(), coordinator, uuid.uuid4().hex, Breaks(worker)))
    assert worker.strikes(), "the worker's fault never struck"
    return seen


def _churn(folder: Path) -> Seen:
    plain = settings()
    run_config = replace(plain, schedule=replace(plain.schedule, num_epochs=_CHURN_ITERS / 6))
    run = run_in(folder, run_config)
    around, pool = Surroundings(), StormyPool(run, lambda job: [job.job] if job.attempt == 1 and job.outer_iter else [])
    run.train(pool)
    assert len(run.recorder.records) == _CHURN_ITERS
    assert len(pool.killed) == 2 * (_CHURN_ITERS - 1)
    check(run, around, pause_s=pool.longest_pause_s, within=reference(run_config))
    return Seen(f"{len(pool.killed)} kills in {_CHURN_ITERS} outer iterations, all retried", True)


