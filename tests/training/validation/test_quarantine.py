"""Outer iterations whose data are in quarantine, and runs without other data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ngsgd.config import EgsConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.errors import ClusterError, DamagedArchiveError, QuarantineError
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome
from ngsgd.training.storage.audit import audit, read
from tests.toy import Run, config
from tests.training.test_coordinator import FaultyPool, Spoil


def damaged(is_damaged: Callable[[Job], bool]) -> Spoil:
    """Find the archives of some jobs damaged."""
    def spoil(result: JobResult) -> Outcome:
        if not is_damaged(result.job):
            return result
        error = DamagedArchiveError("restore it", result.job.shard.archive)
        return JobFailure(result.job, result.worker, "damaged", False, error)
    return spoil


def settings(num_jobs: int = 2, outer: OuterConfig | None = None) -> RunConfig:
    """Six outer iterations; two jobs read archives 0 and 1, 2 and 0, 1 and 2, again and again."""
    base = config()
    egs = EgsConfig(**{**vars(base.egs), "on_corrupt": "quarantine"})
    schedule = ScheduleConfig(**{**vars(base.schedule), "num_jobs_initial": num_jobs, "num_jobs_final": num_jobs})
    return config(egs=egs, schedule=schedule, outer=outer or OuterConfig("bmuf"))


@pytest.mark.parametrize("outer", [OuterConfig("bmuf"), OuterConfig("bmuf", overlap=True), OuterConfig("streaming")],
                         ids=["bmuf", "overlap", "streaming"])
def test_an_outer_iteration_without_data_is_committed_with_the_same_model(outer: OuterConfig, tmp_path: Path) -> None:
    run = Run(tmp_path, settings(outer=outer))
    # archive 0 is damaged from the first outer iteration on, and archive 1 from the third
    run.train(FaultyPool(run, damaged(lambda job: job.shard.archive == 0 or (job.shard.archive == 1 and job.outer_iter >= 2))))
    done = read(run.ledger_path)
    assert [len(one.accepted) for one in done] == [1, 1, 1, 0, 1, 1]
    assert done[3].commit["model"] == done[2].commit["model"] != done[4].commit["model"]
    assert run.recorder.records[3].num_accepted == 0
    (incident,) = [one for one in run.recorder.incidents if one.what == "outer_iteration_skipped"]
    assert incident.outer_iter == 3
    assert audit(run.ledger_path) == []


def test_a_run_whose_data_are_all_in_quarantine_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(num_jobs=1))
    with pytest.raises(QuarantineError, match="archive 2, frame 3"):
        run.train(FaultyPool(run, damaged(lambda job: job.outer_iter > 0)))
    # archives 1 and 2 are given up; the last one may be tried again
    assert [len(one.accepted) for one in read(run.ledger_path)] == [1, 0, 0]
    latest, _ = run.store.latest()
    assert latest is not None and {piece.shard.archive for piece in latest.progress.quarantined} == {1, 2}
    assert audit(run.ledger_path) == []


def test_archives_that_disappear_at_once_are_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, settings())
    with pytest.raises(ClusterError):
        run.train(FaultyPool(run, damaged(lambda job: job.outer_iter == 3)))
    assert run.train().progress.frames_processed == 3600
    assert audit(run.ledger_path) == []


def test_a_first_job_without_a_result_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(num_jobs=1))
    with pytest.raises(ClusterError):
        run.train(FaultyPool(run, damaged(lambda job: True)))
    assert run.store.latest() == (None, [])
