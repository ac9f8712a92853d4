"""Runs of the entries of a task, one line of JSON each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.paper.runs import commit
from benchmarks.track import rule
from benchmarks.track.tasks import TASKS, LoadedTask
from benchmarks.track.training import Entry, train
from ngsgd.files import read_json_lines

RESULTS = Path(__file__).parent / "results"

# what identifies a run
Key = tuple[tuple[str, ...], str, float, float, int, int]


def key_of(entry: Entry, rate: float, steps: int, seed: int) -> Key:
    return entry.settings, entry.schedule, entry.tail, float(f"{rate:.6g}"), steps, seed


class Results:
    """The losses of the runs of a task so far; infinite for runs that diverged."""

    def __init__(self, task: str) -> None:
        self.path = RESULTS / f"{task}.jsonl"
        lines = read_json_lines(self.path) if self.path.exists() else []
        self.losses: dict[Key, float] = {
            (tuple(line["settings"]), line["schedule"], line.get("tail", 0.0), line["rate"], line["steps"], line["seed"]):
                math.inf if line["valid_loss"] is None else line["valid_loss"] for line in lines}

    def add(self, key: Key, name: str, loss: float, seconds: float) -> None:
        """Append a run to the file."""
        settings, schedule, tail, rate, steps, seed = key
        line: dict[str, Any] = {"entry": name, "settings": settings, "schedule": schedule, "tail": tail, "rate": rate,
                                "steps": steps, "seed": seed, "valid_loss": round(loss, 5) if math.isfinite(loss) else None,
                                "cpu_s": round(seconds, 1), "commit": commit()}
        self.losses[key] = loss
        print(json.dumps(line), flush=True)
        RESULTS.mkdir(exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Track:
    """Entries of one task."""

    def __init__(self, name: str, cache: Path, source: str) -> None:
        self.target, self.sigma = TASKS[name].target, TASKS[name].sigma
        self.data = LoadedTask(name, cache, source)
        self.results = Results(name)

    def loss(self, entry: Entry, rate: float, steps: int, seed: int) -> float:
        """Return the loss of a run from the file, or train."""
        key = key_of(entry, rate, steps, seed)
        if key not in self.results.losses:
            self.results.add(key, entry.name, *train(self.data, entry, key[3], steps, seed))
        return self.results.losses[key]

    def measure(self, entry: Entry) -> None:
        """Sweep the learning rate, and search the shortest length that counts."""
        rate = rule.sweep(entry.rate, lambda rate: self.loss(entry, rate, rule.SWEEP_STEPS, 0))
        steps = rule.shortest(lambda steps: rule.counts(lambda seed: self.loss(entry, rate, steps, seed), self.target, self.sigma))
        print(entry.name, "rate", f"{rate:.4g}", "minibatches", steps, flush=True)
