"""Learning rates of the preconditioners relative to that of SGD: docs/preconditioners.md.

    python benchmarks/preconditioner_rates.py [METHOD ...]

An MLP of three layers learns the classes of a random network: 4096 training and 2048 held-out rows
of 40 inputs, 10 classes, 300 minibatches of 64. Every method runs with torch.optim.SGD, momentum
0.9, mean loss, constant rate, its default damping, and curvature and inverse every 10 steps (1 for
methods that need every minibatch). The loss is the mean of the held-out cross-entropy over two
seeds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ngsgd.config.sections.optimizer import EVERY_MINIBATCH
from ngsgd.errors import DivergenceError
from ngsgd.preconditioners import METHODS

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SEEDS = (0, 1)
# PyTorch's methods have their own rates; the matrices of the other two are too large
NAMES = tuple(name for name in METHODS if name not in ("adam", "adamw", "muon", "full", "layer"))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 10))


def held_out_loss(name: str, rate: float, seed: int, num_steps: int = 300, width: int = 64, **options: Any) -> float:
    """Train with one method ("sgd" for none); a run that diverges has the loss inf."""
    torch.manual_seed(seed)
    x = torch.randn(6144, 40)
    y = mlp(64)(x).argmax(dim=1)
    model = mlp(width)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    preconditioner = METHODS[name](model, **options) if name != "sgd" else None

    def loss_of(rows: Tensor) -> Tensor:
        return cross_entropy(model(x[rows]), y[rows])

    try:
        for _ in range(num_steps):
            rows = torch.randint(4096, (64,))
            optimizer.zero_grad()
            if preconditioner is None:
                loss_of(rows).backward()
            else:
                preconditioner.evaluate(partial(loss_of, rows))
                preconditioner.step()
            optimizer.step()
    except DivergenceError:
        return float("inf")
    with torch.no_grad():
        loss = cross_entropy(model(x[4096:]), y[4096:]).item()
    # that of a uniform guess is 2.3
    return loss if loss < 5.0 else float("inf")


def best(name: str, rates: Sequence[float] = RATES, seeds: Sequence[int] = SEEDS, **options: Any) -> str:
    """Return two cells: the best rate, and the loss there and at the neighboring rates."""
    losses = [statistics.mean(held_out_loss(name, rate, seed, **options) for seed in seeds) for rate in rates]
    at = losses.index(min(losses))
    around = ", ".join("diverges" if loss == float("inf") else f"{loss:.2f}" for loss in losses[max(at - 1, 0):at + 2])
    return f"{rates[at]:g} | {around}"


def table(names: Sequence[str] = NAMES, **options: Any) -> Iterator[str]:
    yield "| method | damping | interval | best lr | held-out loss there and around | best lr with grafting | held-out loss |"
    yield "|---|---|---|---|---|---|---|"
    yield f"| none (SGD) |  |  | {best('sgd', **options)} |  |  |"
    for name in names:
        interval = 1 if name in EVERY_MINIBATCH else 10
        intervals = {"curvature_interval": interval, "inverse_interval": interval, **options}
        yield (f"| `{name}` | {METHODS[name].damping:g} | {interval} | {best(name, **intervals)} | "
               f"{best(name, graft='gradient', **intervals)} |")


if __name__ == "__main__":
    for line in table(sys.argv[1:] or NAMES):
        print(line, flush=True)
