"""The communication frontier: validation objective by the number of synchronizations of a run.

The rule was written before any run of the table. All lines see the same frames of `an4-relu` with
the same schedule, whose rate decays to a tenth. A line is an optimizer and an outer optimizer, as
their authors use them. Each number of jobs and of frames between two averagings has a learning
rate, the best by validation objective of seed 0. The sweep is that of benchmarks/track/rule.py,
with equally many runs for all. SEEDS are other seeds; the table has these alone. p is that of
Welch's test of the validation objectives against DiLoCo with as many jobs and synchronizations. The
baseline is the best mean of any single job of the optimizer track.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from scipy import stats

from benchmarks.paper import many_jobs
from benchmarks.paper.cells import DILOCO, FRONTIER, PERIOD_OUTERS, Cell
from benchmarks.paper.runs import Line, run_all
from benchmarks.track import rule
from benchmarks.track.entries import ENTRIES
from benchmarks.track.runs import Results

TASK = "an4-relu"
SEEDS = (1, 2, 3, 4, 5)
SWEEP_RUNS = 5
# frames of a job between two averagings
PERIODS = (8192, 2048, 512)
_HEAD = ("jobs", "synchronizations", "line", "rate", "validation objf", "from the best single job", "p against DiLoCo",
         "validation %WER", "test %WER")


def rate_of(line: str, num_jobs: int, frames: int, line_of: Callable[[Cell], Line]) -> float:
    """Return the best learning rate of a point; `line_of` returns the result of a run."""
    method, outer, first = FRONTIER[line]
    return many_jobs.swept(TASK, (method, PERIOD_OUTERS[outer, frames]), num_jobs, line_of, first, SWEEP_RUNS)


def measure(lines: list[str], num_jobs: int, frames: int, work: Path, source: str) -> None:
    """Run the sweep of these lines, then the seeds, without the runs that are stored."""
    for line in lines:
        rate = rate_of(line, num_jobs, frames, many_jobs.trained(TASK, work, source))
        run_all(_cells(line, num_jobs, frames, rate), work, source)


def _cells(line: str, num_jobs: int, frames: int, rate: float) -> Iterator[Cell]:
    method, outer, _ = FRONTIER[line]
    return (Cell(TASK, method, PERIOD_OUTERS[outer, frames], num_jobs, seed, rate) for seed in SEEDS)


def points(num_jobs: int) -> Iterator[dict[str, tuple[float, list[Line]]]]:
    """Yield, for each number of frames, the rate and results of each line with all seeds."""
    line_of = many_jobs.stored(TASK)
    for frames in PERIODS:
        found = {}
        for line in FRONTIER:
            try:
                rate = rate_of(line, num_jobs, frames, line_of)
                found[line] = rate, [line_of(cell) for cell in _cells(line, num_jobs, frames, rate)]
            except many_jobs.MissingRunError:
                continue
        yield found


def best_single_job() -> float:
    """Return the best mean validation objective of the track, of all entries and lengths."""
    losses = Results("an4").losses
    means = []
    for entry in ENTRIES:
        own = {key: loss for key, loss in losses.items() if key[:3] == (entry.settings, entry.schedule, entry.tail)}
        for setting in {key[:5] for key in own}:
            seeds = [own[*setting, seed] for seed in range(1, rule.NUM_SEEDS + 1) if (*setting, seed) in own]
            means += [statistics.fmean(seeds)] if len(seeds) == rule.NUM_SEEDS else []
    return -min(means)


def table(spread: many_jobs.Spread) -> str:
    """Return a row for each point whose seeds are complete, the best of a point first."""
    rows = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    baseline = best_single_job()
    for num_jobs in (4, 16, 64):
        for found in points(num_jobs):
            ordered = sorted(found.items(), key=lambda one: -_mean(one[1][1]))
            rivals = found[DILOCO][1] if DILOCO in found else []
            for line, (rate, lines) in ordered:
                p = _p_value(lines, rivals) if rivals and line != DILOCO else ""
                cells = (num_jobs, lines[0]["outer_iters"], line, f"{rate:g}", spread(lines, "valid_objf", 3),
                         f"{_mean(lines) - baseline:+.3f}", p,
                         spread(lines, "valid_wer_percent", 2), spread(lines, "wer_percent", 2))
                rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _mean(lines: list[Line]) -> float:
    return statistics.fmean(line["valid_objf"] for line in lines)


def _p_value(lines: list[Line], rivals: list[Line]) -> str:
    values, others = ([line["valid_objf"] for line in one] for one in (lines, rivals))
    p = float(stats.ttest_ind(values, others, equal_var=False).pvalue)
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
