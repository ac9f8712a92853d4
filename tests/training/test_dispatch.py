"""Who hangs and who does not, on a clock that the test moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import FailureConfig
from ngsgd.errors import ClusterError
from ngsgd.files import read_json_lines
from ngsgd.training.dispatcher import Dispatcher, NeverStop, OuterIterationState
from ngsgd.training.job import Job, JobFailure, JobInit, JobResult, LocalRef, Outcome
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.planning import EqualPartitioner, Progress, next_plan
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.checksums import digest
from tests.toy import Run, config

DEADLINE_S = 30.0
POLL_S = 0.2


class ScriptedPool(InProcessPool):
    """Two workers that follow a script: each of its items is one poll."""

    def __init__(self, run: Run, script: Iterator[tuple[float, Mapping[int, str]]]) -> None:
        super().__init__(run.spec, 2, 1)
        self.script = script
        self.size = run.store.layout.size
        self.now = 1000.0
        self.jobs: dict[int, Job] = {}
        self.beats = {0: 0, 1: 0}
        self.killed: list[int] = []
        self.outcomes: list[Outcome] = []

    def num_idle(self) -> int:
        return 2 - len(self.jobs)

    def submit(self, job: Job) -> None:
        worker = min({0, 1} - self.jobs.keys(), key=lambda index: (index != job.job, index))
        self.jobs[worker] = job

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {worker: (job.identity, self.beats[worker]) for worker, job in self.jobs.items()}

    def kill(self, worker: int, reason: str) -> None:
        self.killed.append(worker)
        self.outcomes.append(JobFailure(self.jobs.pop(worker), worker, reason, True, from_outside=True))

    def wait(self, timeout_s: float) -> Outcome | None:
        if self.outcomes:
            return self.outcomes.pop(0)
        seconds, acts = next(self.script)
        self.now += seconds
        for worker, act in acts.items():
            self.beats[worker] += act == "minibatch"
            if act == "done" and worker in self.jobs:
                self.outcomes.append(_result(self.jobs.pop(worker), worker, self.size))
            if act == "dies" and worker in self.jobs:
                self.outcomes.append(JobFailure(self.jobs.pop(worker), worker, "killed by SIGKILL", True))
        return self.outcomes.pop(0) if self.outcomes else None


def _result(job: Job, worker: int, size: int) -> JobResult:
    vector: Vector = np.zeros(size, dtype=np.float32)
    return JobResult(job, worker, LocalRef(vector), digest(vector), 300, 5, -1.0, 0.5, 1.0, 0.0, 0.0, 0)


def _polls(seconds: float, acts: Mapping[int, str]) -> list[tuple[float, Mapping[int, str]]]:
    return [(POLL_S, acts)] * math.ceil(seconds / POLL_S)


BOTH_WORK = {0: "minibatch", 1: "minibatch"}
BOTH_DONE = [(POLL_S, {0: "done"}), (POLL_S, {1: "done"})]


class Trial:
    """One outer iteration of two jobs under a script."""

    def __init__(self, folder: Path, script: Sequence[tuple[float, Mapping[int, str]]], **failure: Any) -> None:
        settings = FailureConfig(**{"hang_timeout_s": DEADLINE_S, **failure})
        run = Run(folder, config(failure=settings))
        self.pool = ScriptedPool(run, iter(script))
        self.incidents: list[str] = []
        self.ledger_path = run.ledger_path
        ledger = Ledger(run.ledger_path)
        self.dispatch = Dispatcher(self.pool, ledger, run.store.layout, run.spec.settings, NeverStop(),
                                   lambda incident: self.incidents.append(incident.what), lambda: self.pool.now)
        plan = next_plan(run.schedule, Progress(), EqualPartitioner())
        assert plan is not None
        model = LocalRef(np.zeros(run.store.layout.size, dtype=np.float32))
        self.round: OuterIterationState = self.dispatch.open(plan, model, (), math.inf)
        for job, pieces in enumerate(plan.work):
            self.dispatch.enqueue(self.round, Job(0, job, 1, pieces, JobInit(model), 0.01, 1.0))
        try:
            self.dispatch.finish(self.round, None, lambda: None)
        finally:
            ledger.close()

    def events(self) -> list[str]:
        return [line["event"] for line in read_json_lines(self.ledger_path)]


def _absences(seconds: float, silent_s: float) -> list[tuple[float, Mapping[int, str]]]:
    """Ten of the coordinator, after which the workers are silent."""
    return [*_polls(2.0, BOTH_WORK), (seconds, {}), *_polls(silent_s, {})] * 10


# polls, and the workers that are killed
SCRIPTS: dict[str, tuple[list[tuple[float, Mapping[int, str]]], list[int]]] = {
    # who wakes 25 s after the coordinator is still in time
    "twenty absences of the coordinator": ([*_absences(60.0, 25.0), *_absences(5.0, 20.0)], []),
    "one is silent though the other works": (_polls(DEADLINE_S + 1.0, {0: "minibatch"}), [1]),
    "all fall silent together": ([*_polls(1.0, BOTH_WORK), *_polls(60.0, {})], []),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_worker_that_hangs_is_killed_and_no_other(name: str, tmp_path: Path) -> None:
    script, killed = SCRIPTS[name]
    trial = Trial(tmp_path, [*script, *_polls(1.0, BOTH_WORK), *BOTH_DONE, *BOTH_DONE])
    assert trial.pool.killed == killed and len(trial.round.results) == 2
    assert trial.incidents == ["worker_died"] * len(killed)


def test_workers_that_all_hang_for_good_are_killed_after_all(tmp_path: Path) -> None:
    trial = Trial(tmp_path, [*_polls(6 * DEADLINE_S, {}), *BOTH_DONE, *BOTH_DONE])
    assert set(trial.pool.killed) == {0, 1}


def test_a_worker_has_one_full_deadline_after_an_absence(tmp_path: Path) -> None:
    one_hangs = {0: "minibatch"}
    script = [*_polls(29.0, one_hangs), (60.0, {}), *_polls(DEADLINE_S + 1.0, one_hangs), *BOTH_DONE, *BOTH_DONE]
    trial = Trial(tmp_path, script)
    assert trial.pool.killed == [1]
    assert trial.pool.now - 1000.0 > 29.0 + 60.0 + DEADLINE_S


def test_polls_of_nearly_half_a_short_deadline_are_no_absences(tmp_path: Path) -> None:
    # 1.9 s; as absences, two of 0.6 s would count
    polls = [(seconds, {0: "minibatch"}) for seconds in (0.85, 0.85, 0.2)]
    trial = Trial(tmp_path, [*polls, *BOTH_DONE, *BOTH_DONE], hang_timeout_s=1.8)
    assert trial.pool.killed == [1]


def test_a_pause_of_the_coordinator_s_own_work_restarts_the_deadlines(tmp_path: Path) -> None:
    trial = Trial(tmp_path, [*_polls(1.0, BOTH_WORK), *BOTH_DONE])
    trial.pool.now += 1000.0    # averaging, a slow disk
    trial.pool.script = iter([*_polls(25.0, {}), *BOTH_DONE])
    again = OuterIterationState(trial.round.plan, trial.round.model, frozenset(), math.inf, 2, unsettled={0, 1})
    for job, pieces in enumerate(trial.round.plan.work):
        trial.dispatch.enqueue(again, Job(0, job, 1, pieces, JobInit(trial.round.model), 0.01, 1.0))
    trial.dispatch.ledger = Ledger(tmp_path / "again.jsonl")
    trial.dispatch.finish(again, None, lambda: None)
    trial.dispatch.ledger.close()
    assert trial.pool.killed == []


def _hangs(times: int) -> list[tuple[float, Mapping[int, str]]]:
    """Job 0 is done at once; each worker that has job 1 hangs."""
    return [(POLL_S, {0: "done"}), *_polls(times * (DEADLINE_S + 2.0), {})]


def test_a_shard_whose_workers_we_killed_is_dropped_by_name_and_never_quarantined(tmp_path: Path) -> None:
    trial = Trial(tmp_path, _hangs(3))
    assert len(trial.pool.killed) == 3
    assert trial.incidents == ["worker_died", "worker_died", "job_dropped"]
    assert trial.round.quarantined == [] and "dropped" in trial.events() and "quarantined" not in trial.events()


def test_a_shard_whose_workers_we_killed_ends_the_run_where_poison_would(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="on_repeated_crash"):
        Trial(tmp_path, _hangs(3), on_repeated_crash="stop")


def test_kills_of_ours_do_not_bring_a_shard_nearer_to_quarantine(tmp_path: Path) -> None:
    dies = [(POLL_S, {0: "dies", 1: "dies"})]
    script = [*_hangs(2), *dies, *dies, (POLL_S, {0: "done", 1: "done"})]
    trial = Trial(tmp_path, script)
    assert len(trial.pool.killed) == 2 and len(trial.round.results) == 2
    assert trial.incidents == ["worker_died"] * 4
