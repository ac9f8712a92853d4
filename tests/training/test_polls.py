"""A worker polls at most every `poll_s`, and after the last minibatch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.worker import Polls, Worker
from tests.toy import Run, config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def polls_at(monkeypatch: pytest.MonkeyPatch, interval_s: float, minibatch_s: float, number: int) -> list[int]:
    """Minibatches after which it polls, of so many minibatches of one duration."""
    clock, found, following = Clock(), [], 0
    monkeypatch.setattr(time, "perf_counter", clock)
    polls = Polls(interval_s)
    for index in range(number):
        clock.now += minibatch_s
        if index >= following:
            found.append(index)
            following = index + polls.num_minibatches()
    return found


def test_polls_are_the_interval_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = polls_at(monkeypatch, 0.05, 0.004, 40)
    # 1, 2, 4, 8 and then 12 minibatches of 4 ms
    assert found == [0, 2, 6, 14, 26, 38]


@pytest.mark.parametrize(("interval_s", "minibatch_s"), [(0.05, 0.06), (0.0, 0.001)])
def test_slow_minibatches_and_no_interval_poll_every_time(interval_s: float, minibatch_s: float,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    assert polls_at(monkeypatch, interval_s, minibatch_s, 5) == [0, 1, 2, 3, 4]


def test_minibatches_that_become_slow_shorten_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    polls = Polls(0.05)
    strides: list[int] = []
    for minibatch_s in (0.001, 0.001, 0.001, 0.1, 0.1):
        clock.now += minibatch_s * (strides[-1] if strides else 1)
        strides.append(polls.num_minibatches())
    assert strides == [2, 4, 8, 1, 1]


@pytest.mark.parametrize("poll_s", [None, 1000.0])
def test_a_job_ends_where_it_is_asked_to(poll_s: float | None, tmp_path: Path) -> None:
    run = Run(tmp_path, config())
    worker = Worker(run.spec, 0)
    worker.poll_s = poll_s
    start = JobInit(LocalRef(worker.layout.flatten(worker.model.state_dict())))
    job = Job(0, 0, 1, (WorkItem(run.schedule.shard(0), 0, 0),), start, 0.01, 1.0)
    asked: list[int] = []

    def note() -> bool:
        asked.append(1)
        return False
    whole = worker.run(job, should_stop=note)
    # polls after 0, 2 and the last minibatch at least; otherwise after each
    assert len(asked) == whole.num_minibatches if poll_s is None else 2 <= len(asked) <= whole.num_minibatches
    part = worker.run(job, should_stop=lambda: True)
    assert part.num_minibatches == 1 and part.remainder
