"""The clock that skips the time in which this process was stopped."""

from __future__ import annotations

import pytest

from ngsgd.training.worker_wait import AwakeClock


class _Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_count_and_absences_count_as_the_longest_step() -> None:
    time = _Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    for step_s in (0.2, 1.0, 0.3):
        time.now += step_s
        assert clock.tick() == 0.0
    assert clock.now == pytest.approx(1.5)
    time.now += 60.0
    assert clock.tick() == 59.0
    assert clock.now == pytest.approx(2.5)
    time.now += 0.5
    assert clock.tick() == 0.0
    assert clock.now == pytest.approx(3.0)


def test_other_work_of_this_process_counts() -> None:
    time = _Time()
    clock = AwakeClock(time, longest_step_s=1.0)
    time.now += 10.0
    clock.catch_up()
    assert clock.now == 10.0
    assert clock.tick() == 0.0
