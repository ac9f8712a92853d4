"""Test tiers: what `make check`, `make test` and `make test-all` select, and a report of CPU time.

A test without a tier marker runs in every tier. `make test` runs the first case of a test with many
cases. The report lists the tests that used most CPU time, of the process and of the children that
it waited for, and the unmarked ones that should be marked. It is never a verdict.

    python -m tests.tiers                    # the report of the last run of tests.parallel
    python -m tests.tiers --write            # tests/durations.csv from it
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The report lists unmarked tests above this, except those that import large packages.
_UNMARKED_S = 2.0
# `make test` runs the first case of a test with more cases than this
_MANY_CASES = 4
_LISTED = 15
LAST_RUN = Path(__file__).resolve().parent.parent / ".pytest_cache" / "cpu-times.jsonl"
# `make check` skips the tests of slower files
_QUICK_S = 0.1
# A test that waits for another process or thread gives up after so many seconds. It guards against
# hanging, on a slow and busy machine, too.
HANGS_S = 1500.0
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


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ngsgd")
    group.addoption("--cpu-report", type=Path, metavar="FILE", help="append one JSON line per test: CPU and clock time")
    group.addoption("--first-cases", action="store_true", help=f"the first case of each test with more than {_MANY_CASES} cases")
    group.addoption("--share", type=Path, metavar="FOLDER",
                    help="run test files that no other process with the same FOLDER has begun (tests/parallel.py)")
    group.addoption("--quick", action="store_true",
                    help=f"one case of each test of the files whose tests take less than {_QUICK_S:g} s on average")


# last: after `-m` has deselected tests
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        fast = [item for item in items if _weight(item) <= _QUICK_S]
        _keep(config, items, {cases[0] for cases in _cases(fast).values()})
    elif config.getoption("--first-cases"):
        # A test that expects a warning asserts it. Slow tests have complete runs, which report the
        # same faults.
        config.addinivalue_line("filterwarnings", "error::ngsgd.errors.NgsgdWarning")
        _keep(config, items, {item for cases in _cases(items).values()
                              for item in (cases[:1] if len(cases) > _MANY_CASES else cases)})


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With `--share` run one group of tests after the other that is still free, long ones first."""
    folder: Path | None = session.config.getoption("--share")
    if folder is None:
        return None
    if session.testsfailed:
        raise session.Interrupted("errors during collection")
    # in the same order in every process
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in session.items:
        mark = item.get_closest_marker("same_process")
        # tests of a file share fixtures
        groups[str(mark.args[0]) if mark else item.nodeid.partition("::")[0]].append(item)
    for number, items in enumerate(sorted(groups.values(),
                                          key=lambda group: -sum(map(_weight, group)))):
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            # another process was first
            continue
        _run(session, items)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append the times of a test with its fixtures to the file of `--cpu-report`."""
    began_s, clock_s, num_modules = _cpu_time_s(), time.monotonic(), len(sys.modules)
    try:
        return (yield)
    finally:
        path: Path | None = item.config.getoption("--cpu-report")
        if path is not None:
            line = {"test": item.nodeid, "cpu_s": round(_cpu_time_s() - began_s, 3),
                    "clock_s": round(time.monotonic() - clock_s, 3),
                    "marks": [name for name in TIER_MARKERS if item.get_closest_marker(name) is not None],
                    "imports": len(sys.modules) - num_modules > _MANY_MODULES}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _cases(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _run(session: pytest.Session, items: list[pytest.Item]) -> None:
    # no next test at the end: which one it is, is not known yet
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _weight(item: pytest.Item) -> float:
    tier = _longest_tier(name for name in TIER_MARKERS if item.get_closest_marker(name) is not None)
    return _durations().get((item.nodeid.partition("::")[0], tier), _DEFAULT_S[tier])


def _longest_tier(marks: Iterable[str]) -> str:
    return max(marks, key=lambda name: _DEFAULT_S[name], default="")


@functools.cache
def _durations() -> dict[tuple[str, str], float]:
    with _DURATIONS.open(newline="") as file:
        return {(row["file"], row["tier"]): float(row["mean_s"]) for row in csv.DictReader(file)}


def write_durations(report: Path) -> None:
    times = defaultdict[tuple[str, str], list[float]](list)
    for name, line in _last(report).items():
        times[name.partition("::")[0], _longest_tier(line["marks"])].append(line["clock_s"])
    with _DURATIONS.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("file", "tier", "mean_s"))
        table.writerows((name, tier, f"{sum(found) / len(found):.3g}")
                        for (name, tier), found in sorted(times.items()) if sum(found) > _SHORTEST_S)


def _cpu_time_s() -> float:
    """Return the CPU time of this process and of the children that ended and were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def summary(report: Path) -> str:
    """Return the tests that used most CPU time, from the lines that `--cpu-report` wrote."""
    last = _last(report)
    most = sorted(last.items(), key=lambda entry: -entry[1]["cpu_s"])
    unmarked = [(name, line) for name, line in most if line["cpu_s"] > _UNMARKED_S and not (line["marks"] or line["imports"])]
    lines = [f"CPU time: {sum(line['cpu_s'] for line in last.values()) / 60:.1f} min in {len(last)} tests; most in"]
    lines += [f"{line['cpu_s']:8.1f} s  {name}" for name, line in most[:_LISTED]]
    if unmarked:
        lines.append(f"unmarked tests above {_UNMARKED_S:g} s; shorten them or mark them slow:")
        lines += [f"{line['cpu_s']:8.1f} s  {name}" for name, line in unmarked]
    return "\n".join(lines)


def _last(report: Path) -> dict[str, dict[str, Any]]:
    return {line["test"]: line for line in map(json.loads, report.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Report the CPU time of tests.")
    parser.add_argument("report", type=Path, nargs="?", default=LAST_RUN, help="file of --cpu-report; default: the last run")
    parser.add_argument("--write", action="store_true", help="write tests/durations.csv from it")
    options = parser.parse_args()
    if not options.report.exists():
        parser.error(f"{options.report} does not exist; run the tests by `make test`, or give the file of --cpu-report.")
    if options.write:
        write_durations(options.report)
    else:
        print(summary(options.report))


if __name__ == "__main__":
    main()
