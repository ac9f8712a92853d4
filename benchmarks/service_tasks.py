"""Optimizers and averaging rules of `ngsgd.train` by number of jobs.

    python -m benchmarks.service_tasks sweep RESULTS.jsonl [--tasks images] [--num-jobs 1 4]
    python -m benchmarks.service_tasks run RESULTS.jsonl --tasks images --optimizers ngsgd \
        --rules bmuf --num-jobs 4 --lr 0.016
    python -m benchmarks.service_tasks table RESULTS.jsonl

The tasks are a character language model and images of digits.  `sweep` searches for each cell
(task, optimizer, rule, number of jobs) the effective learning rate with the lowest test
cross-entropy of seed 0, in factors of 2 until a rate on either side is worse.  It runs the other
seeds at that rate and skips runs that are in RESULTS.jsonl.  `table` prints Markdown.

All cells of a task process the same number of examples, and average after the same number of
minibatches of a job.  Jobs are simulated: one process runs them one after another.  The rate decays
to a tenth.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ngsgd
from benchmarks.any_model import Results, Transformer, characters, cnn, digits, newton_schulz
from ngsgd.errors import DivergenceError
from ngsgd.files import read_json_lines
from ngsgd.pipeline.services import Services
from ngsgd.tasks import DatasetTask

SEEDS = (0, 1, 2)
MINIBATCHES_OF_A_JOB = 3
RULES = ("average", "bmuf", "diloco")
NUM_JOBS = (1, 4, 16)
FINAL_LR_SHARE = 0.1
# training examples that choose the last models
NUM_VALID = 48
# PyTorch's steps, without scaling to the norm of the gradient
ADAMW = {"kind": "adamw", "graft": "none"}

# name -> (settings of optimizer=, first rate of the search by task)
OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "ngsgd": ({"kind": "ngsgd"}, {"characters": 0.032, "images": 0.032}),
    "sgd": ({"kind": "sgd"}, {"characters": 0.032, "images": 0.032}),
    "adamw": (ADAMW, {"characters": 0.032, "images": 0.016}),
    "adamw, reset": ({**ADAMW, "curvature_state": "reset"}, {"characters": 0.016, "images": 0.016}),
    "muon": ({"kind": "muon", "graft": "none"}, {"characters": 0.032, "images": 0.016}),
    "kfac": ({"kind": "kfac"}, {"characters": 0.008, "images": 0.008}),
}


class Data(NamedTuple):
    """Data and length of training."""

    model: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int
    num_epochs: float


DATA: dict[str, Callable[[], Data]] = {
    "characters": lambda: Data(lambda: Transformer(64, 1), *characters(), 4, 0.255),
    "images": lambda: Data(cnn, *digits(), 16, 2.8)}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def num_targets(batch: Any) -> int:
    return int(batch[1].numel())


class Setting(NamedTuple):
    """The settings that identify a run."""

    task: str
    optimizer: str
    rule: str
    num_jobs: int
    lr: float
    seed: int


def measure(setting: Setting) -> dict[str, Any]:
    """Train once; cross-entropy of the test set in nats, and CPU seconds of the call."""
    data = DATA[setting.task]()
    lr = {"lr_initial": setting.lr, "lr_final": FINAL_LR_SHARE * setting.lr}

    def make_task() -> DatasetTask:
        return DatasetTask(
            TensorDataset(*data.train), data.model, loss_fn, valid=NUM_VALID / len(data.train[0]),
            weight_fn=num_targets, shard_size=MINIBATCHES_OF_A_JOB * data.batch_size,
            num_eval_examples=NUM_VALID)

    start_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = ngsgd.train(
                make_task, cluster="in_process", num_workers=setting.num_jobs, services=Services(),
                output_dir=folder, num_epochs=data.num_epochs, batch_size=data.batch_size,
                seed=setting.seed, outer=setting.rule, optimizer=OPTIMIZERS[setting.optimizer][0],
                schedule=lr)
        except DivergenceError as error:
            return {**setting._asdict(), "test_ce": None, "error": str(error)}
        steps = [line for line in read_json_lines(run.folder.events)
                 if line["event"] == "outer_iteration"]
        with torch.no_grad():
            loss = float(cross_entropy(run.model(data.test[0]), data.test[1]))
    return {**setting._asdict(), "test_ce": loss if math.isfinite(loss) else None,
            "num_outer_iters": len(steps), "num_examples": steps[-1]["examples_processed"],
            "limited_layers": statistics.fmean(step["max_change_share"] for step in steps),
            "cpu_s": time.process_time() - start_s}


class Cell(NamedTuple):
    """All runs that differ in rate and seed."""

    task: str
    optimizer: str
    rule: str
    num_jobs: int


def cells(tasks: Iterable[str], optimizers: Iterable[str], rules: Iterable[str],
          num_jobs: Iterable[int]) -> list[Cell]:
    """With one job block momentum is averaging."""
    found = itertools.starmap(Cell, itertools.product(tasks, optimizers, rules, sorted(num_jobs)))
    return [cell for cell in found if cell.task in OPTIMIZERS[cell.optimizer][1]
            and (cell.num_jobs > 1 or cell.rule != "bmuf")]


def best_rate(results: Results, cell: Cell) -> float | None:
    """The rate of the lowest loss of seed 0 so far."""
    rates = sorted(key.lr for key in results.of if key[:4] == cell and key.seed == 0)
    return min(rates, key=lambda lr: results.loss(Setting(*cell, lr, 0))) if rates else None


def search(results: Results, cell: Cell) -> float:
    """The rate with the lowest loss of seed 0, in factors of 2, with a worse one on either side.

    The search starts where fewer jobs, or averaging, were best.
    """
    near = [cell, cell._replace(num_jobs=cell.num_jobs // 4), cell._replace(rule="average"),
            cell._replace(rule="average", num_jobs=1)]
    known = (best_rate(results, one) for one in near)
    lr = next(filter(None, known), OPTIMIZERS[cell.optimizer][1][cell.task])
    for factor in (0.5, 2.0):
        while (results.loss(Setting(*cell, lr * factor, 0))
               < results.loss(Setting(*cell, lr, 0))):
            lr *= factor
    return lr


def sweep(results: Results, wanted: Iterable[Cell]) -> None:
    for cell in wanted:
        lr = search(results, cell)
        for seed in SEEDS:
            results.get(Setting(*cell, lr, seed))


def table(results: Results) -> str:
    """For each task: the figures of optimizers and rules by number of jobs."""
    rows = []
    for task in DATA:
        rows += ["", task, "", "| optimizer | outer | 1 job | 4 jobs | 16 jobs |",
                 "|---|---|---|---|---|"]
        for optimizer, rule in itertools.product(OPTIMIZERS, RULES):
            entries = [entry(results, Cell(task, optimizer, rule, num)) for num in NUM_JOBS]
            if any(entries):
                rows.append(f"| {optimizer} | {rule} | {' | '.join(entries)} |")
    return "\n".join(rows)


def entry(results: Results, cell: Cell) -> str:
    """Mean (lowest to highest) at the best rate, and that rate."""
    lr = best_rate(results, cell)
    if lr is None:
        return ""
    runs = [results.of[key] for seed in SEEDS if (key := Setting(*cell, lr, seed)) in results.of]
    losses = [one["test_ce"] for one in runs if one["test_ce"] is not None]
    if not losses:
        return "diverged"
    spread = f"{min(losses):.3f} to {max(losses):.3f}"
    if len(losses) < len(SEEDS):
        spread += f", {len(losses)} of {len(runs)} seeds"
    return f"{statistics.fmean(losses):.3f} ({spread}), {lr:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "sweep", "table"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--num-jobs", nargs="+", type=int, default=list(NUM_JOBS))
    parser.add_argument("--lr", type=float, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # PyTorch's Muon is in bfloat16, which processors without such instructions emulate
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    results = Results(options.results, Setting, measure, "test_ce")
    wanted = cells(options.tasks, options.optimizers, options.rules, options.num_jobs)
    if options.command == "run":
        for cell, lr in itertools.product(wanted, options.lr):
            results.get(Setting(*cell, lr, options.seed))
    elif options.command == "sweep":
        sweep(results, wanted)
    else:
        print(table(results))


if __name__ == "__main__":
    main()
