"""How often a worker may be replaced."""

from __future__ import annotations

from ngsgd.cluster.restarts import Restarts


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_restarts_are_counted_by_worker_over_the_last_hour() -> None:
    clock = _Clock()
    restarts = Restarts(2, clock)
    assert restarts.allow(0, "x") and restarts.allow(1, "x")
    clock.now = 1800.0
    assert restarts.allow(0, "x")
    assert not restarts.allow(0, "killed by SIGKILL")
    assert [one.worker for one in restarts.news()] == [0]
    assert restarts.news() == []  # each is reported once
    clock.now = 3600.0  # the first one is an hour ago
    assert restarts.allow(0, "x")
    assert not restarts.allow(0, "x")
    assert restarts.allow(1, "x")


def test_minus_one_is_without_limit_and_zero_never() -> None:
    assert all(Restarts(-1).allow(0, "x") for _ in range(1000))
    assert not Restarts(0).allow(0, "x")
