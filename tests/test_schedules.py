"""The schedule against Kaldi's own functions (golden/schedule.npz)."""

import math
from dataclasses import fields, replace

import pytest

from ngsgd.config import ScheduleConfig
from ngsgd.schedules import JOB_RATE, OuterIteration, Schedule, Shard
from tests.conftest import Golden

GOLDEN = Golden("schedule.npz")


def kaldi_schedule(case: str) -> Schedule:
    c = GOLDEN.config(case)
    return Schedule(c["num_archives"], c["frames_per_eg"], c["num_epochs"], c["initial_effective_lrate"],
                    c["final_effective_lrate"], c["num_jobs_initial"], c["num_jobs_final"], c["num_jobs_step"])


@pytest.mark.parametrize("case", GOLDEN.cases())
def test_every_outer_iteration_equals_kaldi(case: str) -> None:
    schedule = kaldi_schedule(case)
    plans = list(schedule.outer_iterations())
    config = GOLDEN.config(case)
    assert len(plans) == schedule.num_outer_iters == config["num_iters"]
    assert schedule.num_passes == config["num_archives_to_process"]
    for plan in plans:
        it = plan.outer_iter
        assert plan.num_jobs == GOLDEN(case, "num_jobs")[it]
        assert plan.passes_done == GOLDEN(case, "archives_processed")[it]
        # float64 on both sides; only the order of one product differs
        assert math.isclose(plan.lr, GOLDEN(case, "learning_rate")[it], rel_tol=1e-12)
        for job, shard in enumerate(plan.shards):
            assert shard == Shard(GOLDEN(case, "archive_index")[it, job] - 1, GOLDEN(case, "frame")[it, job])


@pytest.mark.entry("Nc8", "the learning rate of a job and the effective rate, in the help, the settings and the report", "works",
                   "All of them have the same text: a job uses num_jobs / gain times the effective rate.")
def test_one_sentence_has_the_rate_of_a_job() -> None:
    [about] = [field.metadata["help"] for field in fields(ScheduleConfig) if field.name == "lr_initial"]
    assert JOB_RATE in about
    assert OuterIteration(0, (Shard(0, 0),) * 4, 0, 0.1, gain=2.0).lr == 0.1 * 4 / 2


def test_resuming_plans_the_same_and_every_frame_is_read_once_in_frames_per_eg_rounds() -> None:
    schedule = kaldi_schedule(GOLDEN.cases()[0])
    assert list(schedule.outer_iterations(first=7)) == list(schedule.outer_iterations())[7:]
    assert len({Schedule(5, 8, 1.0, 0.1, 0.01, 1, 1).shard(index) for index in range(5 * 8)}) == 40


@pytest.mark.entry("K14", "a run has fewer epochs than one archive pass, such as `schedule.num_epochs=0.1` on a small corpus",
                   "works",
                   "the amount is rounded down to archive passes, and at least one outer iteration with one pass per job is run; "
                   "its learning rate is `lr_final`; no ZeroDivisionError")
@pytest.mark.parametrize(("num_archives", "frames_per_eg", "num_epochs", "num_jobs", "passes"),
                         [(1, 8, 0.1, 1, 1), (1, 8, 0.1, 2, 2), (3, 4, 0.01, 2, 2),
                          (2, 8, 0.1, 1, 1), (2, 8, 0.2, 1, 3), (1, 1, 1.0, 4, 4)])
def test_a_part_of_an_epoch_is_the_nearest_complete_passes_below_and_at_least_one_outer_iteration(
        num_archives: int, frames_per_eg: int, num_epochs: float, num_jobs: int, passes: int) -> None:
    schedule = Schedule(num_archives, frames_per_eg, num_epochs, 0.1, 0.01, num_jobs, num_jobs)
    plans = list(schedule.outer_iterations())
    assert schedule.num_passes >= 1
    assert sum(plan.num_jobs for plan in plans) == passes
    assert plans[-1].effective_lr == 0.01
    assert 0.01 <= schedule.effective_lr(0, 0) <= 0.1


def test_lr_factors_multiply_the_exponential_schedule_by_the_share_of_the_data() -> None:
    plain = Schedule(4, 2, 5.0, 0.01, 0.001, 2, 2)
    shaped = replace(plain, lr_factors=(2.0, 0.5, 4.0))
    for one, other in zip(plain.outer_iterations(), shaped.outer_iterations(), strict=True):
        at = 2.0 * one.passes_done / plain.num_passes
        factor = 2.0 * (0.5 / 2.0) ** at if at <= 1.0 else 0.5 * (4.0 / 0.5) ** (at - 1.0)
        last = one.outer_iter == plain.num_outer_iters - 1
        assert other.effective_lr == pytest.approx(one.effective_lr * (4.0 if last else factor))


def test_without_lr_factors_no_bit_changes() -> None:
    schedule = Schedule(4, 2, 5.0, 0.01, 0.001, 2, 2)
    decay = math.log(0.001 / 0.01) / schedule.num_passes
    for one in list(schedule.outer_iterations())[:-1]:
        assert one.effective_lr == 0.01 * math.exp(one.passes_done * decay)


def _rates(schedule: Schedule) -> list[float]:
    return [plan.effective_lr for plan in schedule.outer_iterations()]


def test_cosine_falls_by_half_a_period_from_the_first_rate_to_the_last() -> None:
    rates = _rates(Schedule(4, 2, 1.0, 0.01, 0.002, 1, 1, lr_schedule="cosine"))
    # 8 passes one by one: at half of the data the mean of both, and the final rate in the last one
    assert rates[0] == 0.01
    assert rates[4] == pytest.approx(0.006)
    assert rates[2] == pytest.approx(0.006 + 0.004 * math.sqrt(0.5))
    assert rates[7] == 0.002


@pytest.mark.parametrize("lr_schedule", ["exponential", "cosine"])
@pytest.mark.parametrize("num_jobs", [1, 2])
def test_warm_up_multiplies_every_schedule_by_the_share_of_the_data(lr_schedule: str, num_jobs: int) -> None:
    plain = Schedule(4, 2, 2.0, 0.01, 0.001, num_jobs, num_jobs, lr_schedule=lr_schedule)
    for one, other in zip(plain.outer_iterations(), replace(plain, warm_up=0.5).outer_iterations(), strict=True):
        middle = (one.passes_done + num_jobs / 2) / 16
        assert other.effective_lr == pytest.approx(one.effective_lr * min(1.0, middle / 0.5), rel=1e-12)
        assert other.effective_lr > 0.0


@pytest.mark.parametrize("lr_schedule", ["exponential", "cosine"])
def test_the_last_outer_iteration_and_its_rate_agree(lr_schedule: str) -> None:
    for num_epochs in (0.1, 1.0, 3.0):
        schedule = Schedule(3, 2, num_epochs, 0.01, 0.001, 1, 3, lr_schedule=lr_schedule, warm_up=1.0)
        assert _rates(schedule)[-1] == schedule.last_lr > 0.0
