"""The settings that `ngsgd plan` chooses for a deadline, a budget or a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ngsgd.config import ClusterConfig, EgsConfig, OuterConfig, RunConfig
from ngsgd.planning.planner import Link, Machine, Speed, Spread, Workload
from ngsgd.planning.scaling import Assumptions, Choice, choices, choose, packed, rows

# one core per machine; no spread, no cost of a checkpoint
MACHINE = Machine(1, 0, (Speed(1, 1, 1000.0, 0.1, 0.0),), (Speed(1, 1, 1000.0, 0.1, 0.0),), Spread(0.0, 0.0),
                  Link(1e9, 0.0, 1e12), 0.0)
# 10 s of computation in a job
WORKLOAD = Workload(10_000.0, 100, 4_000_000, 1e8)
CONFIG = RunConfig(cluster=ClusterConfig(price_per_hour=2.0), egs=EgsConfig(samples_per_iter=10_000))


def assumed(bandwidth: float, failures: float = 0.0) -> Assumptions:
    return Assumptions(1, bandwidth, 0.0, failures, 20.0, None)


def test_a_slow_link_is_compressed_and_a_fast_one_is_not() -> None:
    [fast] = choices(MACHINE, WORKLOAD, CONFIG, [8], assumed(1e10))
    [slow] = choices(MACHINE, WORKLOAD, CONFIG, [8], assumed(1e6))
    assert (fast.compression, slow.compression) == ("none", "sparse")
    # the fixed costs of 64 s of transfers need longer jobs
    assert slow.samples_per_iter > fast.samples_per_iter == 10_000
    [streaming] = choices(MACHINE, WORKLOAD, replace(CONFIG, outer=OuterConfig("streaming")), [8], assumed(1e6))
    assert streaming.compression == "none"


def test_time_and_cost_are_those_of_the_table() -> None:
    [row] = rows(MACHINE, WORKLOAD, CONFIG, [4], assumed(1e10, failures=0.5))
    [one] = choices(MACHINE, WORKLOAD, CONFIG, [4], assumed(1e10, failures=0.5))
    assert (one.total_s, one.cost) == (row.total_s, row.cost)
    assert row.cost == pytest.approx(row.total_s / 3600 * 4 * 2.0)
    # 2500 outer iterations of at least 10.1 s
    assert row.total_s > 2500 * 10.1


def test_the_table_has_the_compression_of_the_settings() -> None:
    compressed = replace(CONFIG, cluster=replace(CONFIG.cluster, compression="sparse"))
    [plain], [sparse] = (rows(MACHINE, WORKLOAD, one, [8], assumed(1e6))
                         for one in (CONFIG, compressed))
    ratio = packed(WORKLOAD, "sparse").compression
    assert 95 < ratio < 110
    assert plain.there.travel_s - sparse.there.travel_s == pytest.approx(7 / 8 * 4.0 * (1 - 1 / ratio))


def test_numbers_of_workers_with_too_little_data_are_no_choice() -> None:
    little = replace(WORKLOAD, total_samples=20_000.0)
    assert [one.workers for one in choices(MACHINE, little, CONFIG, [1, 1000], assumed(1e10))] == [1]
    assert choose([]) is None


FOUND = [Choice(1, 10, "none", 100.0, 1.0, 1.0), Choice(4, 10, "none", 30.0, 1.2, 0.9), Choice(16, 10, "none", 20.0, 3.2, 0.4)]


@pytest.mark.parametrize(("deadline_s", "budget", "workers"), [
    (float("inf"), float("inf"), 4), (25.0, float("inf"), 16), (50.0, float("inf"), 4), (200.0, float("inf"), 1),
    (float("inf"), 5.0, 16), (float("inf"), 1.5, 4), (50.0, 1.5, 4)])
def test_the_cheapest_by_the_deadline_or_the_fastest_within_the_budget(deadline_s: float, budget: float, workers: int) -> None:
    found = choose(FOUND, deadline_s=deadline_s, budget=budget)
    assert found is not None and found.workers == workers


def test_no_choice_keeps_an_impossible_deadline() -> None:
    assert choose(FOUND, deadline_s=10.0) is None
    assert choose(FOUND, deadline_s=25.0, budget=1.5) is None
