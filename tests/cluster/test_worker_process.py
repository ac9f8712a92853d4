"""How often a worker process shows progress and checks for messages."""

from __future__ import annotations

import itertools

from ngsgd.cluster.worker_process import Checks


def checked(seconds: list[float], interval_s: float) -> list[int]:
    """Numbers of the minibatches of these durations after which the worker checks."""
    ends = [0.0, *itertools.accumulate(seconds)]
    now = ends[0]
    checks = Checks(interval_s, lambda: now)
    found = []
    for number, now in enumerate(ends[1:], 1):  # noqa: B007  read by the clock
        checks.num_left -= 1
        if not checks.num_left:
            checks.plan()
            found.append(number)
    return found


def test_short_minibatches_are_checked_at_the_interval() -> None:
    found = checked([0.015] * 100, 0.2)
    assert found[:5] == [1, 3, 7, 15, 28]
    assert set(itertools.starmap(lambda a, b: b - a, itertools.pairwise(found[4:]))) == {13}


def test_long_minibatches_are_all_checked() -> None:
    assert checked([0.3] * 5, 0.2) == [1, 2, 3, 4, 5]


def test_a_slower_worker_checks_more_often() -> None:
    found = checked([0.015] * 30 + [1.0] * 30, 0.2)
    # 13 minibatches were planned before the slow ones are known
    assert found[:6] == [1, 3, 7, 15, 28, 41]
    assert found[6:] == list(range(42, 61))
