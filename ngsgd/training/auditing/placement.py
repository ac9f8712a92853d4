"""Which worker repeats the jobs of which other worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def partners(hosts: Mapping[int, str]) -> dict[int, int]:
    """Assign another worker to each worker, on another machine where possible.

    Every worker is assigned once, so all repetitions of a round can run at the same time.

    Args:
        hosts: worker -> machine.
    """
    workers = sorted(hosts, key=lambda worker: (hosts[worker], worker))
    if len(workers) < 2:
        return {}
    # workers of a machine are neighbors, so a shift by the largest machine leaves every machine,
    # unless it has more than half of the workers
    shift = max(Counter(hosts.values()).values()) % len(workers) or 1
    return {worker: workers[(index + shift) % len(workers)] for index, worker in enumerate(workers)}
