"""Plans and shares: nothing lost, nothing met twice, whatever the workers can do."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ngsgd.schedules import Schedule, Shard
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.planning import (
    EqualPartitioner,
    Plan,
    Progress,
    SpeedPartitioner,
    TimeBudgetPartitioner,
    cut,
    next_plan,
    upcoming,
)
from tests.toy import NUM_CLASSES

SIZE = 7  # minibatches of every shard


def size(piece: WorkItem) -> int:
    return (SIZE if piece.stop is None else piece.stop) - piece.first


def schedule(num_archives: int = 5, epochs: float = 2.0, initial: int = 1, final: int = 4) -> Schedule:
    return Schedule(num_archives, 3, epochs, 0.01, 0.001, initial, final)


def all_plans(run: Schedule, partitioner: EqualPartitioner, max_jobs: int | None = None) -> list[Plan]:
    plans: list[Plan] = []
    progress = Progress()
    while (plan := next_plan(run, progress, partitioner, max_jobs=max_jobs)) is not None:
        plans.append(plan)
        progress = replace(progress, outer_iter=plan.outer_iter, passes_done=progress.passes_done + plan.num_fresh)
    return plans


def test_plans_are_kaldis_schedule() -> None:
    run = schedule()
    assert [plan.iteration for plan in all_plans(run, EqualPartitioner())] == list(run.outer_iterations())


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 5), st.integers(1, 6))
def test_with_fewer_workers_there_are_more_outer_iterations_over_the_same_data(archives: int, initial: int, more: int,
                                                                             workers: int) -> None:
    run = schedule(archives, initial=initial, final=initial + more)
    whole, short = all_plans(run, EqualPartitioner()), all_plans(run, EqualPartitioner(), max_jobs=workers)
    assert [p.shard for plan in whole for (p,) in plan.work] == [p.shard for plan in short for (p,) in plan.work]
    assert all(plan.num_jobs <= workers for plan in short)
    assert short[-1].iteration.effective_lr == run.lr_final
    rates = [plan.iteration.effective_lr for plan in short]
    assert rates == sorted(rates, reverse=True)


def test_deferred_shards_become_separate_jobs_and_run_alone_after_the_last() -> None:
    late = WorkItem(Shard(2, 1), outer_iter=0, job=1)
    run = schedule()
    first = next_plan(run, Progress(0, 1, pending=(late,)), EqualPartitioner())
    assert first is not None and first.work[-1] == (late,) and first.num_jobs == run.num_jobs(1) + 1
    end = Progress(run.num_outer_iters - 1, sum(map(run.num_jobs, range(run.num_outer_iters))), pending=(late,))
    last = next_plan(run, end, EqualPartitioner())
    assert last is not None and last.work == ((late,),) and last.iteration.effective_lr == run.lr_final
    assert next_plan(run, replace(end, pending=()), EqualPartitioner()) is None


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 5))
def test_cutting_keeps_every_minibatch_once_and_in_order(targets: list[int], count: int) -> None:
    pieces = [WorkItem(Shard(index, 0), 0, index, first=index % 3) for index in range(count)]
    work = cut(pieces, targets, size)
    dealt = [(piece.shard, n) for taken in work for piece in taken for n in range(piece.first, piece.first + size(piece))]
    assert dealt == [(piece.shard, n) for piece in pieces for n in range(piece.first, SIZE)]
    assert all(work)


def result(job: int, minibatches: int, seconds: float) -> JobResult:
    plan = Job(0, job, 1, (WorkItem(Shard(0, 0), 0, job),), JobInit(LocalRef(None)), 0.1, 1.0)  # type: ignore[arg-type]
    return JobResult(plan, job, LocalRef(None), 0, 0, minibatches, -1.0, 1 / NUM_CLASSES, seconds, 0.0, 0.0, 0)  # type: ignore[arg-type]


def test_a_slow_worker_gets_a_shorter_job() -> None:
    partitioner = SpeedPartitioner(lambda shard: SIZE)
    fresh = [WorkItem(Shard(job, 0), 0, job) for job in range(3)]
    alike = [sum(map(size, taken)) for taken in partitioner.work(fresh, (), 3)]
    assert alike == [7, 7, 7]
    partitioner.observe([result(0, 7, 1.0), result(1, 7, 1.0), result(2, 7, 4.0)])
    assert [sum(map(size, taken)) for taken in partitioner.work(fresh, (), 3)] == [9, 10, 2]


def test_rounds_of_fixed_length_take_as_much_data_as_the_workers_can_do() -> None:
    partitioner = TimeBudgetPartitioner(lambda shard: SIZE, round_s=10.0)
    assert partitioner.num_passes(2, ()) == 2  # nothing is known yet
    partitioner.observe([result(0, 7, 1.0), result(1, 7, 2.0)])
    assert partitioner.num_passes(2, ()) == 20  # 1.3 * 10 s * (7 + 3.5) / 7, rounded up
    assert partitioner.num_passes(2, [WorkItem(Shard(0, 0), 0, 0, first=3)]) == 19
    fresh = [WorkItem(Shard(0, 0), 1, job) for job in range(20)]
    counts = [sum(map(size, taken)) for taken in partitioner.work(fresh, (), 2)]
    assert counts == [91, 49] and sum(counts) == 20 * SIZE


def test_the_next_work_of_a_worker_is_a_later_job_or_that_of_the_next_outer_iteration() -> None:
    run = Schedule(8, 1, 2.0, 0.01, 0.001, 4, 4)
    plan = next_plan(run, Progress(), EqualPartitioner())
    assert plan is not None
    after = next_plan(run, Progress(outer_iter=0, passes_done=4), EqualPartitioner())
    assert after is not None
    # four workers: the same slot of the next outer iteration
    assert [upcoming(run, plan, job, 4) for job in range(4)] == list(after.work)
    # two workers: each has two jobs
    assert [upcoming(run, plan, job, 2) for job in range(4)] == [plan.work[2], plan.work[3], after.work[0], after.work[1]]
    # one of two sites has the last two jobs
    own = slice(2, 4)
    here = next_plan(run, Progress(), EqualPartitioner(), own=own)
    assert here is not None and [upcoming(run, here, job, 2, own) for job in range(2)] == list(after.work[own])
    last = next_plan(run, Progress(outer_iter=2, passes_done=12), EqualPartitioner())
    assert last is not None and [upcoming(run, last, job, 4) for job in range(4)] == [()] * 4
