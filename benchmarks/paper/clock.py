"""The paper's clock: what one job takes with a core of its own, times the number of outer iterations, plus the averaging."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.paper.cells import TASKS, Cell
from benchmarks.paper.runs import RESULTS
from ngsgd.files import read_json_lines

PATH = RESULTS / "clock.json"
_WARM_UP = 5   # outer iterations that are not counted


def seconds_per_job(task: str, method: str) -> float | None:
    """Median time of one job; None if it was not measured."""
    if not PATH.exists():
        return None
    seconds: float | None = json.loads(PATH.read_text(encoding="utf-8")).get(task, {}).get(method)
    return seconds


def measure(task: str, methods: tuple[str, ...], rates: dict[str, float], work: Path, source: str) -> None:
    """A short run of one job at a time and method, with nothing else to be done by the machine."""
    times = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    for method in methods:
        cell = Cell(task, method, "average", 1, 0, rates[method])
        folder = work / f"clock-{cell.key()}"
        shutil.rmtree(folder, ignore_errors=True)
        words = [f"data.source={source}"] if TASKS[task].needs_source else []
        subprocess.run([sys.executable, "-m", "launcher", "train", "--quiet", *cell.settings(), *words, "schedule.num_epochs=0.3",
                        f"output_dir={folder}", f"data.cache_dir={work / 'data'}", "tracking.kind=none"],
                       check=True, stdout=subprocess.DEVNULL)
        (events,) = folder.glob("*/events.jsonl")
        steps = [event for event in read_json_lines(events) if event["event"] == "outer_iteration"][_WARM_UP:]
        times.setdefault(task, {})[method] = round(statistics.median(step["jobs"][0]["seconds"] for step in steps), 4)
        shutil.rmtree(folder, ignore_errors=True)
        print(task, method, times[task][method], "s per job", flush=True)
    RESULTS.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
