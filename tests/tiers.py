"""Test tiers: what `make check`, `make test` and `make test-all` select, and how much CPU time a
test may use.

A test without a tier marker runs in every tier. With `--cpu-limit` it fails if it uses more than
two seconds of CPU time, unless it is the first that imports a large package. CPU time, of the
process and of the children it waited for, does not depend on the load of the machine, unlike time
by the clock. It still depends on the processor, and on a busy sibling hyperthread. Before a test
fails, a fixed computation is therefore timed under the same conditions; the limit grows by the
factor by which that is slower than on the machine that the limit was chosen on.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 2.0
# `make check` skips the tests of slower files
_QUICK_S = 0.1
# pyproject.toml and CONTRIBUTING.md describe them
TIER_MARKERS = ("end_to_end", "slow", "faults", "services", "gpu")
# Seconds of a test that is not in the table of measured times
_DEFAULT_S = {"end_to_end": 15.0, "slow": 5.0, "faults": 3.0, "services": 8.0, "gpu": 0.1, "": 0.05}
_DURATIONS = Path(__file__).with_name("durations.csv")
# Files whose tests of one tier need less than this in total are not in the table
_SHORTEST_S = 1.0
# The first test of a process that needs a large package imports it; another one would, were it
# absent
_MANY_MODULES = 100
# CPU seconds of `_reference_work_s` on an AMD EPYC (Zen 4)
_REFERENCE_S = 0.08


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ngsgd")
    group.addoption("--cpu-limit", action="store_true", help=f"fail unmarked tests above {LIMIT_S:g} s of CPU time")
    group.addoption("--cpu-report", type=Path, metavar="FILE", help="append one JSON line per test: CPU and clock time")
    group.addoption("--share", type=Path, metavar="FOLDER",
                    help="run test files that no other process with the same FOLDER has begun (tests/parallel.py)")
    group.addoption("--quick", action="store_true",
                    help=f"one case of each test of the files whose tests take less than {_QUICK_S:g} s on average")


# last: after `-m` has deselected tests
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        _keep_quick(config, items)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With `--share` run one group of tests after the other that is still free, those that take
    longest first.
    """
    folder: Path | None = session.config.getoption("--share")
    if folder is None:
        return None
    if session.testsfailed:
        raise session.Interrupted("errors during collection")
    for number, items in enumerate(_groups(session.items)):
        if _is_mine(folder / str(number)):
            _run(session, items)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began_s, clock_s, num_modules = _cpu_time_s(), time.monotonic(), len(sys.modules)
    try:
        yield
    finally:
        used_s = _cpu_time_s() - began_s
        _report(item, used_s, time.monotonic() - clock_s)
    may_take_longer = _has_tier(item) or len(sys.modules) - num_modules > _MANY_MODULES
    if item.config.getoption("--cpu-limit") and used_s > LIMIT_S and not may_take_longer:
        allowed_s = LIMIT_S * max(1.0, _reference_work_s() / _REFERENCE_S)
        if used_s > allowed_s:
            pytest.fail(f"{used_s:.1f} s of CPU time; a test without a tier marker may use {allowed_s:.1f} s. "
                        "Make it shorter, or mark it slow.", pytrace=False)


def _keep_quick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of each test function that is fast by the measured durations."""
    first = dict[str, pytest.Item]()
    for item in items:
        if _weight(item) <= _QUICK_S:
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _groups(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests by group, in the same order in every process."""
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        groups[_group(item)].append(item)
    return sorted(groups.values(), key=lambda group: -sum(map(_weight, group)))


def _is_mine(mark: Path) -> bool:
    """Whether no other process was first to make this file."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _run(session: pytest.Session, items: list[pytest.Item]) -> None:
    # no next test at the end: which one it is, is not known yet
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _group(item: pytest.Item) -> str:
    """The file, because its tests share fixtures, or the name of the mark `same_process`."""
    mark = item.get_closest_marker("same_process")
    return str(mark.args[0]) if mark is not None else item.nodeid.partition("::")[0]


def _weight(item: pytest.Item) -> float:
    """Return the expected seconds of a test: the measured mean of its file and tier, or a default.
    """
    tier = _longest_tier(name for name in TIER_MARKERS if item.get_closest_marker(name) is not None)
    return _durations().get((item.nodeid.partition("::")[0], tier), _DEFAULT_S[tier])


def _longest_tier(marks: Iterable[str]) -> str:
    return max(marks, key=lambda name: _DEFAULT_S[name], default="")


@functools.cache
def _durations() -> dict[tuple[str, str], float]:
    with _DURATIONS.open(newline="") as file:
        return {(row["file"], row["tier"]): float(row["mean_s"]) for row in csv.DictReader(file)}


def write_durations(report: Path) -> None:
    """Write the table of mean times from the lines that `--cpu-report` wrote."""
    last = {line["test"]: line for line in map(json.loads, report.read_text().splitlines())}
    times = defaultdict[tuple[str, str], list[float]](list)
    for name, line in last.items():
        times[name.partition("::")[0], _longest_tier(line["marks"])].append(line["clock_s"])
    with _DURATIONS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("file", "tier", "mean_s"))
        table.writerows((name, tier, f"{sum(found) / len(found):.3g}")
                        for (name, tier), found in sorted(times.items()) if sum(found) > _SHORTEST_S)


def _has_tier(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in TIER_MARKERS)


def _report(item: pytest.Item, cpu_s: float, clock_s: float) -> None:
    path: Path | None = item.config.getoption("--cpu-report")
    if path is not None:
        line = {"test": item.nodeid, "cpu_s": round(cpu_s, 3), "clock_s": round(clock_s, 3),
                "marks": [name for name in TIER_MARKERS if item.get_closest_marker(name) is not None]}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _cpu_time_s() -> float:
    """Return the CPU time of this process and of the children that ended and were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _reference_work_s() -> float:
    """Return the CPU time of a fixed amount of interpreter work, the shortest of three."""
    found = []
    for _ in range(3):
        began_s = time.process_time()
        sum(number * number % 7 for number in range(1_000_000))
        found.append(time.process_time() - began_s)
    return min(found)


if __name__ == "__main__":
    write_durations(Path(sys.argv[1]))
