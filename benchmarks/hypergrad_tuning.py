"""Tuning with hypergradients compared with Optuna's TPE, random search and a grid of long runs.

    python benchmarks/hypergrad_tuning.py digits       2, 8 and 20 hyperparameters on scikit-learn's digits with wrong labels
    python benchmarks/hypergrad_tuning.py transfer     schedules learned on 100 steps, used for 1600, and a grid at 1600
    python benchmarks/hypergrad_tuning.py table        means of all measurements

Every search is written to --results as soon as it is done, and is not repeated by a second call.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.errors import DivergenceError
from ngsgd.hypergrad import (
    BaseHyperparameters,
    HyperparameterPlan,
    HyperSpace,
    ModuleTask,
    SearchResult,
    evaluate_hyperparameters,
    final_value,
    tune_hyperparameters,
)
from ngsgd.hypergrad.search import random_seeder

SPACES: dict[str, dict[str, Any]] = {
    "S2": {"parts": ("schedule",), "knots": 2},
    "S8": {"parts": ("schedule", "layer_lr", "l2"), "knots": 2},
    "S20": {"parts": ("schedule", "layer_lr", "l2", "momentum", "init_scale"), "knots": 10},
}
# search range as a factor of rates and of the others; the second is that of ngsgd tune
BOXES = {"narrow": (10.0, 4.0), "tool": (30.0, 10.0)}
BUDGETS = (10, 20, 40, 80, 120)
METHODS = ("random", "tpe", "hypergradient", "hybrid")
LAYERS = ("0", "2", "4")
SETTINGS = BaseHyperparameters(lr_initial=1.5, lr_final=0.15, momentum=0.9, l2=1e-3,
                               max_change=0.5, max_param_change=1.0)
MULTIPLES = (1.0, 0.5, 0.25)
# initial rate, final over initial
GRID = [(1.5 * 2.0 ** power, ratio) for power in range(-4, 3) for ratio in (1.0, 0.1, 0.01)]


@dataclass(frozen=True)
class Data:
    """Rows to train on in this order, to tune on and to test on."""

    minibatch: Callable[[int], tuple[Tensor, Tensor]]  # of a step
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def task_of(data: Data, sizes: tuple[int, ...], seed: int) -> tuple[ModuleTask,
                                                                    Callable[[HyperparameterPlan],
                                                                             float]]:
    """A ReLU network of two hidden layers on the data, and its test loss at the end of a plan."""
    torch.manual_seed(seed)
    a, b, c, d = sizes
    module = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))

    def made(judged_by: tuple[Tensor, Tensor]) -> ModuleTask:
        return ModuleTask(module, lambda place: data.minibatch(place.step), _cross_entropy, [judged_by], seed)
    return made(data.valid), lambda plan: final_value(made(data.test), plan)


def _cross_entropy(output: Tensor, rows: tuple[Tensor, ...], _: Tensor | None) -> Tensor:
    return nn.functional.cross_entropy(output, rows[1])


def digits_data(seed: int) -> Data:
    """Handwritten digits of scikit-learn: 500 to train on with a fifth of the labels replaced at
    random, 500 to tune on, 797 to test on.
    """
    from sklearn.datasets import load_digits

    data, random = load_digits(), np.random.default_rng(seed)
    order = random.permutation(len(data.target))
    x_ND = torch.from_numpy((data.data[order] / 16.0 - 0.5).astype(np.float32))
    y_N = torch.from_numpy(data.target[order])
    noisy = torch.from_numpy(random.random(500) < 0.2)
    train_N = torch.where(noisy, torch.from_numpy(random.integers(0, 10, 500)), y_N[:500])

    @functools.cache
    def order_of(epoch: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(500))

    def minibatch(step: int) -> tuple[Tensor, Tensor]:
        epoch, first = divmod(step * 50, 500)
        rows = order_of(epoch)[first:first + 50]
        return x_ND[rows], train_N[rows]
    return Data(minibatch, (x_ND[500:1000], y_N[500:1000]), (x_ND[1000:], y_N[1000:]))


def mixture_data(seed: int) -> Data:
    """Ten classes of four Gaussians each in 32 dimensions whose scales differ by up to 30; each row
    is used once.
    """
    random = np.random.default_rng([seed, 40])
    means_MD, scales_D = random.standard_normal((40, 32)), 30.0 ** random.uniform(-1.0, 0.0, 32)

    def drawn(size: int) -> tuple[Tensor, Tensor]:
        of_N = random.integers(0, 40, size)
        x_ND = (means_MD[of_N] + 0.9 * random.standard_normal((size, 32))) * scales_D
        return torch.from_numpy(x_ND.astype(np.float32)), torch.from_numpy(of_N % 10)
    valid, test, (x_ND, y_N) = drawn(1000), drawn(4000), drawn(1600 * 50)
    return Data(lambda step: (x_ND[50 * step:50 * step + 50], y_N[50 * step:50 * step + 50]), valid, test)


def search(task: ModuleTask, space: HyperSpace, method: str, budget: float,
           seed: int) -> SearchResult:
    """One of METHODS; methods without gradients have the same box and start at its center."""
    from ngsgd.pipeline.tuning import tpe

    if method in ("hypergradient", "hybrid"):
        return tune_hyperparameters(lambda plan: evaluate_hyperparameters(task, plan), space,
                                    budget=budget, seed_share=0.25 if method == "hybrid" else 0.0,
                    seeder=tpe, seed=seed)
    found = SearchResult(space)

    def objective(theta_D: Tensor) -> float:
        return found.add("coarse", value_of(task, space.build(space.clamp(theta_D))), theta_D).value
    seeder = random_seeder if method == "random" else tpe
    seeder(objective, space.center() - space.reach(), space.center() + space.reach(), int(budget),
           seed)
    return found


def value_of(task: ModuleTask, plan: HyperparameterPlan) -> float:
    """The validation loss; infinite for a run that diverges."""
    try:
        value = final_value(task, plan)
    except DivergenceError:
        return math.inf
    return value if math.isfinite(value) else math.inf


# Measurements -------------------------------------------------------------------------------------

Key = dict[str, Any]
Record = dict[str, Any]


def _searches(what: str, options: argparse.Namespace, seed: int) -> Iterator[Key]:
    for box, space, method in itertools.product(options.boxes, options.spaces, options.methods):
        yield {"what": what, "box": box, "space": space, "method": method, "seed": seed, "budget": options.budget}


def digits(options: argparse.Namespace) -> Iterator[tuple[Key, Callable[[], Record]]]:
    """Each space and method at several budgets, in baseline runs, and the final test loss."""
    for seed in options.seeds:
        for key in _searches("digits", options, seed):
            yield key, functools.partial(_digits, key)


def _digits(key: Key) -> Record:
    task, test = task_of(digits_data(key["seed"]), (64, 64, 64, 10), key["seed"])
    space = _space(key, 100)
    found = search(task, space, key["method"], key["budget"], key["seed"])
    best = {cost: min((trial.value for trial in found.trials if trial.cost <= cost), default=math.inf) for cost in BUDGETS}
    return {"best": best, "test": test(_plan_of(space, found)),
            "spent": found.spent, "theta": list(found.best.theta),
            "distrusted": sum(trial.report is not None and not trial.report.trusted for trial in found.trials)}


def transfer(options: argparse.Namespace) -> Iterator[tuple[Key, Callable[[], Record]]]:
    """Schedules learned in so many runs of 100 steps, and multiples of them at 1600; a grid of
    exponential ones at 1600.
    """
    for seed in options.seeds:
        grid = {"what": "grid", "seed": seed}
        yield grid, functools.partial(_grid, grid)
        for key in _searches("transfer", options, seed):
            yield key, functools.partial(_transfer, key)


def _transfer(key: Key) -> Record:
    task, test = task_of(mixture_data(key["seed"]), (32, 64, 64, 10), key["seed"])
    found = search(task, _space(key, 100), key["method"], key["budget"], key["seed"])
    space = _space(key, 1600)
    best = space.clamp(torch.tensor(found.best.theta, dtype=torch.float64))
    long = SearchResult(space)
    for factor in MULTIPLES:
        long.add("transfer", value_of(task, space.build(space.scaled(best, factor))), space.scaled(best, factor))
    return {"short": found.best.value, "long": [trial.value for trial in long.trials], "spent": found.spent,
            "theta": list(found.best.theta), "test": test(space.build(torch.tensor(long.best.theta, dtype=torch.float64)))}


def _grid(key: Key) -> Record:
    task, test = task_of(mixture_data(key["seed"]), (32, 64, 64, 10), key["seed"])
    space = HyperSpace(SETTINGS, LAYERS, num_steps=1600, **SPACES["S2"])
    plans = [space.build(space.with_rates(space.center(), rate, ratio * rate)) for rate,
             ratio in GRID]
    values = [value_of(task, plan) for plan in plans]
    best = min(range(len(GRID)), key=lambda index: values[index])
    return {"values": values, "best": values[best], "at": GRID[best], "test": test(plans[best])}


def _space(key: Key, num_steps: int) -> HyperSpace:
    rates, others = BOXES[key["box"]]
    return HyperSpace(SETTINGS, LAYERS, num_steps=num_steps, rates=rates, others=others, **SPACES[key["space"]])


def _plan_of(space: HyperSpace, found: SearchResult) -> HyperparameterPlan:
    return space.build(space.clamp(torch.tensor(found.best.theta, dtype=torch.float64)))


# Results ------------------------------------------------------------------------------------------


def measure(wanted: Iterator[tuple[Key, Callable[[], Record]]], path: Path) -> None:
    """Run everything that is not in the file yet."""
    done = [{name: value for name, value in record.items() if name != "found"} for record in read(path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for key, action in wanted:
        if key in done:
            continue
        began = time.perf_counter()
        record = {**key, "found": action()}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record)[:300], f"{time.perf_counter() - began:.1f} s", flush=True)


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(path: Path) -> None:
    """Means over the seeds, a line for each method."""
    records = read(path)
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(str(record.get(name, "")) for name in ("what", "box", "space", "method")), []).append(record)
    for name, members in sorted(groups.items()):
        found = [member["found"] for member in members]
        if name[0] == "digits":
            figures = [statistics.fmean(one["best"][str(cost)] for one in found) for cost in BUDGETS]
            last = [one["best"][str(BUDGETS[-1])] for one in found]
        elif name[0] == "transfer":
            figures = [statistics.fmean(one["short"] for one in found),
                       *(statistics.fmean(one["long"][index] for one in found) for index in range(len(MULTIPLES)))]
            last = [min(one["long"]) for one in found]
        else:
            figures, last = [], [one["best"] for one in found]
        test = statistics.fmean(one["test"] for one in found)
        print("|", " ".join(name), "|", " | ".join(f"{value:.3f}" for value in figures), f"| best {statistics.fmean(last):.3f} |",
              " ".join(f"{value:.3f}" for value in last), f"| test {test:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("digits", "transfer", "table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--spaces", nargs="+", default=list(SPACES), choices=list(SPACES))
    parser.add_argument("--boxes", nargs="+", default=["narrow"], choices=list(BOXES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--results", type=Path, default=Path("runs/hypergrad-tuning.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command != "table":
        measure({"digits": digits, "transfer": transfer}[options.command](options), options.results)
    table(options.results)


if __name__ == "__main__":
    main()
