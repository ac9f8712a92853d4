"""Learning of optimizers on models other than speech: a character transformer, an MLP and a CNN.

    python -m benchmarks.any_model run RESULTS.jsonl --task transformer --optimizer ngsgd --lr 0.016 --seed 0
    python -m benchmarks.any_model sweep RESULTS.jsonl --tasks mlp cnn --optimizers ngsgd adamw
    python -m benchmarks.any_model sweep RESULTS.jsonl --tasks mlp --optimizers adamw --length 3.3
    python -m benchmarks.any_model sweep RESULTS.jsonl --tasks speech --an4 AN4_FOLDER
    python -m benchmarks.any_model table RESULTS.jsonl

`run` trains once and appends one line to RESULTS.jsonl.  `sweep` searches the rate with the lowest
validation cross-entropy of seed 0, in factors of 2 until a rate on either side is worse, and runs
the other seeds at that rate.  It skips runs that are in RESULTS.jsonl.  `table` prints Markdown.
`--length` multiplies the number of steps, to compare at equal CPU time.

All optimizers share the network, its initial values, the minibatches, 5 % of warm-up, a cosine
decay to 0, and a loss that is a mean over the minibatch.
"""

from __future__ import annotations

import argparse
import argparse as text_of_a_module
import functools
import inspect
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.learning import Frames, read_frames
from ngsgd import NGSGD, NaturalMuon
from ngsgd.files import read_json_lines

SEEDS = (0, 1, 2)
CONTEXT, WIDTH = 64, 128
WARM_UP = 0.05              # warm-up, as a fraction of the steps
# momentum of the AdamW that trains all parameters except hidden matrices
MUON_BIAS_LR = 0.002


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A transformer over characters."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        blocks = [Block(width) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.tokens(x) + self.positions.weight).transpose(1, 2)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def acoustic_model() -> nn.Module:
    return nn.Sequential(nn.Linear(195, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 102))


class Task(NamedTuple):
    """Data, network and length of training."""

    model: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    batch_size: int
    num_steps: int


def characters() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Windows of the source of Python's own modules and the characters that follow; the last tenth
    is validation.
    """
    text = "".join(map(inspect.getsource, (text_of_a_module, inspect, statistics)))
    data = torch.tensor([ord(c) for c in text if ord(c) < 128])
    num = (len(data) - 1) // CONTEXT
    x, y = data[:num * CONTEXT].view(num, CONTEXT), data[1:num * CONTEXT + 1].view(num, CONTEXT)
    # the modules are of different styles: every tenth window is held out
    held_out = torch.arange(num) % 10 == 0
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The 1,797 images of 8 x 8 of scikit-learn, in its order; the last 360 are validation."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16.0, torch.from_numpy(labels)
    return (x[:-360], y[:-360]), (x[-360:], y[-360:])


@functools.cache
def speech(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The frames of CMU's AN4 with seven on either side, and their HMM states; its test set."""
    def whole(frames: Frames) -> tuple[Tensor, Tensor]:
        return frames.minibatch(torch.arange(len(frames)))

    return whole(read_frames(folder, "train")), whole(read_frames(folder, "test"))


# "speech" needs --an4
TASKS: dict[str, Callable[[], Task]] = {
    "transformer": lambda: Task(Transformer, *characters(), 16, 200),
    "mlp": lambda: Task(mlp, *digits(), 64, 440),
    "cnn": lambda: Task(cnn, *digits(), 64, 220)}


def newton_schulz(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """torch.optim.Muon with its iteration in float32: bfloat16 is 50 times slower on this
    processor.
    """
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def muon(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "tokens" not in name and "positions" not in name]
    # the authors of Muon recommend AdamW for the output layer
    hidden = hidden[:-1]
    matrices = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    return [torch.optim.Muon(hidden, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr, weight_decay=0.01, fused=True)]


# name -> (optimizers of a model, first rate of the search)
OPTIMIZERS: dict[str, tuple[Callable[[nn.Module, float], list[torch.optim.Optimizer]], float]] = {
    "adamw": (lambda model, lr: [torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01, fused=True)], 0.002),
    "sgd": (lambda model, lr: [torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=True)], 0.1),
    "muon": (muon, 0.004),
    "ngsgd": (lambda model, lr: [NGSGD(model, lr, loss_reduction="mean")], 0.016),
    # Kaldi's numbers in every minibatch
    "ngsgd-exact": (lambda model, lr: [NGSGD(model, lr, loss_reduction="mean", update="exact")], 0.016),
    # the update of Fisher estimates on a GPU
    "ngsgd-polar": (lambda model, lr: [NGSGD(model, lr, loss_reduction="mean", update="polar")], 0.016),
    "natural-muon": (lambda model, lr: [NaturalMuon(model, lr)], 0.008),
    "ngsgd-plain": (lambda model, lr: [NGSGD(model, lr, loss_reduction="mean", fallback="sgd")], 0.016),
}


class Setting(NamedTuple):
    """The settings that identify a run."""

    task: str
    optimizer: str
    lr: float
    seed: int
    # multiple of the task's number of steps
    length: float = 1.0


