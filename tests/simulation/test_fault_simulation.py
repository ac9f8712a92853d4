"""Seeds of the fault simulation repeat, its disk keeps synced data, and a slice of seeds passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ngsgd.errors import EXIT_INTERRUPTED
from tests.simulation import __main__ as simulation
from tests.simulation import campaign
from tests.simulation.campaign import Simulator, simulator
from tests.simulation.disk import SimulatedDisk
from tests.simulation.durability import KINDS
from tests.simulation.world import Fault, Killed, World
from tests.tiers import HANGS_S


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulator]:
    with simulator() as one:
        yield one


def test_a_few_seeds_have_no_problem(simulated: Simulator) -> None:
    for seed in range(12):
        verdict = simulated.run(seed)
        assert not verdict.problems, verdict.replay()


@pytest.mark.parametrize("seed", [5001354, 5003427, 5003981, 6007057, 6018355, 7006250, 8002784, 8024639, 9005078,
                                  10036492, 156, 308, 413, 863, 969, 20336])
def test_seeds_that_failed_once_have_no_problem(simulated: Simulator, seed: int) -> None:
    verdict = simulated.run(seed)
    assert not verdict.problems, verdict.replay()


@pytest.mark.parametrize(("seed", "what"), [(219, "continued job"), (168, "torn snapshot"), (15, "kept result"), (15, "link"),
                                            (33, "late site"), (50, "damaged delta")])
def test_seeds_reach_the_parts_of_the_system(simulated: Simulator, seed: int, what: str) -> None:
    verdict = simulated.run(seed)
    assert not verdict.problems, verdict.replay()
    assert what in {fault for fault, _ in verdict.covered}


def test_a_seed_has_the_same_trace_twice(simulated: Simulator) -> None:
    for seed in range(100, 102):
        first, second = simulated.run(seed, with_lines=True), simulated.run(seed, with_lines=True)
        assert first.lines == second.lines
        assert first.trace == second.trace


def test_seeds_differ_and_faults_occur(simulated: Simulator) -> None:
    verdicts = [simulated.run(seed) for seed in range(20, 24)]
    assert len({verdict.trace for verdict in verdicts}) == len(verdicts)
    assert sum(verdict.num_occurred for verdict in verdicts) > 0
    assert sum(verdict.num_processes for verdict in verdicts) > len(verdicts)


def test_some_of_the_faults_of_a_seed_can_occur(simulated: Simulator) -> None:
    everything = simulated.run(20)
    nothing = simulated.run(20, kept=[])
    assert everything.faults == nothing.faults
    assert nothing.num_occurred == 0
    assert nothing.num_processes == 1
    assert "--only-faults none" in nothing.replay()


def test_traces_do_not_depend_on_earlier_seeds(simulated: Simulator) -> None:
    first = simulated.run(21).trace
    with simulator() as another:
        another.run(22)
        assert another.run(21).trace == first


@pytest.mark.slow
def test_traces_do_not_depend_on_the_process(simulated: Simulator) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seed", "21", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert simulated.run(21).trace in done.stdout


@pytest.fixture
def disk(tmp_path: Path) -> SimulatedDisk:
    return SimulatedDisk(tmp_path / "disk")


def _begin(disk: SimulatedDisk, *faults: Fault) -> Path:
    disk.begin(World(faults), records=True, has_locks=True)
    return Path(disk.root)


@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_keeps_what_was_synced(disk: SimulatedDisk, kind: str) -> None:
    with disk.installed():
        root = _begin(disk)
        for name in ("synced", "not-synced"):
            (root / name).write_text(name)
        for path in (root / "synced", root):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        disk.cut_power(kind)
        assert (root / "synced").read_text() == "synced"
        assert (root / "not-synced").read_bytes() != b"not-synced"


def test_nothing_reaches_the_disk_of_a_dead_process(disk: SimulatedDisk) -> None:
    with disk.installed():
        root = _begin(disk, Fault("operation", 2, "kill"))
        (root / "before").write_text("x")
        with pytest.raises(Killed):
            (root / "after").write_text("x")
        with pytest.raises(Killed):
            (root / "before").unlink()
        assert [path.name for path in root.iterdir()] == ["before"]


def test_a_full_disk_refuses_data_and_allows_removals(disk: SimulatedDisk) -> None:
    with disk.installed():
        root = _begin(disk, Fault("operation", 2, "full", 5.0))
        (root / "one").write_text("x")
        with pytest.raises(OSError, match="No space"):
            (root / "two").write_text("x")
        (root / "one").unlink()
        assert not list(root.iterdir())


def test_files_outside_are_not_touched(disk: SimulatedDisk, tmp_path: Path) -> None:
    with disk.installed():
        _begin(disk, Fault("operation", 0, "EIO"))
        (tmp_path / "outside").write_text("x")
        assert (tmp_path / "outside").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_fault_simulation_after_the_seed(number: signal.Signals, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    def run(self: campaign.Simulator, seed: int) -> campaign.Verdict:
        if seed == 2:
            signal.raise_signal(number)
        return campaign.Verdict(seed, (), (), (), "")

    monkeypatch.setattr(campaign.Simulator, "run", run)
    before = signal.getsignal(number)
    assert simulation.main(["--json"]) == EXIT_INTERRUPTED
    assert json.loads(capsys.readouterr().out)["num_seeds"] == 3
    assert signal.getsignal(number) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_stops_after_their_seeds(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seconds", "600", "--processes", "2", "--json"]
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                                   env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + HANGS_S
        # multiprocessing's resource tracker and the first of two processes
        while len(psutil.Process(process.pid).children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, number)
        assert process.wait(timeout=HANGS_S) == EXIT_INTERRUPTED, log.read_text()
    assert json.loads(log.read_text())["failed"] == []


@pytest.mark.slow
def test_a_minute_of_seeds_has_no_problem() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--first-seed", "200", "--seconds", "60", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    tally = json.loads(done.stdout)
    assert tally["num_seeds"] > 0
    assert tally["failed"] == [], done.stderr


def test_a_campaign_reports_the_phases_of_faults(simulated: Simulator) -> None:
    tally = simulation.Tally()
    for seed in range(20, 23):
        tally.add(simulated.run(seed))
    assert {pair.partition(", ")[2] for pair in tally.covered} > {"jobs run", "commits"}
