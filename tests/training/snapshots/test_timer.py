"""Times of snapshots: an interval, a maximum cost, and recovery from one slow copy."""

from __future__ import annotations

import pytest

from ngsgd.training.snapshots.job_snapshots import SnapshotTimer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def seconds_to_snapshot(timer: SnapshotTimer, clock: Clock) -> float:
    began = clock.now
    while not timer.is_due():
        clock.now += 0.25
    return clock.now - began


def test_fast_snapshots_keep_the_interval() -> None:
    clock = Clock()
    timer = SnapshotTimer(5.0, 0.01, clock, clock)
    timer.begin(1_000_000)
    assert seconds_to_snapshot(timer, clock) == 5.0
    timer.taken(1_000_000, 0.01)
    assert seconds_to_snapshot(timer, clock) == 5.0


def test_slow_snapshots_keep_the_cost() -> None:
    clock = Clock()
    timer = SnapshotTimer(5.0, 0.01, clock, clock)
    timer.begin(1_000_000)
    timer.taken(1_000_000_000, 2.0)
    assert seconds_to_snapshot(timer, clock) == pytest.approx(200.0)
    # a new job of the same size waits as long
    timer.begin(1_000_000)
    assert seconds_to_snapshot(timer, clock) == pytest.approx(200.0)


def test_one_slow_copy_does_not_end_the_snapshots_of_short_jobs() -> None:
    clock = Clock()
    timer = SnapshotTimer(5.0, 0.01, clock, clock)
    timer.begin(1_000_000)
    timer.taken(1_000_000, 10.0)
    for _ in range(10):
        timer.begin(1_000_000)
    assert seconds_to_snapshot(timer, clock) == 5.0


def test_waiting_for_a_core_is_no_cost() -> None:
    clock, work_clock = Clock(), Clock()
    timer = SnapshotTimer(5.0, 0.01, clock, work_clock)
    timer.begin(1_000_000)
    # two seconds of work in ten seconds
    clock.now, work_clock.now = 10.0, 2.0
    assert timer.is_due()
    timer.taken(1_000_000, 0.03)
    clock.now, work_clock.now = 20.0, 4.0
    assert not timer.is_due()
    clock.now, work_clock.now = 21.0, 5.0
    assert timer.is_due()
