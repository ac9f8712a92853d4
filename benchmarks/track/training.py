"""One run: an optimizer, a learning rate, a length and a seed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from benchmarks.learning import evaluate
from benchmarks.rivals import RIVALS
from benchmarks.track.tasks import LoadedTask, minibatches
from benchmarks.track.variants import RootNatural, Variant
from ngsgd.launcher.config.compose import compose
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.training.worker import make_optimizer

# share of the run with a rate that grows linearly from 0
_WARM_UP = 0.05
# of the first rate, at the end of an exponential schedule
_LAST_SHARE = 0.1
# minibatches between two checks of the loss, and the loss that ends a run
_CHECK_PERIOD, _DIVERGED = 200, 20.0

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: min(part / _WARM_UP, 0.5 + 0.5 * math.cos(math.pi * max(0.0, part - _WARM_UP) / (1.0 - _WARM_UP))),
    "linear": lambda part: min(part / _WARM_UP, (1.0 - part) / (1.0 - _WARM_UP)),
    "exponential": lambda part: _LAST_SHARE ** part,
}
_VARIANT = "variant."
# forward and backward of a minibatch, then the step
Step = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Entry:
    """An optimizer of the track."""

    name: str
    # settings of `ngsgd train`
    settings: tuple[str, ...]
    # first rate of the sweep
    rate: float
    schedule: str = "cosine"
    # part of the run at its end whose parameters are averaged
    tail: float = 0.0
    # what a reader should know
    about: str = ""


def variant_of(entry: Entry) -> dict[str, Any]:
    """Return the options of a candidate (variants.py), given as variant.NAME=VALUE."""
    return {name.removeprefix(_VARIANT): yaml.safe_load(value) for name, _, value in
            (word.partition("=") for word in entry.settings) if name.startswith(_VARIANT)}


def make_step(model: nn.Module, entry: Entry, seed: int) -> Step:
    """Return a function that trains on a minibatch with a rate, as a worker does."""
    variant, preconditioner, optimizer = variant_of(entry), None, None  # type: Any, Any, Any
    if variant:
        optimizer = (RootNatural if "power" in variant else Variant)(model, **variant)
    elif entry.settings[0] in RIVALS:
        optimizer = RIVALS[entry.settings[0]](model.parameters())
    else:
        config = compose([*entry.settings]).optimizer
        optimizer = make_optimizer(model, config, 1.0, 1.0)
        preconditioner = make_preconditioner(model, config, seed) if config.preconditions else None

    def step(x_NW: Tensor, pdfs_N: Tensor, lr: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        if preconditioner is None:
            loss = cross_entropy(model(x_NW), pdfs_N, reduction="sum")
            loss.backward()
        else:
            loss = preconditioner.evaluate_and_step(lambda: cross_entropy(model(x_NW), pdfs_N, reduction="sum"), lr)
        optimizer.step(num_samples=len(pdfs_N))
        return loss.detach()
    return step


def train(task: LoadedTask, entry: Entry, rate: float, num_steps: int, seed: int) -> tuple[float, float]:
    """Return the validation loss, infinite if the run diverged, and the CPU seconds of training."""
    torch.manual_seed(seed)
    model = task.model(seed)
    step, schedule = make_step(model, entry, seed), SCHEDULES[entry.schedule]
    began, recent = time.process_time(), torch.zeros(())
    average = AveragedModel(model) if entry.tail else None
    for index, (x_NW, pdfs_N) in enumerate(minibatches(task.train, num_steps, seed)):
        recent += step(x_NW, pdfs_N, rate * schedule((index + 0.5) / num_steps)) / len(pdfs_N)
        if average is not None and index >= num_steps * (1.0 - entry.tail):
            average.update_parameters(model)
        if (index + 1) % _CHECK_PERIOD == 0:
            if not float(recent) / _CHECK_PERIOD < _DIVERGED:
                return math.inf, time.process_time() - began
            recent.zero_()
    seconds = time.process_time() - began
    loss, _ = evaluate(model if average is None else average, task.valid)
    return (loss if math.isfinite(loss) else math.inf), seconds
