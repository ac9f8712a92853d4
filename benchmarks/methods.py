"""Learning of every preconditioner on four tasks: best of a small grid, three seeds.

    python -m benchmarks.methods sweep RESULTS.jsonl --task digits
    python -m benchmarks.methods sweep RESULTS.jsonl --task fsdd --egs FOLDER    # data/egs-.. of `ngsgd train recipe=fsdd`
    python -m benchmarks.methods sweep RESULTS.jsonl --task characters
    python -m benchmarks.methods table RESULTS.jsonl

`sweep` runs everything that is not in RESULTS.jsonl. First come, on seed 0, the grid of learning
rates (and of dampings, on digits), one more rate if the best is at an end, then the other seeds at
the best setting. A method has the settings of `ngsgd train optimizer=NAME`, except for the factor
of the damping.

    digits       1797 images of 8 x 8 of scikit-learn, 1437 for training; two convolutions
    fsdd         the first frame of every example of the recipe, one twentieth of its training
                 data; the network of the recipe, four layers of 256
    characters   a transformer of two blocks of width 64, 150 steps
    cnn          three convolutions with batch norm, 220 steps

The last two have the data and held-out parts of `any_model.py`.  Minibatches have 64 images, 128
frames or 8 windows of 64 characters.  Mean loss, momentum 0.9, linear decay of the rate to 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import any_model
from benchmarks.nets import Gpt, SelfAttention
from ngsgd import NGSGD
from ngsgd.config import OptimizerConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import NgsgdError
from ngsgd.files import read_json_lines
from ngsgd.preconditioners import METHODS
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.schedules import Shard

SEEDS = (0, 1, 2)
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)   # numbers of rates
# four each, the grid of the first search
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)   # for directions with the gradient's norm
SGD_RATES = (0.03, 0.1, 0.3, 1.0)         # and for NG-SGD
ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
MUON_RATES = (0.003, 0.01, 0.03, 0.1)
# factors of the damping in the method's settings
DAMPING_FACTORS = {"digits": (0.1, 1.0, 10.0)}
# without scaling to the norm of the gradient
OPTIMIZERS = ("sgd", "ngsgd", "adam", "adamw", "muon")
# online is ngsgd through the preconditioner interface
PRECONDITIONERS = tuple(name for name in METHODS if name not in OPTIMIZERS)
MOMENTUM = 0.9
NUM_EPOCHS = 10                         # digits
# floats of a method's statistics; with more, a run would take hours
UNIT_LIMIT = 50e6


@dataclass(frozen=True)
class Setting:
    """The settings that identify a run."""

    task: str
    method: str
    lr: float
    damping_factor: float
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of a run; `failure` instead of figures if the method cannot run or diverged."""

    cpu_s: float = 0.0             # of training
    valid_ce: float | None = None  # nats per row
    valid_accuracy: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Task:
    """Minibatches in the order of a seed, held-out rows, and a network."""

    build: Callable[[], nn.Module]
    minibatches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    num_steps: int
    valid: tuple[Tensor, Tensor]