def measure(setting: Setting) -> dict[str, Any]:
    """Train once; validation cross-entropy in nats and CPU seconds of training."""
    task = TASKS[setting.task]()
    num_steps = round(setting.length * task.num_steps)
    torch.manual_seed(setting.seed)
    model = task.model()
    optimizers = OPTIMIZERS[setting.optimizer][0](model, setting.lr)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step / num_steps)) for one in optimizers]
    start_s = time.process_time()
    for step in range(num_steps):
        rows = minibatch_rows(len(task.train[0]), task.batch_size, step, setting.seed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(model(task.train[0][rows]), task.train[1][rows]).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    cpu_s = time.process_time() - start_s
    with torch.no_grad():
        logits = model.eval()(task.valid[0])
        loss = float(cross_entropy(logits, task.valid[1]))
        accuracy = float((logits.argmax(1) == task.valid[1]).float().mean())
    limited = optimizers[0].activity() if isinstance(optimizers[0], NGSGD) else None
    return {**setting._asdict(), "valid_ce": loss if math.isfinite(loss) else None, "accuracy": accuracy, "cpu_s": cpu_s,
            "num_steps": num_steps, "limited_layers": limited and statistics.mean(limited.layer_share.values())}


def _rate(done: float) -> float:
    return max(done, 1e-3) / WARM_UP if done < WARM_UP else 0.5 * (1.0 + math.cos(math.pi * (done - WARM_UP) / (1.0 - WARM_UP)))


def minibatch_rows(num: int, size: int, step: int, seed: int) -> Tensor:
    """Indices of one minibatch: all samples in a new order in each epoch."""
    per_epoch = num // size
    epoch, index = divmod(step, per_epoch)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return order[index * size:][:size]


class Results:
    """The runs of a file, one JSON line each; missing runs are executed and appended."""

    def __init__(self, path: Path, setting: type[Any], measure: Callable[[Any], dict[str, Any]], figure: str) -> None:
        self.path, self.measure, self.figure = path, measure, figure
        lines = read_json_lines(path) if path.exists() else []
        self.of = {setting(**{key: line[key] for key in setting._fields if key in line}): line for line in lines}

    def get(self, setting: Any) -> dict[str, Any]:
        if setting not in self.of:
            self.of[setting] = self.measure(setting)
            with self.path.open("a") as file:
                file.write(json.dumps(self.of[setting]) + "\n")
            print(json.dumps(self.of[setting]), flush=True)
        return self.of[setting]

    def loss(self, setting: Any) -> float:
        found = self.get(setting)[self.figure]
        return math.inf if found is None else float(found)


def best_rate(results: Results, task: str, optimizer: str, length: float) -> float:
    """The rate with the lowest loss of seed 0, in factors of 2, with a worse rate on either side.
    """
    lr = OPTIMIZERS[optimizer][1]
    for factor in (2.0, 0.5):
        while (results.loss(Setting(task, optimizer, lr * factor, 0, length))
               < results.loss(Setting(task, optimizer, lr, 0, length))):
            lr *= factor
    return lr


def sweep(results: Results, tasks: Sequence[str], optimizers: Sequence[str], length: float) -> None:
    for task in tasks:
        for optimizer in optimizers:
            lr = best_rate(results, task, optimizer, length)
            for seed in SEEDS:
                results.get(Setting(task, optimizer, lr, seed, length))


def table(results: Results) -> str:
    """For each task, optimizer and length: the best rate, the loss of each seed, and times."""
    rows = ["| task | optimizer | length | rate | valid CE, seeds 0, 1, 2 | mean | CPU s | ms a step |",
            "|---|---|---|---|---|---|---|---|"]
    for task, optimizer, length in sorted({(key.task, key.optimizer, key.length) for key in results.of}):
        searched = [key for key in results.of if (key.task, key.optimizer, key.length, key.seed) == (task, optimizer, length, 0)]
        if searched:
            lr = min(searched, key=results.loss).lr
            runs = [results.of[key] for seed in SEEDS if (key := Setting(task, optimizer, lr, seed, length)) in results.of]
            losses = [one["valid_ce"] or math.nan for one in runs]
            cpu_s = statistics.median(one["cpu_s"] for one in runs)
            rows.append(f"| {task} | {optimizer} | {length:g} | {lr:g} | {' '.join(f'{one:.3f}' for one in losses)} | "
                        f"{statistics.mean(losses):.3f} | {cpu_s:.1f} | {1e3 * cpu_s / runs[0]['num_steps']:.1f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "sweep", "table"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--task", choices=[*TASKS, "speech"])
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=float, default=1.0)
    parser.add_argument("--an4", type=Path, help="folder with feats_*.ark and ali_*.npz, for the task speech")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, "speech"], default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    if options.an4:
        TASKS["speech"] = lambda: Task(acoustic_model, *speech(options.an4), 256, 991)
    torch.set_num_threads(1)
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    results = Results(options.results, Setting, measure, "valid_ce")
    if options.command == "run":
        results.get(Setting(options.task, options.optimizer, options.lr, options.seed, options.length))
    elif options.command == "sweep":
        sweep(results, options.tasks, options.optimizers, options.length)
    else:
        print(table(results))


if __name__ == "__main__":
    main()
