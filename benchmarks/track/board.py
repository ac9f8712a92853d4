"""The tables of the track, from its results."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.report import between
from benchmarks.track import rule
from benchmarks.track.cost import COSTS
from benchmarks.track.entries import ENTRIES
from benchmarks.track.runs import Key, Results, key_of
from benchmarks.track.tasks import MINIBATCH, TASKS
from benchmarks.track.training import Entry

# the best Muon: other entries are relative to it
_BASE = "muon-momentum-8"


class _MissingRunError(Exception):
    pass


@dataclass(frozen=True)
class Standing:
    """The result of an entry in a task."""

    rate: float
    # the shortest length that counts; None: none does
    steps: int | None
    # of that length, else the one with the best mean
    shown_steps: int
    losses: tuple[float, ...]
    z: float
    num_runs: int


def standing(name: str, entry: Entry, results: Results) -> Standing | None:
    """Apply the rule to the runs of an entry; None if it needs more runs."""
    used = set[Key]()
    task = TASKS[name]

    def loss(rate: float, steps: int, seed: int) -> float:
        key = key_of(entry, rate, steps, seed)
        if key not in results.losses:
            raise _MissingRunError
        used.add(key)
        return results.losses[key]

    try:
        rate = rule.sweep(entry.rate, lambda rate: loss(rate, rule.SWEEP_STEPS, 0))
        steps = rule.shortest(lambda steps: rule.counts(lambda seed: loss(rate, steps, seed), task.target, task.sigma))
    except _MissingRunError:
        return None
    by_length = {length: _losses(entry, rate, length, results) for length in rule.LENGTHS}
    tried = {length: losses for length, losses in by_length.items() if len(losses) >= rule.MIN_SEEDS}
    shown = steps or min(tried, key=lambda length: statistics.fmean(tried[length]))
    return Standing(rate, steps, shown, tried[shown], rule.z_of(tried[shown], task.target, task.sigma), len(used))


def _losses(entry: Entry, rate: float, steps: int, results: Results) -> tuple[float, ...]:
    keys = (key_of(entry, rate, steps, seed) for seed in range(1, rule.NUM_SEEDS + 1))
    return tuple(results.losses[key] for key in keys if key in results.losses)


def write(page: Path) -> None:
    """Write the table of each task and the summary between their markers in the page."""
    text = page.read_text(encoding="utf-8")
    results = {name: Results(name) for name in TASKS}
    found = {name: {entry.name: standing(name, entry, results[name]) for entry in ENTRIES} for name in TASKS}
    costs = json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.exists() else {}
    text = between(text, "track", _summary(found, costs))
    for name in TASKS:
        text = between(text, f"track {name}", _table(name, found[name]))
    page.write_text(text, encoding="utf-8")


def _summary(found: dict[str, dict[str, Standing | None]], costs: dict[str, float]) -> str:
    """One row for each entry, ordered by the mean number of frames relative to the best Muon."""
    rows = []
    for entry in ENTRIES:
        standings = [found[name][entry.name] for name in TASKS]
        if all(one is None for one in standings):
            continue
        ratios = [_ratio(one, found[name][_BASE]) for name, one in zip(TASKS, standings, strict=True)]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if all(map(math.isfinite, ratios)) else math.inf
        cost = costs.get(entry.name)
        cells = [entry.name, *(_shown(one, ratio) for one, ratio in zip(standings, ratios, strict=True)),
                 f"{mean:.2f}" if math.isfinite(mean) else "", f"{cost:.2f}" if cost else "",
                 f"{mean * cost / costs[_BASE]:.2f}" if cost and math.isfinite(mean) and _BASE in costs else "", entry.about]
        rows.append((mean, f"| {' | '.join(cells)} |"))
    of_tasks = " | ".join(f"{name}: frames" for name in TASKS)
    head = [f"| entry | {of_tasks} | frames, relative | step / SGD | time, relative | notes |",
            "|---" * (len(TASKS) + 5) + "|"]
    return "\n".join([*head, *(row for _, row in sorted(rows, key=lambda one: one[0]))])


def _ratio(one: Standing | None, base: Standing | None) -> float:
    if one is None or base is None or one.steps is None or base.steps is None:
        return math.inf
    return one.steps / base.steps


def _shown(one: Standing | None, ratio: float) -> str:
    if one is None:
        return "not run"
    if one.steps is None:
        return "not reached"
    return f"{_frames(one.steps)} ({ratio:.2f})" if math.isfinite(ratio) else _frames(one.steps)


def _frames(steps: int) -> str:
    return f"{steps * MINIBATCH / 1000:.0f} k"


def _table(name: str, found: dict[str, Standing | None]) -> str:
    """Learning rate, seeds, z and its probability of each entry of a task."""
    rows = ["| entry | schedule | rate | minibatches | seeds | validation loss | z | p | runs |", "|---" * 9 + "|"]
    shown = [(entry, one) for entry in ENTRIES if (one := found[entry.name]) is not None]
    for entry, one in sorted(shown, key=lambda pair: pair[1].steps or math.inf):
        mean = statistics.fmean(one.losses)
        spread = f"{mean:.4f} ({min(one.losses):.4f} to {max(one.losses):.4f})" if math.isfinite(mean) else "diverged"
        steps = f"{one.steps}" if one.steps else f"none; best: {one.shown_steps}"
        rows.append(f"| {entry.name} | {entry.schedule} | {one.rate:.3g} | {steps} | {len(one.losses)} | {spread} | {one.z:.2f} | "
                    f"{rule.p_value(one.z):.1g} | {one.num_runs} |")
    return "\n".join(rows)