def digits() -> Task:
    """Images of handwritten digits."""
    images, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[chosen].view(-1, 1, 8, 8) / 16.0, torch.tensor(labels)[chosen]
    num_train, size = 1437, 64

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
                             nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))

    def minibatches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(NUM_EPOCHS):
            order = torch.randperm(num_train, generator=generator)
            for first in range(0, num_train - size + 1, size):
                rows = order[first:first + size]
                yield x[rows], y[rows]

    return Task(build, minibatches, NUM_EPOCHS * (num_train // size), (x[num_train:], y[num_train:]))


def fsdd(egs: Path) -> Task:
    """Frames of connected digits in noise."""
    reader = EgsReader(egs)
    info = reader.info
    width = info.num_inputs
    shards = [Shard(archive, 0) for archive in range(info.num_archives)]
    valid = reader.diagnostic("valid")

    def build() -> nn.Module:
        sizes = [width, 256, 256, 256, 256]
        hidden = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(256, info.num_classes))

    def minibatches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for shard in shards:
            for minibatch in reader.minibatches(shard, 128, seed=seed, outer_iter=0, job=0):
                yield minibatch.x_ND, minibatch.pdf_N

    return Task(build, minibatches, sum(-(-reader.num_frames(shard) // 128) for shard in shards), (valid.x_ND, valid.pdf_N))


def characters() -> Task:
    """Windows of Python source; each position predicts the next character."""
    (x, y), (valid_x, valid_y) = any_model.characters()

    def symbols(codes: Tensor) -> Tensor:
        # the line feed is 0, printable characters follow: the network has 100
        return codes.clamp(min=31) - 31

    x, y, valid_x, valid_y = map(symbols, (x, y, valid_x, valid_y))
    return Task(partial(Gpt, SelfAttention), partial(shuffled, x, y, 8, 150), 150, (valid_x, valid_y.flatten()))


def cnn() -> Task:
    """The digits, in an order in which held-out images are by other writers."""
    (x, y), valid = any_model.digits()
    return Task(any_model.cnn, partial(shuffled, x, y, 64, 220), 220, valid)


def shuffled(x: Tensor, y: Tensor, size: int, num_steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches in a new order in each epoch."""
    for step in range(num_steps):
        rows = any_model.minibatch_rows(len(x), size, step, seed)
        yield x[rows], y[rows].flatten()


def config_of(method: str, damping_factor: float) -> OptimizerConfig:
    """The method's settings over the defaults."""
    settings = OptimizerConfig(method)  # type: ignore[arg-type]
    return replace(settings, damping=settings.damping * damping_factor)


def optimizers_of(method: str, model: nn.Module, lr: float, minibatch: int) -> list[torch.optim.Optimizer]:
    """The optimizer."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
    if method == "ngsgd":   # its rates are per row, on the sum over the minibatch
        return [NGSGD(model, lr / minibatch, momentum=MOMENTUM)]
    if method == "adam":
        return [torch.optim.Adam(model.parameters(), lr)]
    if method == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr)]
    if method == "muon":
        return [torch.optim.Muon(matrices, lr), torch.optim.AdamW(others, 1e-3)]
    # SOAP has its own momentum
    return [torch.optim.SGD(model.parameters(), lr, momentum=0.0 if method == "soap" else MOMENTUM)]


def run(task: Task, setting: Setting) -> Result:
    """One training."""
    torch.manual_seed(setting.seed)
    model = task.build()
    try:
        preconditioner = make_preconditioner(model, config_of(setting.method, setting.damping_factor), setting.seed) \
            if setting.method in PRECONDITIONERS else None
        reason = too_large(setting.method, model)
        if reason:
            return Result(failure=reason)
        optimizers = optimizers_of(setting.method, model, setting.lr, len(next(task.minibatches(0))[1]))
        began = time.process_time()
        for step, (x, y) in enumerate(task.minibatches(setting.seed)):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("first_lr", group["lr"]) * (1.0 - step / task.num_steps)
                optimizer.zero_grad()
            scale = float(len(y)) if setting.method == "ngsgd" else 1.0
            if preconditioner is None:
                (cross_entropy(model(x), y) * scale).backward()
            else:
                closure = partial(lambda x, y: cross_entropy(model(x), y), x, y)
                preconditioner.evaluate_and_step(closure, optimizers[0].param_groups[0]["lr"])
            for optimizer in optimizers:
                optimizer.step()
    except NgsgdError as error:
        return Result(failure=" ".join(str(error).split())[:160])
    seconds = time.process_time() - began
    with torch.no_grad():
        x, y = task.valid
        logits = model.eval()(x)
        ce = float(cross_entropy(logits, y))
    if not ce < 1e3:
        return Result(seconds, failure="diverged")
    return Result(seconds, ce, float((logits.argmax(dim=1) == y).double().mean()))


def too_large(method: str, model: nn.Module) -> str:
    """Why the method is not tried on the network; empty if it is."""
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()
             if isinstance(module, nn.Linear | nn.Conv2d)}
    inputs = [module.weight[0].numel() + 1 for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    outputs = [len(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    floats = {"unit": sum(o * i * i for o, i in zip(outputs, inputs, strict=True)), "layer": max(sizes.values()) ** 2,
              "full": sum(sizes.values()) ** 2}.get(method, 0)
    return f"{floats / 1e6:.0f} million floats of curvature" if floats > UNIT_LIMIT else ""


def sweep(path: Path, name: str, task: Task, methods: Sequence[str], limit_s: float) -> None:
    """Run everything that is missing; stop after the run in which the time is over."""
    began = time.monotonic()
    known = read(path)

    def found(setting: Setting) -> Result | None:
        if setting not in known and time.monotonic() - began < limit_s:
            known[setting] = run(task, setting)
            with path.open("a") as file:
                file.write(json.dumps({**asdict(setting), **asdict(known[setting])}) + "\n")
            print(setting, known[setting], flush=True)
        return known.get(setting)

    for method in methods:
        rates = rates_of(name, method)
        best: Setting | None = None
        while rates:
            grid = [Setting(name, method, lr, factor, 0) for factor in factors_of(name, method) for lr in rates]
            results = {setting: found(setting) for setting in grid}
            if None in results.values():   # out of time
                return
            best = best_of(results)
            rates = wider(rates, best.lr) if best else ()
        if best:
            for seed in SEEDS[1:]:
                found(replace(best, seed=seed))


def wider(rates: tuple[float, ...], best: float) -> tuple[float, ...]:
    """One more rate beyond the end if the best is there; none if it is inside, or the range ends.
    """
    first, last = LADDER.index(rates[0]), LADDER.index(rates[-1])
    if best == rates[0] and first > 0:
        return LADDER[first - 1:last + 1]
    if best == rates[-1] and last + 1 < len(LADDER):
        return LADDER[first:last + 2]
    return ()


def factors_of(task: str, method: str) -> tuple[float, ...]:
    return DAMPING_FACTORS.get(task, (1.0,)) if method in PRECONDITIONERS else (1.0,)


def rates_of(task: str, method: str) -> tuple[float, ...]:
    own = {"sgd": SGD_RATES, "ngsgd": SGD_RATES, "muon": MUON_RATES, **dict.fromkeys(("adam", "adamw", "soap"), ADAM_RATES)}
    rates = own.get(method, LEARNING_RATES)
    # the lowest was best for few methods on the first two tasks
    return rates if task in ("digits", "fsdd") else rates[1:]


def best_of(results: Mapping[Setting, Result | None]) -> Setting | None:
    """The setting with the lowest cross-entropy on held-out rows."""
    finite = {setting: result.valid_ce for setting, result in results.items() if result and result.valid_ce is not None}
    return min(finite, key=lambda setting: finite[setting]) if finite else None


def read(path: Path) -> dict[Setting, Result]:
    """Finished runs; the last one of a repeated setting."""
    keys = Setting.__dataclass_fields__
    return {Setting(**{key: line[key] for key in keys}): Result(**{key: value for key, value in line.items() if key not in keys})
            for line in (read_json_lines(path) if path.exists() else [])}


def table(path: Path) -> None:
    """Markdown, the best first."""
    known = read(path)
    for task in dict.fromkeys(setting.task for setting in known):
        rows = []
        sgd_s = statistics.median(r.cpu_s for setting, r in known.items() if (setting.task, setting.method) == (task, "sgd"))
        for method in dict.fromkeys(setting.method for setting in known if setting.task == task):
            grid = {setting: result for setting, result in known.items()
                    if (setting.task, setting.method, setting.seed) == (task, method, 0)}
            best = best_of(grid)
            if best is None:
                rows.append((float("inf"), f"| {method} | {next(iter(grid.values())).failure} | | | | |"))
                continue
            seeds = [known[setting] for seed in SEEDS if (setting := replace(best, seed=seed)) in known]
            ces = [r.valid_ce for r in seeds]
            accuracies = [None if r.valid_accuracy is None else 100.0 * r.valid_accuracy for r in seeds]
            cost = statistics.median(r.cpu_s for r in seeds) / sgd_s
            damping = f"{config_of(method, best.damping_factor).damping:g}" if method in PRECONDITIONERS else "-"
            rows.append((statistics.fmean(ce for ce in ces if ce is not None),
                         f"| {method} | {spread(ces, 3)} | {spread(accuracies, 1)} | {best.lr:g} | {damping} | {cost:.2f} |"))
        print(f"\n{task}\n\n| method | valid CE | accuracy, % | rate | damping | time / SGD |\n|{' --- |' * 6}")
        print("\n".join(text for _, text in sorted(rows)))


def spread(values: Iterable[float | None], digits: int) -> str:
    """Mean and range, and the number of seeds if one diverged."""
    values = list(values)
    finite = [value for value in values if value is not None]
    told = f"{statistics.fmean(finite):.{digits}f} ({min(finite):.{digits}f} to {max(finite):.{digits}f})"
    return told if len(finite) == len(SEEDS) else f"{told}, {len(finite)} of {len(SEEDS)} seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--task", choices=("digits", "fsdd", "characters", "cnn"), default="digits")
    parser.add_argument("--egs", type=Path, help="fsdd: the folder of examples")
    parser.add_argument("--methods", nargs="+", default=[*OPTIMIZERS, *PRECONDITIONERS])
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no run after so many seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "table":
        table(args.results)
    else:
        if args.task == "fsdd" and args.egs is None:
            parser.error("--task fsdd needs --egs")
        task = fsdd(args.egs) if args.task == "fsdd" else {"digits": digits, "characters": characters, "cnn": cnn}[args.task]()
        sweep(args.results, args.task, task, args.methods, args.limit_s)


if __name__ == "__main__":
    main()
