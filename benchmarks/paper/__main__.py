"""The paper's Figure 1 and Table 2, and what goes past them.

    python -m benchmarks.paper run an4-relu --source AN4 [--jobs 1 4 16] [--methods sgd online-ng] [--outers average sqrt-gain]
    python -m benchmarks.paper remedies an4-relu --source AN4 --jobs 16
    python -m benchmarks.paper clock an4-relu --source AN4
    python -m benchmarks.paper report [--page benchmarks/paper/RESULTS.md]

`run` first finds each method's learning rate, then runs every cell that benchmarks/paper/results does not have: it may be stopped
and started again.  Jobs are logical: one process runs them one after another, and the numbers are those of as many machines.
`clock` measures, on an otherwise idle machine, what one job of an outer iteration takes on a core of its own; `report` draws
the figures with that clock, as the paper did with its own, and writes the tables into the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper import clock, report
from benchmarks.paper.cells import JOBS, METHODS, OUTERS, REMEDIES, SEEDS, TASKS, Cell, grid, matrix
from benchmarks.paper.runs import best_rates, run_all


def main() -> None:
    options = _options()
    if options.command == "report":
        report.write(options.page)
        return
    methods, jobs, seeds = tuple(options.methods), tuple(options.jobs), tuple(options.seeds)
    if options.command == "clock":
        clock.measure(options.task, methods, best_rates(options.task, methods), options.work, options.source)
        return
    run_all(grid(options.task, methods), options.work, options.source)
    rates = best_rates(options.task, methods)
    if options.command == "remedies":
        run_all((Cell(options.task, "online-ng", remedy, num_jobs, seed, rates["online-ng"])
                 for seed in seeds for num_jobs in jobs if num_jobs > 1 for remedy in REMEDIES), options.work, options.source)
    else:
        run_all(matrix(options.task, rates, tuple(options.outers), jobs, seeds), options.work, options.source)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "remedies", "clock"):
        one = commands.add_parser(name)
        one.add_argument("task", choices=list(TASKS))
        one.add_argument("--source", default="", help="folder of the corpus, for an4")
        one.add_argument("--work", type=Path, default=Path("runs/paper").resolve(), help="prepared data and MLflow's store")
        one.add_argument("--methods", nargs="+", choices=list(METHODS), default=["sgd", "online-ng"])
        one.add_argument("--outers", nargs="+", choices=list(OUTERS), default=["average", "sqrt-gain"])
        one.add_argument("--jobs", type=int, nargs="+", default=list(JOBS))
        one.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    commands.add_parser("report").add_argument("--page", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
