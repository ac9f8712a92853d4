"""Many jobs from the start: every pair of an optimizer and an outer optimizer at its own rate.

The learning rate of a pair is the best by validation objf of seed 0, found with the sweep of the
optimizer track (benchmarks/track/rule.py). The pairs with the best objf then run with more seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.paper.cells import COMPRESSED, DIGITS_EPOCHS, Cell
from benchmarks.paper.runs import Line, known, run_all
from benchmarks.track import rule

# first effective learning rate of the sweep with gain 1; a job's rate is num_jobs / gain times this
INNERS = {"online-ng": 0.002, "online-ng-64": 0.002, "muon-plain": 0.008, "muon-64": 0.008,
          "muon-32": 0.004, "soap-plain": 0.0004}
OUTER_RULES = ("average", "sqrt-gain", "diloco", "nesterov 0.5", "gain 4, constant rate",
               "gain 4, a third of the rate")
NUM_BEST = 3
_HEAD = "| jobs | optimizer | outer optimizer | rate | seeds | validation objf | validation %WER | test %WER |"
Pair = tuple[str, str]
# writes one value of several seeds with so many digits
Spread = Callable[[list[Line], str, int], str]


class MissingRunError(Exception):
    """A run of the sweep has no result yet."""


def pairs(num_jobs: int) -> Iterator[Pair]:
    """Yield the optimizer and the outer optimizer of each pair; one job needs only the first."""
    return itertools.product(INNERS, OUTER_RULES if num_jobs > 1 else ("average",))


def swept(task: str, pair: Pair, num_jobs: int, line_of: Callable[[Cell], Line], first: float | None = None,
          max_runs: int = rule.MAX_SWEEP_RUNS) -> float:
    """Return the best learning rate of a pair; `line_of` returns the result of a run.

    The sweep begins with the rate `first`; default: that of the optimizer in `INNERS`.
    """
    inner, outer = pair

    def loss(rate: float) -> float:
        line = line_of(Cell(task, inner, outer, num_jobs, 0, float(f"{rate:.3g}")))
        return math.inf if "diverged" in line else -float(line["valid_objf"])
    return float(f"{rule.sweep(first or INNERS[inner], loss, max_runs):.3g}")


def trained(task: str, work: Path, source: str) -> Callable[[Cell], Line]:
    """Return a function that finds the result of a run, which it trains if it is not stored."""
    def line_of(cell: Cell) -> Line:
        run_all([cell], work, source)
        return stored(task)(cell)
    return line_of


def stored(task: str) -> Callable[[Cell], Line]:
    """Return a function that finds the result of a run; it raises MissingRunError without one."""
    lines = known(task)

    def line_of(cell: Cell) -> Line:
        line = lines.get(cell.key())
        if line is None:
            raise MissingRunError
        return line
    return line_of


def best_rate(task: str, pair: Pair, num_jobs: int, line_of: Callable[[Cell], Line]) -> float | None:
    """Return the best rate of a pair; None if its sweep is not complete."""
    try:
        return swept(task, pair, num_jobs, line_of)
    except MissingRunError:
        return None


def best_pairs(task: str, num_jobs: int) -> list[tuple[Pair, float]]:
    """Return the pairs with a complete sweep and their rates, the best objf first."""
    line_of = stored(task)
    rates = {pair: rate for pair in pairs(num_jobs) if (rate := best_rate(task, pair, num_jobs, line_of))}
    lines = {pair: line_of(Cell(task, *pair, num_jobs, 0, rate)) for pair, rate in rates.items()}
    finished = [pair for pair in rates if "diverged" not in lines[pair]]
    return [(pair, rates[pair]) for pair in sorted(finished, key=lambda pair: -lines[pair]["valid_objf"])]


def measure(task: str, num_jobs: int, seeds: tuple[int, ...], work: Path, source: str) -> None:
    """Run the sweeps that are missing, and the best pairs with all seeds."""
    for pair in pairs(num_jobs):
        swept(task, pair, num_jobs, trained(task, work, source))
    for pair, rate in best_pairs(task, num_jobs)[:NUM_BEST]:
        run_all((Cell(task, *pair, num_jobs, seed, rate) for seed in seeds), work, source)


def measure_compression(task: str, num_jobs: int, seeds: tuple[int, ...], work: Path, source: str) -> None:
    """Run natural gradient with and without compression at the best rate without it."""
    for outer in ("average", "nesterov 0.5"):
        rate = swept(task, ("online-ng", outer), num_jobs, trained(task, work, source))
        names = (outer, *(name for name in COMPRESSED if name.startswith(f"{outer}, ")))
        run_all((Cell(task, "online-ng", name, num_jobs, seed, rate) for seed in seeds for name in names), work, source)


def all_runs(task: str, spread: Spread) -> str:
    """Return a row for each setting, with any learning rate; the best objf first."""
    return "\n".join([_HEAD, "|---" * 8 + "|", *_run_rows(task, spread)])


def by_epochs(spread: Spread) -> str:
    """Return the rows of all numbers of epochs on digits."""
    rows = [f"| {epochs} {row}" for task, epochs in DIGITS_EPOCHS.items() for row in _run_rows(task, spread)]
    return "\n".join([f"| epochs {_HEAD}", "|---" * 9 + "|", *rows])


def _run_rows(task: str, spread: Spread) -> list[str]:
    groups: dict[tuple[int, str, str, float], list[Line]] = {}
    for line in known(task).values():
        if "diverged" not in line:
            groups.setdefault((line["num_jobs"], line["method"], line["outer"], line["rate"]), []).append(line)
    return [_row(*setting[:3], f"{setting[3]:g}", lines, spread)
            for setting, lines in sorted(groups.items(), key=lambda one: (one[0][0], -_mean_objf(one[1])))]


def _mean_objf(lines: list[Line]) -> float:
    return statistics.fmean(line["valid_objf"] for line in lines)


def best_so_far(lines: list[Line], pair: Pair, num_jobs: int) -> float | None:
    """Return the best rate of a pair among the runs of seed 0; None without one."""
    own = [line for line in lines if (line["method"], line["outer"]) == pair and line["num_jobs"] == num_jobs
           and line["seed"] == 0 and "diverged" not in line]
    return max(own, key=lambda line: line["valid_objf"])["rate"] if own else None


def _row(num_jobs: int, inner: str, outer: str, rate: str, lines: list[Line], spread: Spread) -> str:
    return (f"| {num_jobs} | {inner} | {outer} | {rate} | {len(lines)} | {spread(lines, 'valid_objf', 3)} | "
            f"{spread(lines, 'valid_wer_percent', 2)} | {spread(lines, 'wer_percent', 2)} |")


def table(task: str, spread: Spread) -> str:
    """Return a row per pair and number of jobs; `spread` writes the values of several seeds.

    A star marks the best rate of a sweep that is not complete.
    """
    rows = [_HEAD, "|---" * 8 + "|"]
    lines = list(known(task).values())
    for num_jobs in sorted({line["num_jobs"] for line in lines} & {1, 16, 32}):
        complete = dict(best_pairs(task, num_jobs))
        found = {pair: complete.get(pair) or best_so_far(lines, pair, num_jobs) for pair in pairs(num_jobs)}
        group = {pair: [line for line in lines if (line["method"], line["outer"], line["num_jobs"], line["rate"])
                        == (*pair, num_jobs, rate)] for pair, rate in found.items() if rate}
        for pair in sorted(group, key=lambda pair: -_mean_objf(group[pair])):
            mark = "" if pair in complete else "*"
            rows.append(_row(num_jobs, *pair, f"{found[pair]:g}{mark}", group[pair], spread))
    return "\n".join(rows) if len(rows) > 2 else "Not run yet."
