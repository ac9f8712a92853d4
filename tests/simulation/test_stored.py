"""Runs in object storage under simulated faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.machines import Machine, Machines
from tests.simulation.stored import StoredTrial


@pytest.mark.parametrize("seed", [0, 3, 6, 9, 30453])
def test_no_living_process_loses_its_lease_and_readers_find_their_objects(seed: int, tmp_path: Path) -> None:
    trial = StoredTrial(seed, tmp_path / "machines")
    assert trial.run() == []
    # the last process, and those before it
    assert len(trial.fences) > 1
    assert trial.manifests


def test_processes_run_one_at_a_time_in_the_order_of_the_clock() -> None:
    machines, seen = Machines(limit_s=100.0), list[tuple[str, float]]()

    def work(name: str, seconds: float) -> None:
        for _ in range(2):
            machines.sleep(seconds)
            seen.append((name, machines.now))
    machines.start(Machine("one"), lambda: work("one", 2.0))
    machines.start(Machine("two"), lambda: work("two", 3.0))
    machines.run()
    assert seen == [("one", 2.0), ("two", 3.0), ("one", 4.0), ("two", 6.0)]
    assert machines.problems == []


def test_a_suspended_machine_continues_and_a_dead_one_does_not() -> None:
    machines, seen = Machines(limit_s=100.0), list[float]()
    suspended, dead = Machine("suspended"), Machine("dead")

    def work() -> None:
        machines.sleep(2.0)
        seen.append(machines.now)

    def disturb() -> None:
        suspended.suspended_until, dead.is_dead = 10.0, True
    for machine in (suspended, dead):
        machines.start(machine, work)
    machines.start(Machine("operator"), disturb)
    machines.run()
    assert seen == [10.0]
