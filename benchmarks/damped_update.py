"""BackPACK's optimization experiment at small scale: the damped update with each curvature, SGD
with momentum, and Adam.

    python benchmarks/damped_update.py run RUNS.jsonl [--problems logreg 3c3d] [--methods sgd kfac] [--minutes 4]
    python benchmarks/damped_update.py table RUNS.jsonl
    python benchmarks/damped_update.py plot RUNS.jsonl docs/curvature-optimisers.png

Data: the 1797 handwritten digits of 8 x 8 pixels of scikit-learn, the last 360 of them for testing.
Each method has a small grid with seed 0.  The setting with the lowest training loss after the last
epoch also runs with seeds 1 and 2.  Runs in the file are not repeated.

theta <- theta - lr (G + (damping + l2) I)^-1 (gradient + l2 theta)                       (arXiv
1912.10985, section 4)
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.curvature.quantities import damped_direction
from ngsgd.errors import DivergenceError

BATCH, EPOCHS, NUM_TEST, SEEDS = 128, 20, 360, (0, 1, 2)
LRS = {"sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), "adam": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)}
CURVATURES = {"diag_ggn_mc": "DiagGGN-MC", "kfac": "KFAC", "kflr": "KFLR", "kfra": "KFRA"}
METHODS = {"sgd": "SGD, momentum 0.9", "adam": "Adam", **CURVATURES}
# the dampings of BackPACK's grid
_LRS, _DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0), (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)

Data = tuple[Tensor, Tensor, Tensor, Tensor]   # training images and digits, test images and digits


@dataclass(frozen=True)
class Problem:
    """A network and the weight of |theta|^2 / 2 in its loss."""

    build: Callable[[], nn.Module]
    l2: float


def logistic_regression() -> nn.Module:
    """Logistic regression, which is convex."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def conv_net() -> nn.Module:
    """Three convolutions and three affine layers, as in 3C3D, for images of 8 x 8 pixels.

    Pooling is average pooling: with max pooling KFRA's recursion needs a pass for every direction
    of its matrix, 0.7 s a step.  The initial values are those of 3C3D in DeepOBS.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for module in model:
        # PyTorch's initial values are too small for six layers: no method makes progress
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model


TITLES = {"logreg": "logistic regression", "3c3d": "convolutional network"}
PROBLEMS = {"logreg": Problem(logistic_regression, 0.0), "3c3d": Problem(conv_net, 0.002)}


def digits() -> Data:
    from sklearn.datasets import load_digits
    pixels, targets = load_digits(return_X_y=True)
    x, y = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0, torch.as_tensor(targets)
    return x[:-NUM_TEST], y[:-NUM_TEST], x[-NUM_TEST:], y[-NUM_TEST:]


def settings_of(method: str) -> list[dict[str, float]]:
    if method in LRS:
        return [{"lr": lr} for lr in LRS[method]]
    return [{"lr": lr, "damping": damping} for lr, damping in itertools.product(_LRS, _DAMPINGS)]


def train(problem: Problem, method: str, setting: dict[str, float], seed: int, data: Data) -> dict[str, Any]:
    """The curve of one run: after every epoch the loss on all training data and the test accuracy.
    """
    torch.manual_seed(seed)
    model, loss_fn = problem.build(), nn.CrossEntropyLoss()
    step = _stepper(model, method, setting, problem.l2)
    x, y, _, _ = data
    losses, accuracies = [], []
    start = time.process_time()
    try:
        for _ in range(EPOCHS):
            for index in _minibatches(len(x)):
                step(loss_fn, x[index], y[index])
            loss, accuracy = _evaluated(model, loss_fn, data)
            losses.append(round(loss, 6))
            accuracies.append(round(accuracy, 4))
    except DivergenceError as error:
        return {"diverged": str(error), "losses": losses, "accuracies": accuracies}
    return {"losses": losses, "accuracies": accuracies, "seconds": round(time.process_time() - start, 2)}


def _stepper(model: nn.Module, method: str, setting: dict[str, float], l2: float) -> Callable[[nn.Module, Tensor, Tensor], None]:
    """One step on one minibatch."""
    if method in CURVATURES:
        return lambda loss_fn, x, y: _damped_step(model, method, setting, l2, loss_fn, x, y)
    optimizer: torch.optim.Optimizer
    if method == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), setting["lr"], momentum=0.9, weight_decay=l2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), setting["lr"], weight_decay=l2)

    def step(loss_fn: nn.Module, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return step


def _damped_step(model: nn.Module, method: str, setting: dict[str, float], l2: float, loss_fn: nn.Module, x: Tensor,
                 y: Tensor) -> None:
    model.zero_grad()
    with collect(model, method, loss_fn=loss_fn, sharing="backpack") as q:
        loss_fn(model(x), y).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert p.grad is not None
            direction = damped_direction(p.grad, p, getattr(q[name], method), damping=setting["damping"], l2=l2)
            p.sub_(direction, alpha=setting["lr"])


def _minibatches(num: int) -> Iterator[Tensor]:
    yield from torch.randperm(num)[:num // BATCH * BATCH].split(BATCH)


@torch.no_grad()
def _evaluated(model: nn.Module, loss_fn: nn.Module, data: Data) -> tuple[float, float]:
    x, y, test_x, test_y = data
    loss = float(loss_fn(model(x), y))
    if not loss < 1e6:
        raise DivergenceError(f"the training loss is {loss}.")
    return loss, float((model(test_x).argmax(dim=1) == test_y).float().mean())


class Runs:
    """Finished runs, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(self, problem: str, method: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if (line["problem"], line["method"]) == (problem, method)]

    def best_setting(self, problem: str, method: str) -> dict[str, float] | None:
        """The setting with the lowest final loss of seed 0; None if all diverged or the grid is
        incomplete.
        """
        done = [line for line in self.of(problem, method) if line["seed"] == 0]
        finished = [line for line in done if "diverged" not in line]
        if len(done) < len(settings_of(method)) or not finished:
            return None
        best: dict[str, float] = min(finished, key=lambda line: float(line["losses"][-1]))["setting"]
        return best

    def best(self, problem: str, method: str) -> list[dict[str, Any]]:
        """The runs of that setting, one for each seed."""
        setting = self.best_setting(problem, method)
        return [line for line in self.of(problem, method) if line["setting"] == setting and "diverged" not in line]

    def complete(self, problem: str, method: str, setting: dict[str, float], seed: int, data: Data) -> None:
        if any(line["setting"] == setting and line["seed"] == seed for line in self.of(problem, method)):
            return
        found = train(PROBLEMS[problem], method, setting, seed, data)
        line = {"problem": problem, "method": method, "setting": setting, "seed": seed, **found}
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(problem, method, setting, seed, found.get("diverged") or (found["losses"][-1], found["accuracies"][-1],
                                                                        found["seconds"]), flush=True)


