"""Cost of a step of sequence training relative to cross-entropy, on the same frames and network.

    python benchmarks/sequence.py [--states 60 300 2000] [--rounds 5]

A step is forward, loss and backward through 4 x 256 ReLU on 2000 frames in 8 sequences, without the
optimizer; path sums alone are timed too.  Medians of interleaved rounds.  PyTorch's CTC on the same
frames is the reference, because k2 has no wheel for this Python.  CTC sums over the graph of one
transcript, so it is a lower bound for a denominator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig, ObjectiveConfig
from ngsgd.models.build import build_model
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.objectives import Denominator, SequenceObjective

NUM_INPUTS, NUM_CLASSES, LENGTH, NUM_SEQUENCES = 840, 60, 250, 8
LENGTHS = (LENGTH,) * NUM_SEQUENCES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--states", type=int, nargs="+", default=[60, 300, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(ModelConfig(), NUM_INPUTS, NUM_CLASSES, seed=0)
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(sum(LENGTHS), NUM_INPUTS, generator=generator)
    pdf_N = torch.randint(NUM_CLASSES, (sum(LENGTHS),), generator=generator)
    y_NP = torch.randn(sum(LENGTHS), NUM_CLASSES, generator=generator, requires_grad=True)
    losses = {"cross-entropy": lambda y: nn.functional.cross_entropy(y, pdf_N, reduction="sum"), "torch CTC": ctc}
    losses |= {f"{kind}, {states} states": criterion(kind, states, pdf_N) for states in options.states
               for kind in ("lfmmi", "mmi", "smbr")}
    steps: dict[str, Callable[[], None]] = {}
    for name, loss in losses.items():
        steps[f"{name}: step"] = partial(step, loss, model, x_ND)
        steps[f"{name}: loss alone"] = partial(loss_alone, loss, y_NP)
    seconds = timed(steps, options.rounds)
    base = statistics.median(seconds["cross-entropy: step"])
    print("| | ms | spread | of a step with cross-entropy |\n|---|---|---|---|")
    for name, found in seconds.items():
        low, middle, high = 1e3 * min(found), 1e3 * statistics.median(found), 1e3 * max(found)
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {middle / (1e3 * base):.2f} |")


def criterion(kind: Any, num_states: int, pdf_N: Tensor) -> Callable[[Tensor], Tensor]:
    """A loss with a graph that has a loop and three arcs out of every state."""
    random = np.random.default_rng(0)
    source = np.repeat(np.arange(num_states), 4)
    target = np.concatenate([[state, *random.integers(num_states, size=3)] for state in range(num_states)])
    initial = np.full(num_states, -np.inf)
    initial[0] = 0.0
    graph = StateGraph(random.integers(NUM_CLASSES, size=num_states), source, target, np.full(len(source), np.log(0.25)), initial,
                       np.zeros(num_states)).with_leak(0.1 if kind == "lfmmi" else 0.0)
    denominator = Denominator(graph, np.zeros(NUM_CLASSES), np.arange(NUM_CLASSES), np.arange(NUM_CLASSES) == 0)
    objective = SequenceObjective(ObjectiveConfig(kind=kind), denominator)
    log_weight_B = torch.zeros(NUM_SEQUENCES, dtype=torch.float64)
    return lambda y_NP: objective(y_NP, pdf_N, LENGTHS, log_weight_B)


def ctc(y_NP: Tensor) -> Tensor:
    """Transcripts of 30 symbols."""
    log_TBP = y_NP.log_softmax(dim=1).unflatten(0, (NUM_SEQUENCES, LENGTH)).transpose(0, 1)
    targets = torch.arange(30).remainder(NUM_CLASSES - 1).add(1).expand(NUM_SEQUENCES, 30)
    sizes = torch.full((NUM_SEQUENCES,), LENGTH)
    return nn.functional.ctc_loss(log_TBP, targets, sizes, torch.full((NUM_SEQUENCES,), 30), reduction="sum")


def step(loss: Callable[[Tensor], Tensor], model: nn.Module, x_ND: Tensor) -> None:
    loss(model(x_ND)).backward()


def loss_alone(loss: Callable[[Tensor], Tensor], y_NP: Tensor) -> None:
    loss(y_NP).backward()


def timed(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds by step; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
