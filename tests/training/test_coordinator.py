"""The outer loop: averaging, rejection, retries, and the state after a stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, OptimizerConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.errors import DataError, DivergenceError, NgsgdWarning, RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.optim.outer import Average, OuterInfo, OuterOptimizer
from ngsgd.training.job import Job, JobFailure, JobInit, JobResult, LocalRef, Outcome, WorkItem
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.storage.audit import audit
from ngsgd.training.validation.checksums import digest
from tests.reference.outer import float32_mean
from tests.toy import Median, Run, StopAfter, config, require_undisturbed, undisturbed

Spoil = Callable[[JobResult], Outcome]


class FaultyPool(InProcessPool):
    """An in-process pool whose outcomes a test may change."""

    def __init__(self, run: Run, spoil: Spoil) -> None:
        super().__init__(run.spec, 2, 1)
        self.spoil = spoil
        self.results: list[JobResult] = []

    def wait(self, timeout_s: float) -> Outcome | None:
        result = super().wait(timeout_s)
        assert isinstance(result, JobResult)
        self.results.append(result)
        return self.spoil(result)


def num_committed(run: Run) -> int:
    """Outer iterations; their records come later, when the diagnostics have ended."""
    return max((int(path.name.removeprefix("iter-")) + 1 for path in run.store.directory.glob("iter-*")), default=0)


def dies(result: JobResult) -> JobFailure:
    return JobFailure(result.job, result.worker, "killed by SIGKILL", worker_died=True)


def on_first_try_of(outer_iter: int, job: int, spoil: Spoil) -> Spoil:
    def chosen(result: JobResult) -> Outcome:
        at = result.job
        return spoil(result) if (at.outer_iter, at.job, at.attempt) == (outer_iter, job, 1) else result
    return chosen


def test_each_outer_iteration_is_the_frame_weighted_mean_of_its_jobs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pool = FaultyPool(run, lambda result: result)
    end = run.train(pool)
    last = [r for r in pool.results if r.job.outer_iter == end.progress.outer_iter]
    assert len(last) == 2
    mean = float32_mean([r.sent.read() for r in last], [r.num_frames for r in last])
    assert np.array_equal(end.parameters, mean)
    assert end.progress.frames_processed == 3600 == run.recorder.records[-1].frames_processed
    assert audit(run.ledger_path) == []


class PoolOfOwners(FaultyPool):
    """A pool whose workers take the outer step in two shards, as with collectives."""

    num_steps = 0

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo) -> bool:
        self.num_steps += 1
        vectors, model = [result.sent.read() for result in results], optimizer.eval_model()
        owners = []
        for part in (slice(0, 7), slice(7, len(model))):
            owners.append(OuterOptimizer(optimizer.rule, model[part]))
            owners[-1].step([vector[part] for vector in vectors], weights, info)
        optimizer.adopt([owner.arrays for owner in owners], info)
        return True


@pytest.mark.entry("S2", "a custom outer rule needs each job's vector, as a median does, and `cluster.exchange=collective` "
                   "makes means on the workers", "works",
                   "a rule with a method `center` gets the vectors of all jobs under every exchange: the owner of a part of the "
                   "model has that part of each")
@pytest.mark.parametrize("is_median", [True, False])
def test_a_rule_that_is_no_function_of_the_mean_is_given_every_vector(is_median: bool, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Median() if is_median else Average()
    monkeypatch.setattr("ngsgd.training.averaging.averaged_model.make_rule", lambda config: rule)
    run = Run(tmp_path, config(schedule=ScheduleConfig(num_epochs=0.25, num_jobs_initial=3, num_jobs_final=3)))
    pool = PoolOfOwners(run, lambda result: result)
    checkpoint = run.train(pool)
    vectors = [result.sent.read() for result in sorted(pool.results, key=lambda result: result.job.job)]
    assert len(vectors) == 3 and pool.num_steps > 0
    weights = [result.num_frames for result in sorted(pool.results, key=lambda result: result.job.job)]
    wanted = np.median(vectors, axis=0).astype(np.float32) if is_median else float32_mean(vectors, weights)
    # both are rounded to float32 once, at the end
    assert np.array_equal(checkpoint.parameters, wanted)


@pytest.mark.slow
@pytest.mark.entry("R6", "you rely on the guarantees of docs/fault-tolerance.md with the default settings (`outer.kind=bmuf`)",
                   "works",
                   "they are stated for the default rule and tested with it. After the death of a worker, and after a stop and a "
                   "resume, the model is bitwise identical and every shard is counted once. The same holds for every rule")
@pytest.mark.parametrize("outer", [
    OuterConfig(), *(OuterConfig(kind) for kind in ("average", "diloco")), OuterConfig("bmuf", gain=1.5, overlap=True),
    OuterConfig("average", overlap=True), OuterConfig("streaming", num_fragments=2),
    OuterConfig("streaming", num_fragments=2, overlap=True)],
    ids=["bmuf", "average", "diloco", "overlap", "average-overlap", "streaming", "streaming-delay"])
def test_a_death_and_a_resume_change_no_bit(outer: OuterConfig, tmp_path: Path) -> None:
    assert OuterConfig() == RunConfig().outer and OuterConfig().kind == "bmuf"
    require_no_bit_changes(config(outer=outer, optimizer=OptimizerConfig(), failure=FailureConfig()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_a_death_and_a_resume_keep_the_error_of_compression(codec: Any, overlap: bool, tmp_path: Path) -> None:
    settings = config(outer=OuterConfig("average", overlap=overlap))
    settings = dataclasses.replace(settings, cluster=dataclasses.replace(settings.cluster, compression=codec))
    require_no_bit_changes(settings, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_killed_run_continues_from_the_newest_checkpoint_with_job_states(overlap: bool, tmp_path: Path) -> None:
    settings = config(outer=OuterConfig("average", overlap=overlap))
    settings = dataclasses.replace(settings, cluster=dataclasses.replace(settings.cluster, compression="sparse"))
    run = Run(tmp_path, settings)
    run.store.jobs_interval, run.store.num_to_keep = 3, 1
    whole = undisturbed(settings)
    assert whole.progress.outer_iter == 5

    class Killed(Exception):
        pass

    class Pool(InProcessPool):
        def submit(self, job: Job) -> None:
            if job.outer_iter == 5:
                raise Killed
            super().submit(job)
    with pytest.raises(Killed):
        run.train(Pool(run.spec, 2, 1))
    on_disk = run.store.outer_iters()
    # one of two may be damaged
    assert [number for number in on_disk if run.store.has_jobs(number)] == [0, 3]
    found, problems = run.store.latest()
    assert found is not None and found.progress.outer_iter == 3 and not problems
    assert run.train().model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []
    # the last one contains them, so that a complete run is not repeated
    assert run.store.outer_iters() == [3, 5] and run.store.has_jobs(5)


@pytest.mark.parametrize(("kind", "compression", "interval"), [
    ("ray", "sparse", 20), ("ray", "none", 1), ("local", "sparse", 1), ("slurm", "int8", 20)])
def test_vectors_of_compressed_jobs_seldom_travel_over_a_network(kind: Any, compression: Any, interval: int) -> None:
    assert config(cluster=ClusterConfig(kind, compression=compression)).job_states_interval == interval


def require_no_bit_changes(settings: RunConfig, tmp_path: Path) -> None:
    """Compare a run without faults, one with a dead worker, and one that was resumed."""
    outer = settings.outer
    whole = undisturbed(settings)
    if outer.kind == "bmuf":   # the momentum is at work, or the test would show averaging
        assert np.abs(whole.outer_state()["arrays"]["block_momentum"]).max() > 0.0
    broken = Run(tmp_path / "broken", settings)
    after_death = require_undisturbed(broken, FaultyPool(broken, on_first_try_of(2, 1, dies)))
    stopped = Run(tmp_path / "stopped", settings)
    with pytest.raises(RunInterrupted):
        stopped.train(stop=StopAfter(3, at_once=False))
    resumed = require_undisturbed(stopped)
    assert whole.progress.frames_processed == after_death.progress.frames_processed == resumed.progress.frames_processed == 3600


@pytest.mark.entry("K14")
def test_a_run_of_a_small_part_of_an_epoch_trains_one_pass_per_job(tmp_path: Path) -> None:
    run = Run(tmp_path, config(schedule=ScheduleConfig(num_epochs=0.05, num_jobs_initial=2, num_jobs_final=2)))
    checkpoint = run.train()
    [record] = run.recorder.records
    assert (checkpoint.progress.passes_done, record.num_accepted) == (2, 2)
    assert record.epoch == 2 / 12    # the toy corpus has 12 passes in an epoch
    assert record.left_s == 0.0


def test_a_job_whose_worker_died_runs_again_and_the_result_is_bit_equal(tmp_path: Path) -> None:
    run = Run(tmp_path)
    require_undisturbed(run, FaultyPool(run, on_first_try_of(1, 0, dies)))
    (incident,) = run.recorder.incidents
    assert incident.what == "worker_died"
    assert "SIGKILL" in incident.message


def test_a_shard_that_ends_every_worker_is_quarantined_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    end = run.train(FaultyPool(run, lambda r: dies(r) if (r.job.outer_iter, r.job.job) == (2, 1) else r))
    assert [i.what for i in run.recorder.incidents] == ["worker_died", "worker_died", "shard_quarantined"]
    assert run.recorder.records[2].num_accepted == 1
    assert end.progress.frames_processed < 3600
    assert audit(run.ledger_path) == []  # quarantined is settled, not lost


def nan_parameters(result: JobResult) -> JobResult:
    spoilt: Vector = result.sent.read().copy()
    spoilt[3] = np.nan
    return dataclasses.replace(result, sent=LocalRef(spoilt), digest=digest(spoilt),
                               rejection_reason="not finite")


@pytest.mark.parametrize(("spoil", "reason"), [
    (nan_parameters, "not finite"),
    (lambda r: dataclasses.replace(r, objf=float("nan")), "is nan"),
    (lambda r: dataclasses.replace(r, objf=r.objf - 5.0), "below"),
])
def test_a_bad_result_is_rejected_by_name_and_the_rest_is_averaged(tmp_path: Path, spoil: Spoil, reason: str) -> None:
    run = Run(tmp_path)
    pool = FaultyPool(run, on_first_try_of(1, 1, spoil))
    end = run.train(pool)
    record = run.recorder.records[1]
    assert (record.num_jobs, record.num_accepted) == (2, 1)
    assert reason in record.jobs[1].reason
    assert reason in run.recorder.incidents[0].message and "job 1 of" in run.recorder.incidents[0].message
    assert np.isfinite(end.parameters).all()
    assert audit(run.ledger_path) == []


def test_nothing_acceptable_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(DivergenceError, match=r"0.*2 jobs.*iteration 4"):
        run.train(FaultyPool(run, lambda r: nan_parameters(r) if r.job.outer_iter == 3 else r))
    latest, problems = run.store.latest()
    assert latest is not None and latest.progress.outer_iter == 2 and problems == []


# guessing one of six classes: -1.792
@pytest.mark.parametrize(("objf", "num_accepted"), [(-3.5, 2), (-3.7, 0)])
def test_twice_as_bad_as_guessing_is_divergence_and_less_is_not(tmp_path: Path, objf: float, num_accepted: int) -> None:
    run = Run(tmp_path)
    pool = FaultyPool(run, lambda r: dataclasses.replace(r, objf=objf) if r.job.outer_iter == 0 else r)
    if num_accepted:
        run.train(pool)
        assert run.recorder.records[0].num_accepted == num_accepted
        return
    with pytest.raises(DivergenceError, match=r"0.*2.*-3\.700.*guessing, -1\.792"):
        run.train(pool)


def test_a_diverging_learning_rate_is_caught_not_averaged(tmp_path: Path) -> None:
    unlimited = OptimizerConfig(kind="sgd", max_change=0.0, max_param_change=0.0)
    wild = dataclasses.replace(config().schedule, lr_initial=1e8, lr_final=1e8)
    run = Run(tmp_path, config(optimizer=unlimited, schedule=wild))
    with pytest.warns(NgsgdWarning), pytest.raises(DivergenceError, match=r"lower schedule\.lr_initial"):
        run.train()


def test_an_error_in_the_data_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    error = DataError("archive 3")
    with pytest.raises(DataError, match="archive 3"):
        run.train(FaultyPool(run, lambda r: JobFailure(r.job, r.worker, "DataError", False, error)))
    assert sum(line["event"] == "submitted" for line in read_json_lines(run.ledger_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True], ids=["finishing the outer iteration", "at once"])
@pytest.mark.parametrize("questions", [0, 1, 5])
def test_resuming_after_a_stop_is_bitwise_identical_to_an_uninterrupted_run(tmp_path: Path, questions: int,
                                                                              at_once: bool) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunInterrupted):
        run.train(stop=StopAfter(questions, at_once))
    require_undisturbed(run)


@pytest.mark.entry("El3", "the machine of a job is taken more often than `failure.max_attempts`", "works",
                   "a worker that was asked to end is no evidence against the data: the job is retried, and nothing is dropped")
def test_a_job_whose_machines_are_taken_often_is_not_dropped(tmp_path: Path) -> None:
    settings = config(failure=FailureConfig(max_attempts=2))
    run, asked = Run(tmp_path, settings), iter([True] * 7)
    require_undisturbed(run, run.in_process(should_stop=lambda: next(asked, False)))
    assert [incident.what for incident in run.recorder.incidents] == ["job_failed"] * 7


def test_a_stop_is_heard_between_two_minibatches(tmp_path: Path) -> None:
    run = Run(tmp_path)
    stop = StopAfter(0, at_once=True)
    pool = run.in_process(should_stop=stop.expired)
    partial: list[JobResult] = []
    wait = pool.wait

    def watched(timeout_s: float) -> Outcome | None:
        result = wait(timeout_s)
        assert isinstance(result, JobResult)
        partial.append(result)
        return result
    pool.wait = watched  # type: ignore[method-assign]
    with pytest.raises(RunInterrupted):
        run.train(pool, StopAfterFirstJob(stop))
    assert partial[0].num_minibatches == 1 and partial[0].remainder[0].first == 1


class StopAfterFirstJob(StopAfter):
    """Delivered to the coordinator only after the worker."""

    def __init__(self, heard: StopAfter) -> None:
        super().__init__(0, at_once=True)
        self.heard = heard

    def requested(self) -> bool:
        return self.heard.left < 0


def test_a_job_leaves_nothing_behind_in_its_worker(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pool = run.in_process()
    pool.start()
    start = run.store.layout.flatten(run.model.state_dict())
    model = pool.publish(lambda out: np.copyto(out, start))
    jobs = [Job(0, job, 1, (WorkItem(run.schedule.shard(job), 0, job),), JobInit(model), 0.01, 2.0) for job in (0, 1, 0)]
    outcomes = []
    for job in jobs:
        pool.submit(job)
        outcomes.append(pool.wait(0.0))
    first, _, again = outcomes
    assert isinstance(first, JobResult) and isinstance(again, JobResult)
    assert np.array_equal(first.sent.read(), again.sent.read())

def deferring(**changes: Any) -> RunConfig:
    return config(failure=FailureConfig(policy="defer"), **changes)


def test_a_job_that_is_put_off_runs_in_the_next_outer_iteration(tmp_path: Path) -> None:
    run = Run(tmp_path, deferring())
    end = run.train(FaultyPool(run, on_first_try_of(1, 0, dies)))
    assert [(r.num_jobs, r.num_accepted) for r in run.recorder.records][1:3] == [(2, 1), (3, 3)]
    assert end.progress.frames_processed == 3600
    assert audit(run.ledger_path) == []


def test_shards_deferred_by_the_last_outer_iteration_get_an_extra_one(tmp_path: Path) -> None:
    run = Run(tmp_path, deferring())
    last = run.schedule.num_outer_iters - 1
    end = run.train(FaultyPool(run, on_first_try_of(last, 1, dies)))
    assert end.progress.outer_iter == last + 1 and end.progress.frames_processed == 3600
    assert audit(run.ledger_path) == []


def test_a_dropped_job_is_reported_and_the_rest_is_averaged(tmp_path: Path) -> None:
    run = Run(tmp_path, config(failure=FailureConfig(policy="drop")))
    end = run.train(FaultyPool(run, on_first_try_of(1, 0, dies)))
    assert run.recorder.records[1].num_accepted == 1 and end.progress.frames_processed < 3600
    assert "failure.policy" in run.recorder.incidents[0].message
    assert audit(run.ledger_path) == []


@pytest.mark.parametrize("outer", [OuterConfig("average"), OuterConfig("bmuf", gain=1.5, overlap=True)],
                         ids=["in turn", "overlapped"])
def test_a_rolled_back_outer_iteration_runs_again_at_half_the_rate(tmp_path: Path, outer: OuterConfig) -> None:
    run = Run(tmp_path, config(failure=FailureConfig(on_divergence="halve"), outer=outer))
    bad = {(2, 0), (2, 1)}

    def once(result: JobResult) -> JobResult:
        at = (result.job.outer_iter, result.job.job)
        if at in bad:
            bad.discard(at)
            return nan_parameters(result)
        return result
    run.train(FaultyPool(run, once))
    assert [r.outer_iter for r in run.recorder.records] == list(range(run.schedule.num_outer_iters))
    assert run.recorder.records[2].effective_lr == pytest.approx(list(run.schedule.outer_iterations())[2].effective_lr / 2)
    assert "rolled_back" in [incident.what for incident in run.recorder.incidents]
    assert audit(run.ledger_path) == []


def test_rollbacks_are_limited(tmp_path: Path) -> None:
    run = Run(tmp_path, config(failure=FailureConfig(on_divergence="halve")))
    with pytest.raises(DivergenceError, match="after 3 roll-backs"):
        run.train(FaultyPool(run, lambda r: nan_parameters(r) if r.job.outer_iter == 2 else r))
    assert [i.what for i in run.recorder.incidents].count("rolled_back") == 3


def test_with_half_of_the_workers_there_are_half_as_many_jobs(tmp_path: Path) -> None:
    run = Run(tmp_path, config(cluster=ClusterConfig(num_workers=2, elastic=True)))
    pool = run.in_process()
    pool.num_workers_alive = lambda: 1 if num_committed(run) >= 2 else 2  # type: ignore[method-assign]
    end = run.train(pool)
    assert [r.num_jobs for r in run.recorder.records][:4] == [2, 2, 1, 1]
    assert end.progress.frames_processed == 3600
    assert run.recorder.records[-1].valid.accuracy > 0.8
    assert audit(run.ledger_path) == []


def test_shares_by_speed_lose_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, config(schedule=dataclasses.replace(config().schedule, load_balancing="speed")))
    end = run.train()
    assert end.progress.frames_processed == 3600
    assert audit(run.ledger_path) == []


def test_a_run_that_may_put_work_off_stops_at_once_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, deferring())
    stop = StopAfter(3, at_once=False)
    with pytest.raises(RunInterrupted):
        run.train(run.in_process(should_stop=lambda: stop.left < 0), stop)
    end = run.train()
    assert end.progress.frames_processed == 3600
    assert audit(run.ledger_path) == []
