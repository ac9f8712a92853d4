"""The planner's formulas against published runs, simulation, limits and predictions by hand."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from ngsgd.planning import planner
from ngsgd.planning.planner import Link, Machine, SampleBounds, Site, Speed, Spread, Workload, split_spread, straggler_factor


@pytest.mark.parametrize(("sigma", "told", "measured"), [(0.05, 1.044, 1.038), (0.15, 1.139, 1.125)])
def test_stragglers_of_three_torchft_replicas(sigma: float, told: float, measured: float) -> None:
    """Intervals of 1 s times exp(sigma z): the median is 1 s."""
    slowest = straggler_factor(sigma, 3) * math.exp(sigma ** 2 / 2)
    assert slowest == pytest.approx(told, abs=0.0005)
    assert slowest == pytest.approx(measured, rel=0.02)


def test_a_replica_that_is_slower_for_good_sets_the_pace() -> None:
    """torchft: 1.042 s for 20 steps of 0.05 s and the sync; 1.342 s with 0.065 s on one replica."""
    sync_s = 1.042 - 20 * 0.05
    assert 20 * 0.065 + sync_s == pytest.approx(1.342, abs=0.0005)
    # the same as a persistent spread: the two others at 1 s, the slow one at 1.3 s
    spread = split_spread([[1.0, 1.0, 1.3]] * 10, num_minibatches=20)
    assert spread.step == pytest.approx(0.0, abs=1e-9)
    mean = (1.0 + 1.0 + 1.3) / 3
    assert mean * straggler_factor(spread.host, 3) == pytest.approx(1.3, rel=0.1)


def test_averaging_costs_by_hand() -> None:
    """100 bytes take 10 s, and a message waits 1 s."""
    link = Link(bandwidth=10.0, latency_s=1.0, add_speed=50.0)
    assert planner.travel_time_s(4, 100, link) == pytest.approx(2 + 2 * 40)
    assert planner.travel_time_s(4, 100, link, num_machines=2,
                                 compression=4) == pytest.approx(2 + 20 + 10)
    # 3/4 of the results, compressed, 3/4 of the model, and two arrays of the state
    assert planner.travel_time_s(4, 100, link, 2, num_machines=4, compression=4) == pytest.approx(3 + 10 * (0.75 / 4 + 0.75 + 2))
    # two workers of a machine send half of everything to the two others, over one link
    assert planner.travel_time_s(4, 100, link, 1, num_machines=2) == pytest.approx(3 + 10 * (1 + 1 + 1))


def _exact_straggler_factor(sigma: float, count: int) -> float:
    """Mean of the largest of `count` log-normal times over their mean, by integration."""
    normal = statistics.NormalDist()
    x = np.linspace(-8.0, 9.0, 5001)
    density = np.array([count * normal.pdf(v) * normal.cdf(v) ** (count - 1) for v in x])
    return float(np.sum(np.exp(sigma * x) * density) * (x[1] - x[0])) / math.exp(sigma ** 2 / 2)


@pytest.mark.parametrize(("sigma", "tolerance"), [(0.05, 0.001), (0.1, 0.0025), (0.2, 0.007), (0.4, 0.033)])
@pytest.mark.parametrize("count", [4, 8, 32, 256, 1000])
def test_the_error_of_the_straggler_factor_is_as_documented(sigma: float, tolerance: float, count: int) -> None:
    assert straggler_factor(sigma, count) == pytest.approx(_exact_straggler_factor(sigma, count), rel=tolerance)


def test_one_worker_does_not_wait() -> None:
    assert straggler_factor(0.3, 1) == 1.0
    assert planner.normal_score(1) == pytest.approx(0.0, abs=1e-12)


def test_spread_is_separated_and_effects_common_to_a_round_are_removed() -> None:
    """The standard errors are 16 % of host and 1.2 % of step; 4 of them are allowed."""
    random = np.random.default_rng(1)
    host, step, minibatches = 0.08, 0.5, 100
    logs = (host * random.standard_normal(20) + step / math.sqrt(minibatches) * random.standard_normal((200, 20))
            + 0.7 * random.standard_normal((200, 1)))
    spread = split_spread(np.exp(logs).tolist(), minibatches)
    assert spread.host == pytest.approx(host, rel=0.64)
    assert spread.step == pytest.approx(step, rel=0.05)
    assert spread.of_job(minibatches) == pytest.approx(math.hypot(spread.host, spread.step / 10))
    # not from one worker or one round
    assert split_spread([[1.0], [2.0]], 10) == split_spread([[1.0, 2.0]], 10) == split_spread([], 10) == Spread(0.0, 0.0)


KILLS = 1 / (67 * 32)            # per worker and second: 32 workers, one of them lost every 67 s


@pytest.mark.parametrize(("compute_s", "replace_s"), [(20.0, 2.0), (60.0, 20.0), (120.0, 20.0)])
def test_waiting_for_retried_jobs_against_simulation(compute_s: float, replace_s: float) -> None:
    """The standard error is below 1.4 % of the wait. The formula skips jobs that fail twice and
    idle workers that take a job before the replacement is there: 3 % more.
    """
    random = np.random.default_rng(2)
    waits = [_simulated_end(random, 32, compute_s, replace_s) - compute_s for _ in range(20000)]
    assert planner.retry_wait_s(KILLS, 32, compute_s, replace_s) == pytest.approx(np.mean(waits),
                                                                                  rel=0.1)


def _simulated_end(random: np.random.Generator, count: int, compute_s: float, replace_s: float) -> float:
    """When the last of `count` jobs is done; a failed one begins again on a new or idle worker."""
    ends = []
    for _ in range(count):
        begin = 0.0
        while (fails := random.exponential(1 / KILLS)) < compute_s:
            ready = begin + fails + replace_s
            begin = min(ready, max(compute_s, begin + fails))
        ends.append(begin + compute_s)
    return max(ends)


def test_no_failures_cost_nothing_and_many_the_whole_iteration() -> None:
    assert planner.retry_wait_s(0.0, 1000, 100.0, 20.0) == 0.0
    assert planner.retry_wait_s(1.0, 1000, 100.0, 20.0) == pytest.approx(120.0, rel=1e-3)


BOUNDS = SampleBounds.of(minibatch_size=128, total_samples=2e6, num_jobs=4, outer_momentum=0.5)
LITTLE = SampleBounds.of(minibatch_size=128, total_samples=1e4, num_jobs=8, outer_momentum=0.0)


def test_bounds_are_ten_minibatches_and_five_time_constants_of_the_outer_momentum() -> None:
    assert (BOUNDS.low, BOUNDS.high) == (1280.0, 2e6 / (4 * 20))
    high = SampleBounds.of(minibatch_size=128, total_samples=1e6, num_jobs=4, outer_momentum=0.9).high
    assert high == pytest.approx(1e6 / (4 * 50))


@pytest.mark.parametrize(("now", "overhead_s", "bounds", "samples", "reason"), [
    (16000, 0.1, BOUNDS, 16000, "as set"), (2000, 1.0, BOUNDS, 9000, "1 s then take 10 %"),
    (2000, 5.0, BOUNDS, 25000, "iterations"), (200, 1e-6, BOUNDS, 1280, "estimates"),
    (100, 1.0, LITTLE, 1280, "fewer workers")])
def test_recommended_samples_and_reason(now: float, overhead_s: float, bounds: SampleBounds,
                                        samples: int, reason: str) -> None:
    advice = planner.recommend_samples(now=now, rate=1000.0, overhead_s=overhead_s, bounds=bounds)
    assert advice.samples == samples
    assert reason in advice.reason


MACHINE = Machine(
    num_cores=4, num_gpus=0,
    parallel=(Speed(1, 4, 3000.0, 0.2, 0.1), Speed(2, 2, 1600.0, 0.2, 0.1), Speed(4, 1, 1000.0, 0.3, 0.1),
              Speed(8, 1, 800.0, 0.4, 0.1)),
    serial=(Speed(1, 1, 1200.0, 0.1, 0.1), Speed(1, 4, 3000.0, 0.2, 0.1)),
    spread=Spread(0.1, 0.0), link=Link(1e9, 0.0, 1e9), checkpoint_s=0.05)
WORKLOAD = Workload(samples=10000.0, minibatch_size=100, model_bytes=10_000_000, total_samples=1e6)


def _predict(count: int, site: Site | None = None) -> planner.Prediction:
    return planner.predict(MACHINE, WORKLOAD, site or planner.this_machine(MACHINE, count), count)


def test_an_outer_iteration_is_the_sum_of_its_parts() -> None:
    found = _predict(4)
    assert found.compute_s == pytest.approx(10.0 * straggler_factor(0.1, 4) + 0.3 + 2 * 4 * 0.01)
    assert found.average_s == pytest.approx(4 * 0.01)
    # next to averaging and checkpoint, as no core is free
    assert found.diagnostics_s == pytest.approx(0.1 - 0.04 - 0.05)
    assert found.outer_iter_s == pytest.approx(found.compute_s + 0.04 + 0.05 + 0.01)
    assert found.efficiency == pytest.approx(10.0 / found.outer_iter_s)
    assert found.frames_per_s == pytest.approx(40000 / found.outer_iter_s)
    assert found.overhead_s == pytest.approx(0.3 + 0.08 + 0.04 + 0.05 + 0.01)
    # they take no time where a core is free
    roomy = replace(MACHINE, num_cores=8, parallel=MACHINE.parallel[:3])
    assert planner.predict(roomy, WORKLOAD, planner.this_machine(roomy, 4), 4).diagnostics_s == 0.0


def test_more_workers_than_cores_take_turns_at_their_measured_speed_also_in_one_process() -> None:
    assert _predict(8).compute_s == pytest.approx(2 * (12.5 + 0.4) + 0.16)
    assert _predict(16).compute_s == pytest.approx(4 * (12.5 + 0.4) + 0.32)
    assert _predict(16).efficiency < 1.0
    one_by_one = planner.this_machine(MACHINE, 4, one_by_one=True)
    assert _predict(4, one_by_one).compute_s == pytest.approx(4 * (10000 / 1200 + 0.1) + 0.08)


def test_between_measured_points_speed_follows_a_power() -> None:
    """The middle of two points on a line of logarithms has the geometric mean of their rates."""
    machine = replace(MACHINE, parallel=(Speed(1, 4, 4000.0, 0.2, 0.1), Speed(4, 1, 1000.0, 0.2, 0.1)))
    site = planner.this_machine(machine, 2)
    assert planner.predict(machine, WORKLOAD, site, 2).work_s == pytest.approx(10000 / 2000)


def test_on_a_cluster_everyone_has_a_core_and_the_model_goes_over_its_link() -> None:
    link = Link(bandwidth=1e8, latency_s=0.001, add_speed=1e9)
    site = planner.machines_like(1000, slots_per_machine=4, link=link)
    found = _predict(1000, site)
    assert site.num_machines == 250
    assert found.work_s == pytest.approx(10.0)  # not the speed of workers that take turns
    # a machine receives the model once; each of its workers sends a result
    assert found.compute_s == pytest.approx(10.0 * straggler_factor(0.1, 1000) + 0.3 + 7 * 0.002 + (250 + 1000) * 0.1)
    packed = planner.predict(MACHINE, replace(WORKLOAD, compression=100.0), site, 1000)
    assert found.compute_s - packed.compute_s == pytest.approx(0.99 * 1000 * 0.1)
    assert found.average_s == pytest.approx(1000 * 0.01)
    # averaged by the workers, it hardly depends on their number
    times = [planner.predict(MACHINE, WORKLOAD, planner.machines_like(count, slots_per_machine=1, link=link, num_arrays=1), count)
             for count in (64, 1000)]
    assert times[1].travel_s == pytest.approx(3 * 0.007 + (2 * 999 / 1000 + 1) * 0.1)
    assert times[0].travel_s == pytest.approx(times[1].travel_s, rel=0.02) and times[0].average_s == times[1].average_s == 0.02
    # larger machines than the measured one do not take turns
    site = planner.machines_like(16, slots_per_machine=8, link=MACHINE.link)
    assert _predict(16, site).work_s == pytest.approx(10.0)


def test_a_machine_survives_json() -> None:
    assert Machine.from_json(json.loads(json.dumps(MACHINE.to_json()))) == MACHINE
