"""Test tiers: what `make check`, `make test` and `make test-all` select, and how much CPU time a test may use.

A test without a tier marker runs in every tier.  With `--cpu-limit` it fails if it uses more than two seconds of CPU
time, unless it is the first that imports a large package.  CPU time, of the process and of the children it waited for,
does not depend on the load of the machine, unlike time by the clock.  It still depends on the processor, and on a busy
sibling hyperthread.  Before a test fails, a fixed computation is therefore timed under the same conditions; the limit
grows by the factor by which that is slower than on the machine that the limit was chosen on.
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
# `make check` leaves out the tests of slower files
_QUICK_S = 0.1
# pyproject.toml and CONTRIBUTING.md describe them
TIER_MARKERS = ("end_to_end", "slow", "faults", "services", "gpu")
# Seconds of a test that is not in the table of measured times
_DEFAULT_S = {"end_to_end": 15.0, "slow": 5.0, "faults": 3.0, "services": 8.0, "gpu": 0.1, "": 0.05}
_DURATIONS = Path(__file__).with_name("durations.csv")
# Files whose tests of one tier need less than this in total are not in the table
_SHORTEST_S = 1.0
# The first test of a process that needs a large package imports it; another one would, were it absent
_MANY_MODULES = 100
# CPU seconds of `_reference_work_s` on an AMD EPYC (Zen 4)
_REFERENCE_S = 0.08


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ngsgd")
    group.addoption("--cpu-limit", action="store_true", help=f"fail unmarked tests above {LIMIT_S:g} s of CPU time")
    group.addoption("--cpu-report", type=Path, metavar="FILE", help="append one JSON line per test: CPU and clock time")
    group.addoption("--part", type=_part, metavar="K/N", help="run the K-th of N parts of the test files (tests/parallel.py)")
    group.addoption("--quick", action="store_true",
                    help=f"one case of each test of the files whose tests take less than {_QUICK_S:g} s on average")


# last: tests that `-m` deselects have no weight
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        _keep_quick(config, items)
    part: tuple[int, int] | None = config.getoption("--part")
    if part is not None:
        _select_part(config, items, *part)


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
    """Keep the first case of each test function that is quick by the measured durations."""
    first = dict[str, pytest.Item]()
    for item in items:
        if _weight(item) <= _QUICK_S:
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _select_part(config: pytest.Config, items: list[pytest.Item], part: int, num_parts: int) -> None:
    """Keep the groups of one part; each part gets about the same expected time."""
    weights = defaultdict[str, float](float)
    for item in items:
        weights[_group(item)] += _weight(item)
    loads = [0.0] * num_parts
    part_of: dict[str, int] = {}
    for group in sorted(weights, key=lambda name: (-weights[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[group]
        part_of[group] = lightest + 1
    config.hook.pytest_deselected(items=[item for item in items if part_of[_group(item)] != part])
    items[:] = [item for item in items if part_of[_group(item)] == part]


def _group(item: pytest.Item) -> str:
    """The file, because its tests share fixtures, or the name of the mark `same_process`."""
    mark = item.get_closest_marker("same_process")
    return str(mark.args[0]) if mark is not None else item.nodeid.partition("::")[0]


def _weight(item: pytest.Item) -> float:
    """Return the expected seconds of a test: the measured mean of its file and tier, or a default."""
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


def _part(text: str) -> tuple[int, int]:
    part, _, num_parts = text.partition("/")
    return int(part), int(num_parts)


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
