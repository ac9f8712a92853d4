"""What a process that trains sets once, and how often it shows progress."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from ngsgd.cluster.process import configure_process, keep_freed_memory
from ngsgd.cluster.worker_process import Checks

# Five blocks of 20 MB, freed and taken again, as gradients are: 25,000 pages. The first few rounds
# find their places.
COUNT = """
import resource, sys, torch
from ngsgd.cluster.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    for block in [torch.empty(5_000_000) for _ in range(5)]:
        block.fill_(1.0)
for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", COUNT, how], check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_memory_that_is_freed_stays_with_the_process() -> None:
    if not keep_freed_memory():
        pytest.skip("not glibc: nothing is promised")
    # The number itself depends on the size of a page and on the allocator's thresholds. In a third
    # of the processes something small lies above the blocks, and glibc gives nothing back.
    given_back = max(page_faults("given back") for _ in range(6))
    assert page_faults("kept") < given_back / 2


def test_settling_takes_the_threads() -> None:
    before = torch.get_num_threads()
    try:
        configure_process(2)
        assert torch.get_num_threads() == 2
        configure_process(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


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
