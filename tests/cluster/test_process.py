"""What a process that trains sets once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ngsgd.cluster.process import configure_process, keep_freed_memory

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
