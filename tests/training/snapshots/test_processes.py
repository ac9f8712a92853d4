"""Worker processes that are killed in the middle of jobs, which other processes continue."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import FailureConfig, OptimizerConfig, OuterConfig, RunConfig
from ngsgd.training.job import Job, JobResult
from ngsgd.training.snapshots import packing
from ngsgd.training.snapshots.packing import Block
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty
from tests.toy import Run, config, require_undisturbed
from tests.training.snapshots.jobs import ALWAYS


@dataclass(frozen=True)
class Kills:
    """Makes workers that end at a random minibatch of the first attempts at some jobs."""

    seed: int
    num_attempts: int = 1
    # fraction of the jobs
    share: float = 1.0
    number: signal.Signals = signal.SIGKILL
    # the process ends while it writes a snapshot
    in_write: bool = False

    def __call__(self, spec: TaskSpec, index: int) -> KilledWorker:
        return KilledWorker(spec, index, self)

    def place(self, job: Job, num_minibatches: int) -> int | None:
        """Minibatch after which the attempt ends; None if it does not."""
        chance = random.Random(f"{self.seed} {job.identity}")
        if job.attempt > self.num_attempts or chance.random() > self.share:
            return None
        return chance.randrange(1, num_minibatches)


class KilledWorker(Worker):
    """Sends a signal to itself."""

    def __init__(self, spec: TaskSpec, index: int, kills: Kills) -> None:
        super().__init__(spec, index)
        self.kills = kills
        # at every boundary
        self.snapshots.timer.max_cost = float("inf")
        self._left: int | None = None

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        self._left = self.kills.place(job, sum(1 for _ in self._batches(job)))
        return super().run(job, place, should_stop)

    def _train(self, *arguments: Any) -> None:
        super()._train(*arguments)
        if self._left is None:
            return
        self._left -= 1
        if self._left == 0 and self.kills.in_write:
            _end_in_checksum()
        elif self._left == 0:
            os.kill(os.getpid(), self.kills.number)


def _end_in_checksum() -> None:
    """The next checksum of a snapshot ends the process: its content is written, its header not."""
    def end(_content: Block) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0
    setattr(packing, "digest", end)  # noqa: B010  imported there


def killed(folder: Path, settings: RunConfig, kills: Kills) -> tuple[Run, ProcessPool]:
    """A run, and its pool whose workers are killed."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, settings)
    return run, ProcessPool(run.spec, 2, 1, run.store.layout.size,
                            log_directory=folder / "workers", make_worker=kills)


def trained(folder: Path, settings: RunConfig, kills: Kills, plain: RunConfig | None = None) -> Run:
    """The run, whose model is that of an undisturbed one."""
    run, pool = killed(folder, settings, kills)
    require_undisturbed(run, pool, plain or config())
    return run


def continued_at(run: Run) -> list[int]:
    return [job.continued_at for record in run.recorder.records for job in record.jobs]


RUNS = {
    "ngsgd": config(failure=ALWAYS),
    "kept curvature": config(failure=ALWAYS, optimizer=OptimizerConfig(rank_in=4, rank_out=4, curvature_state="keep")),
    "momentum": config(failure=ALWAYS, optimizer=OptimizerConfig("sgd", momentum=0.9)),
    "adam": config(failure=ALWAYS, optimizer=OptimizerConfig("adam")),
    "overlap": config(failure=ALWAYS, outer=OuterConfig("bmuf", gain=1.5, overlap=True)),
    "streaming": config(failure=ALWAYS, outer=OuterConfig("streaming", num_fragments=2)),
    "collective": config(failure=ALWAYS, cluster=replace(config().cluster, exchange="collective")),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", RUNS)
def test_a_kill_in_every_job_changes_no_bit(name: str, tmp_path: Path) -> None:
    plain = replace(RUNS[name], failure=FailureConfig(), cluster=config().cluster)
    run = trained(tmp_path, RUNS[name], Kills(1), plain)
    # the last boundary before the kill was the snapshot
    assert min(continued_at(run)) >= 0 and sum(map(bool, continued_at(run))) >= len(continued_at(run)) // 2


def test_two_kills_in_some_jobs_change_no_bit_and_are_in_the_ledger(tmp_path: Path) -> None:
    run = trained(tmp_path, RUNS["ngsgd"], Kills(7, num_attempts=2, share=0.4))
    places = continued_at(run)
    assert any(places) and not all(places)
    lines = [json.loads(line) for line in run.ledger_path.read_text().splitlines()]
    recorded = [line.get("continued_at", 0) for line in lines if line["event"] == "accepted"]
    assert sorted(recorded) == sorted(places)


@pytest.mark.faults
def test_a_snapshot_that_is_written_in_part_is_not_used(tmp_path: Path) -> None:
    assert any(continued_at(trained(tmp_path, RUNS["ngsgd"], Kills(3, in_write=True))))


@pytest.mark.faults
def test_a_worker_that_is_asked_to_end_leaves_a_snapshot(tmp_path: Path) -> None:
    # none but that of the leaving worker
    rare = config(failure=replace(ALWAYS, snapshot_interval_s=1000.0))
    run = trained(tmp_path, rare, Kills(5, number=signal.SIGTERM))
    assert all(place > 0 for place in continued_at(run))


@pytest.mark.faults
def test_data_that_crash_every_worker_are_quarantined_as_without_snapshots(tmp_path: Path) -> None:
    hashes = []
    for name, failure in (("on", ALWAYS), ("off", FailureConfig(snapshots="off"))):
        run, pool = killed(tmp_path / name, config(failure=failure),
                           Kills(1, num_attempts=9, share=0.3))
        hashes.append(run.train(pool).model_sha256)
        found = {incident.what for incident in run.recorder.incidents}
        assert found - {"job_continued"} == {"worker_died", "shard_quarantined"}
    assert hashes[0] == hashes[1]