def run(runs: Runs, problems: list[str], methods: list[str], minutes: float) -> None:
    torch.set_num_threads(1)
    data, end = digits(), time.monotonic() + 60.0 * minutes
    for problem, method in itertools.product(problems, methods):
        for setting in settings_of(method):
            if time.monotonic() < end:
                runs.complete(problem, method, setting, 0, data)
        best = runs.best_setting(problem, method)
        for seed in SEEDS:
            if best is not None and time.monotonic() < end:
                runs.complete(problem, method, best, seed, data)


def table(runs: Runs) -> None:
    """Markdown: the final figures of each method's best setting, mean over seeds (lowest to
    highest).
    """
    for problem in PROBLEMS:
        print(f"\n{problem}\n\n| method | lr | damping | training loss | test accuracy, % | ms a step |\n{'|---' * 6}|")
        for method, title in METHODS.items():
            best = runs.best(problem, method)
            if best:
                setting, num_steps = best[0]["setting"], EPOCHS * ((1797 - NUM_TEST) // BATCH)
                cells = (title, setting["lr"], setting.get("damping", ""), _spread([line["losses"][-1] for line in best], 4),
                         _spread([100 * line["accuracies"][-1] for line in best], 1),
                         f"{1e3 * statistics.median(line['seconds'] for line in best) / num_steps:.1f}")
                print(f"| {' | '.join(str(cell) for cell in cells)} |")


def _spread(values: list[float], digits_shown: int) -> str:
    return f"{statistics.mean(values):.{digits_shown}f} ({min(values):.{digits_shown}f} to {max(values):.{digits_shown}f})"


def plot(runs: Runs, picture: Path) -> None:
    """Training loss and test accuracy by epoch: the mean over seeds, and the range as a band."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for row, problem in enumerate(PROBLEMS):
        for column, (key, label) in enumerate((("losses", "training loss"), ("accuracies", "test digits right"))):
            axes = figure.add_subplot(len(PROBLEMS), 2, 2 * row + column + 1)
            for method, title in METHODS.items():
                curves = torch.tensor([line[key] for line in runs.best(problem, method)])
                if len(curves):
                    epochs = range(1, EPOCHS + 1)
                    (line,) = axes.plot(epochs, curves.mean(dim=0).tolist(), label=title, linewidth=1.3)
                    axes.fill_between(epochs, curves.amin(dim=0).tolist(), curves.amax(dim=0).tolist(), color=line.get_color(),
                                      alpha=0.15, linewidth=0)
            axes.set(xlabel="epoch", ylabel=label, title=TITLES[problem], xlim=(1, EPOCHS))
            if key == "losses":
                axes.set_yscale("log")
            else:
                axes.set_ylim(0.8 if row == 0 else 0.4, 1.0)
            if (row, column) == (0, 1):
                axes.legend(fontsize=8, loc="lower right")
    figure.savefig(picture, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "plot"))
    parser.add_argument("runs", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    args = parser.parse_args()
    runs = Runs(args.runs)
    if args.what == "run":
        run(runs, args.problems, args.methods, args.minutes)
    elif args.what == "table":
        table(runs)
    else:
        plot(runs, args.picture or Path("docs/curvature-optimisers.png"))


if __name__ == "__main__":
    main()
