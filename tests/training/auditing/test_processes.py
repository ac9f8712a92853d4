"""The audit with real worker processes: a wrong worker is named, and faults are not."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, OptimizerConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.errors import AuditError
from ngsgd.files import read_json_lines
from ngsgd.training.job import Job, JobResult, LocalRef, Outcome
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.toy import Run, config, require_undisturbed
from tests.training.auditing.faulty import FAULTY, WrongBit


def audited(every: int, *, num_workers: int = 3, num_jobs: int = 3, **changes: Any) -> RunConfig:
    """The toy run with an audit."""
    failure = FailureConfig(audit_every=every, **changes.pop("failure", {}))
    schedule = {"num_epochs": 2.0, "minibatch_size": 64, "lr_initial": 0.01, "lr_final": 0.001, "num_jobs_initial": num_jobs,
                "num_jobs_final": num_jobs, **changes.pop("schedule", {})}
    return config(failure=failure, schedule=ScheduleConfig(**schedule),
                  cluster=ClusterConfig(num_workers=num_workers, threads_per_worker=1, **changes.pop("cluster", {})), **changes)


def pool_of(run: Run, make_worker: Callable[..., Worker] = Worker) -> ProcessPool:
    return ProcessPool(run.spec, run.config.cluster.num_workers, 1, run.store.layout.size,
                       log_directory=run.folder / "workers", make_worker=make_worker)


def verdicts(run: Run) -> Counter[str]:
    return Counter(line["outcome"] for line in read_json_lines(run.ledger_path) if line["event"] == "audited")


def named(run: Run) -> list[int]:
    return [one.worker for one in run.recorder.incidents if one.what == "worker_quarantined"]


@pytest.mark.faults
def test_a_worker_with_a_wrong_bit_is_named_and_its_result_is_not_averaged(tmp_path: Path) -> None:
    run_config = audited(1)
    run = Run(tmp_path, run_config)
    # every job was audited, so no wrong result was averaged
    require_undisturbed(run, pool_of(run, WrongBit), replace(run_config, failure=FailureConfig()))
    assert named(run) == [FAULTY]
    assert verdicts(run)["decided"] == 1
    assert run.recorder.records[-1].workers_alive == 2


@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_with_a_wrong_bit_is_named_within_a_hundred_jobs(tmp_path: Path) -> None:
    run = Run(tmp_path, audited(100, schedule={"num_epochs": 110.0}))
    run.train(pool_of(run, WrongBit))
    assert named(run) == [FAULTY]
    counted = [line for line in read_json_lines(run.ledger_path) if line["event"] == "accepted" and line["worker"] == FAULTY]
    # fewer if the turn of another worker comes first
    assert 0 < len(counted) <= 99


@pytest.mark.faults
@pytest.mark.parametrize("settings", [
    {}, {"outer": OuterConfig("bmuf", overlap=True)}, {"outer": OuterConfig("streaming", num_fragments=2, overlap=True)},
    {"optimizer": OptimizerConfig(rank_in=4, rank_out=4, curvature_state="keep")}, {"cluster": {"exchange": "collective"}}],
    ids=["average", "overlap", "streaming", "kept estimates", "collective"])
def test_audits_without_faults_change_no_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    run_config = audited(2, **settings)
    run = Run(tmp_path, run_config)
    without = replace(run_config, failure=FailureConfig(),
                      cluster=replace(run_config.cluster, exchange="auto"))
    require_undisturbed(run, pool_of(run), without)
    found = verdicts(run)
    assert set(found) == {"agreed"} and found["agreed"] >= 3
    assert run.recorder.incidents == []
    assert sum(record.num_audited for record in run.recorder.records) == found["agreed"]


class Remembering(ProcessPool):
    """Remembers jobs by identity: users of their vectors are counted by it."""

    num_foreign = 0

    def submit_to(self, job: Job, worker: int) -> None:
        self.submitted = {**getattr(self, "submitted", {}), id(job): job}
        super().submit_to(job, worker)

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = super().wait(timeout_s)
        self.num_foreign += outcome is not None and id(outcome.job) not in self.submitted
        return outcome


@pytest.mark.faults
def test_outcomes_hold_the_job_that_was_submitted(tmp_path: Path) -> None:
    run = Run(tmp_path, audited(1))
    pool = Remembering(run.spec, 3, 1, run.store.layout.size)
    run.train(pool)
    assert len(pool.submitted) > 6 and pool.num_foreign == 0


class Killer(ProcessPool):
    """Kills the worker that begins the first repetition."""

    num_killed = 0

    def submit_to(self, job: Job, worker: int) -> None:
        super().submit_to(job, worker)
        if job.repeat and not self.num_killed:
            self.num_killed += 1
            os.kill(self.process_ids()[worker], signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.parametrize("policy", ["retry", "defer", "drop"])
def test_the_death_of_a_worker_during_a_repetition_costs_no_work(tmp_path: Path, policy: str) -> None:
    run_config = audited(2, failure={"policy": policy})
    run = Run(tmp_path, run_config)
    pool = Killer(run.spec, 3, 1, run.store.layout.size)
    require_undisturbed(run, pool, replace(run_config, failure=FailureConfig()))
    assert pool.num_killed == 1
    assert [one.what for one in run.recorder.incidents] == ["worker_replaced"]
    assert set(verdicts(run)) == {"agreed"}


@pytest.mark.faults
def test_two_workers_that_differ_and_repeat_their_results_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, audited(1, num_workers=2, num_jobs=2))
    with pytest.raises(AuditError, match=r"worker 1.*worker 0|worker 0.*worker 1"):
        run.train(pool_of(run, WrongBit))
    assert run.store.latest()[0] is None
    # a third worker decides after the run is resumed
    again = Run(tmp_path, audited(1, num_workers=3, num_jobs=2))
    again.train(pool_of(again, WrongBit))
    assert named(again) == [FAULTY]


class Unsteady(Worker):
    """Worker 1 gives another result each time."""

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        result = super().run(job, place, should_stop)
        if self.index == FAULTY or self.all_are:
            assert isinstance(result.sent, LocalRef)
            result.sent.vector.view(np.uint32)[0] ^= np.uint32(int.from_bytes(os.urandom(2), "little") + 1)
        return replace(result, digest=digest(result.sent.read()))

    all_are = False


class AllUnsteady(Unsteady):
    all_are = True


@pytest.mark.faults
def test_of_two_workers_the_one_that_disagrees_with_itself_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, audited(1, num_workers=2, num_jobs=2))
    run.train(pool_of(run, Unsteady))
    assert named(run) == [FAULTY]


@pytest.mark.faults
def test_training_that_is_not_reproducible_ends_the_audit_and_names_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, audited(1))
    run.train(pool_of(run, AllUnsteady))
    assert named(run) == []
    assert [one.what for one in run.recorder.incidents] == ["audit_ended"]
