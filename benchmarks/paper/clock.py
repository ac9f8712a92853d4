"""The simulated clock of the paper: the time of a job on a dedicated core, times the number of
outer iterations, plus averaging.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.paper.cells import Cell
from benchmarks.paper.runs import RESULTS, outer_iterations, trained
from ngsgd.errors import DivergenceError
from ngsgd.files import read_json_lines

PATH = RESULTS / "clock.json"
_WARM_UP = 5   # outer iterations that are skipped


def seconds_per_job(task: str, method: str) -> float | None:
    """Median time of one job; None if it was not measured."""
    if not PATH.exists():
        return None
    seconds: float | None = json.loads(PATH.read_text(encoding="utf-8")).get(task, {}).get(method)
    return seconds


def measure(task: str, methods: tuple[str, ...], rates: dict[str, float], work: Path, source: str) -> None:
    """A short run of one job at a time for a method, on an idle machine."""
    times = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    for method in methods:
        cell = Cell(task, method, "average", 1, 0, rates[method])
        with trained(cell, work, source, "tracking.kind=none", "schedule.num_epochs=0.3") as events:
            if events is None:
                raise DivergenceError(f"{cell} diverged; its clock cannot be read.")
            steps = outer_iterations(read_json_lines(events))[_WARM_UP:]
        times.setdefault(task, {})[method] = round(statistics.median(step["jobs"][0]["seconds"] for step in steps), 4)
        print(task, method, times[task][method], "s per job", flush=True)
    RESULTS.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
