"""The paper's Figure 1 and Table 2, and extensions.

    python -m benchmarks.paper run an4-relu --source AN4 [--jobs 1 4 16] [--methods sgd online-ng]
    python -m benchmarks.paper remedies an4-relu --source AN4 --jobs 16
    python -m benchmarks.paper periods an4-relu --source AN4 --jobs 16
    python -m benchmarks.paper controls an4-relu --source AN4 --jobs 16
    python -m benchmarks.paper many-jobs an4-relu --source AN4 --jobs 1 16 32 --seeds 0 1 2 3 4
    python -m benchmarks.paper compression an4-relu --source AN4 --jobs 8
    python -m benchmarks.paper frontier --source AN4 --jobs 16
    python -m benchmarks.paper clock an4-relu --source AN4
    python -m benchmarks.paper report [--page benchmarks/paper/RESULTS.md]

`run` first searches each method's learning rate, then runs every cell that benchmarks/paper/results
does not have; it may be interrupted and repeated.  Jobs are simulated: one process runs them one
after another, bitwise identical to as many machines. `remedies` tries settings that may reduce the
loss of averaging over many jobs. `periods` tries other numbers of frames between two averagings,
`controls` synchronous baselines on as many machines: gradients summed at every step, and one of the
jobs alone. `many-jobs` gives every optimizer and outer optimizer its own learning rate for that
number of jobs. `compression` runs natural gradient with compressed deltas at the rates of
`many-jobs`. `frontier` compares lines by the number of synchronizations (frontier.py). `clock`
measures, on an idle machine, the time of one job of an outer iteration on a dedicated core.
`report` draws the figures with that clock, as the paper did, and writes the tables into the page.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.paper import clock, frontier, many_jobs, report
from benchmarks.paper.cells import (
    CONTROLS,
    FRONTIER,
    JOBS,
    MATRIX_METHODS,
    MATRIX_OUTERS,
    OUTERS,
    PERIODS,
    REMEDIES,
    SEEDS,
    SYNCHRONOUS,
    SYNCHRONOUS_RATES,
    TASKS,
    Cell,
    grid,
    matrix,
)
from benchmarks.paper.runs import best_rates, best_synchronous_rate, run_all


def main() -> None:
    options = _options()
    if options.command == "report":
        report.write(options.page, options.figures)
        return
    if options.command == "frontier":
        for frames, num_jobs in itertools.product(options.frames, options.jobs):
            frontier.measure(options.lines, num_jobs, frames, options.work, options.source)
        return
    methods = tuple(options.methods)
    if options.command == "clock":
        clock.measure(options.task, methods, best_rates(options.task, methods), options.work, options.source)
        return
    if options.command == "many-jobs":
        for num_jobs in options.jobs:
            many_jobs.measure(options.task, num_jobs, tuple(options.seeds), options.work, options.source)
        return
    if options.command == "compression":
        for num_jobs in options.jobs:
            many_jobs.measure_compression(options.task, num_jobs, tuple(options.seeds), options.work, options.source)
        return
    for cells in _wanted(options, methods):
        run_all(cells, options.work, options.source)


def _wanted(options: argparse.Namespace, methods: tuple[str, ...]) -> Iterator[Iterable[Cell]]:
    """Run in stages: a stage uses the rates of the one before it."""
    task, jobs = options.task, tuple(options.jobs)
    yield grid(task, methods)
    rates = best_rates(task, methods)
    if options.command == "run":
        yield matrix(task, rates, tuple(options.outers), jobs, tuple(options.seeds))
    elif options.command == "controls":
        yield from _controls(options, rates)
    else:
        variants = REMEDIES if options.command == "remedies" else PERIODS
        yield (Cell(task, "online-ng", variant, num_jobs, seed, rates["online-ng"])
               for seed, num_jobs, variant in itertools.product(options.seeds, jobs, variants) if num_jobs > 1)


def _controls(options: argparse.Namespace, rates: dict[str, float]) -> Iterator[Iterable[Cell]]:
    task, jobs = options.task, [num_jobs for num_jobs in options.jobs if num_jobs > 1]
    yield (Cell(task, method, control, num_jobs, seed, rate)
           for seed, num_jobs, control, (method, rate) in itertools.product(options.seeds, jobs, CONTROLS, rates.items()))
    for num_jobs, outer, method in itertools.product(jobs, SYNCHRONOUS, SYNCHRONOUS_RATES):
        tried = list(SYNCHRONOUS_RATES[method])
        yield [Cell(task, method, outer, num_jobs, 0, rate) for rate in tried]
        while (best := best_synchronous_rate(task, outer, num_jobs, method)) in (min(tried), max(tried)):
            tried.append(2 * best if best == max(tried) else best / 2)
            yield [Cell(task, method, outer, num_jobs, 0, tried[-1])]
        if best is not None:
            yield (Cell(task, method, outer, num_jobs, seed, best) for seed in options.seeds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "remedies", "periods", "controls", "clock", "many-jobs", "compression"):
        one = commands.add_parser(name)
        one.add_argument("task", choices=list(TASKS))
        one.add_argument("--source", default="", help="folder of the corpus, for an4")
        one.add_argument("--work", type=Path, default=Path("runs/paper").resolve(), help="prepared data and MLflow's store")
        one.add_argument("--methods", nargs="+", choices=MATRIX_METHODS, default=["sgd", "online-ng"])
        one.add_argument("--outers", nargs="+", choices=list(OUTERS), default=list(MATRIX_OUTERS))
        one.add_argument("--jobs", type=int, nargs="+", default=list(JOBS))
        one.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    one = commands.add_parser("frontier")
    one.add_argument("--source", required=True, help="folder of AN4")
    one.add_argument("--work", type=Path, default=Path("runs/paper").resolve(), help="prepared data and MLflow's store")
    one.add_argument("--lines", nargs="+", choices=list(FRONTIER), metavar="LINE", default=list(FRONTIER),
                     help=f"of {', '.join(FRONTIER)}")
    one.add_argument("--jobs", type=int, nargs="+", default=[16])
    one.add_argument("--frames", type=int, nargs="+", default=list(frontier.PERIODS), help="of a job between two averagings")
    one = commands.add_parser("report")
    one.add_argument("--page", type=Path, default=Path("benchmarks/paper/RESULTS.md"))
    one.add_argument("--figures", type=Path, default=Path("docs"), help="folder of the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
