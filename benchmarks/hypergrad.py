"""Reversible training and hypergradients: exactness, storage, cost and memory.  hypergrad_tuning.py
compares tuning methods.

    python benchmarks/hypergrad.py numbers     1 M parameters, 10,000 steps on random gradients, forward and reversed
    python benchmarks/hypergrad.py network     the same for a network with dropout (half an hour)
    python benchmarks/hypergrad.py cost        a step relative to forward and backward, a hypergradient relative to a run
    python benchmarks/hypergrad.py memory      resident memory at 100 and 1000 steps, and TorchOpt's
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.hypergrad import ExactMomentum, HyperparameterPlan, MinibatchIndex, ModuleTask, hypergradient
from ngsgd.hypergrad.job_replay import PlainGradients
from ngsgd.hypergrad.training_task import Flat

_RUN_STEPS = 40  # of the runs whose cost is compared


def tell(**figures: Any) -> None:
    """One line of results."""
    print(json.dumps(figures), flush=True)


# Exactness ----------------------------------------------------------------------------------------


def numbers(num_steps: int) -> None:
    """Three layers, rates that decay and oscillate, momenta from 0.5 to 0.99; the digest of every
    step, and the start after reversal.
    """
    sizes = (300_000, 400_001, 299_999)
    first, groups = 0, []
    for size in sizes:
        groups.append(slice(first, first := first + size))
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(first, generator=random)
    gradients = [torch.randn(first, generator=random) for _ in range(7)]

    def settings(t: int) -> tuple[list[float], list[float]]:
        decay = 0.1 * math.exp(-3.0 * t / num_steps)
        return ([decay * (1.0 + 0.5 * math.sin(t / 7.0 + layer)) for layer in range(3)],
                [0.9 + 0.09 * math.sin(t / 50.0), 0.745 + 0.245 * math.sin(t / 31.0), 0.98])
    state, digests = ExactMomentum(weights, groups), []
    began = time.perf_counter()
    for t in range(num_steps):
        digests.append(state.digest())
        state.step(gradients[t % 7], *settings(t))
    forward_s, stored = time.perf_counter() - began, state.spill_bytes
    for t in reversed(range(num_steps)):
        state.undo_x(settings(t)[0])
        state.undo_v(gradients[t % 7])
        assert state.digest() == digests[t], t
    bound = sum(size / first * -math.log2(settings(t)[1][layer]) for t in range(num_steps) for layer, size in enumerate(sizes))
    tell(what="numbers", steps=num_steps, weights_equal=torch.equal(state.weights(), weights),
         velocity_zero=not state.u_P.any().item(),
         bits_per_parameter_step=8 * stored / first / num_steps, bound=bound / num_steps, forward_s=forward_s,
         reverse_s=time.perf_counter() - began - forward_s)


def network(num_steps: int) -> None:
    """440-512x3-576 with dropout 0.1, batch 64, on random data: the digest and the loss of every
    step.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(2) for part in (nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))]
    module = nn.Sequential(nn.Linear(440, 512), nn.ReLU(), nn.Dropout(0.1), *layers, nn.Linear(512, 576))
    random = torch.Generator().manual_seed(1)
    x_ND, y_N = torch.randn(4096, 440, generator=random), torch.randint(0, 64, (4096,), generator=random)
    losses: list[float] = []

    def batch(place: MinibatchIndex) -> tuple[Tensor, ...]:
        first = 64 * (place.step % 64)
        return x_ND[first:first + 64], y_N[first:first + 64]

    def loss(output: Tensor, rows: tuple[Tensor, ...], _: Tensor | None) -> Tensor:
        value = nn.functional.cross_entropy(output, rows[1])
        losses.append(float(value.detach()))
        return value
    task = ModuleTask(module, batch, loss, [])
    flat = Flat.of(task)
    state = ExactMomentum(flat.flatten(list(task.start.values())), flat.groups)
    plain, start, num_layers = PlainGradients(task, flat), state.weights().clone(), len(flat.groups)

    def rates(t: int) -> list[float]:
        return [0.1 * math.exp(-2.3 * t / num_steps) * (1.0 + 0.2 * math.sin(t / 9.0 + layer)) for layer in range(num_layers)]
    digests, began = [], time.perf_counter()
    for t in range(num_steps):
        digests.append(state.digest())
        state.step(plain.forward(state.weights(), MinibatchIndex(0, 0, t), None), rates(t),
                   [0.9] * num_layers)
    forward_s, stored, there = time.perf_counter() - began, state.spill_bytes, list(losses)
    losses.clear()
    for t in reversed(range(num_steps)):
        state.undo_x(rates(t))
        state.undo_v(plain.reverse(state.weights(), MinibatchIndex(0, 0, t), None).direction_P)
        assert state.digest() == digests[t], t
    tell(what="network", steps=num_steps, parameters=flat.size, weights_equal=torch.equal(state.weights(), start),
         losses_equal=there == losses[::-1], first_loss=there[0], last_loss=statistics.fmean(there[-64:]),
         bits_per_parameter_step=8 * stored / flat.size / num_steps, bound=-math.log2(0.9), forward_s=forward_s,
         reverse_s=time.perf_counter() - began - forward_s)


# Cost ---------------------------------------------------------------------------------------------


def drawn_task(sizes: list[int], batch: int) -> ModuleTask:
    """A ReLU network on random data."""
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    random = torch.Generator().manual_seed(1)
    x_ND, y_N = torch.randn(8 * batch, sizes[0], generator=random), torch.randint(0, sizes[-1], (8 * batch,), generator=random)

    def rows(place: MinibatchIndex) -> tuple[Tensor, ...]:
        first = batch * (place.step % 8)
        return x_ND[first:first + batch], y_N[first:first + batch]

    def loss(output: Tensor, of: tuple[Tensor, ...], _: Tensor | None) -> Tensor:
        return nn.functional.cross_entropy(output, of[1])
    return ModuleTask(nn.Sequential(*layers), rows, loss, [(x_ND[:batch], y_N[:batch])])


def plain_run(task: ModuleTask, num_steps: int) -> None:
    """The same training with PyTorch's SGD."""
    model = copy.deepcopy(task.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(num_steps):
        x_ND, y_N = task.batch(MinibatchIndex(0, 0, step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_ND), y_N).backward()
        optimizer.step()


def seconds(action: Callable[[], Any]) -> float:
    """CPU seconds of this process, independent of other processes."""
    began = time.process_time()
    action()
    return time.process_time() - began


def cost(rounds: int) -> None:
    """440-512x4-2000, minibatch 256, one thread, CPU time: medians (and quartiles) of rounds in
    which each is measured once.
    """
    task = drawn_task([440, 512, 512, 512, 512, 2000], 256)
    flat = Flat.of(task)
    plain, start_P = PlainGradients(task, flat), flat.flatten(list(task.start.values()))
    states = {engine: ExactMomentum(start_P, flat.groups, engine=engine) for engine in ("fused", "eager")}
    grad_P, num_layers = plain.forward(start_P, MinibatchIndex(0, 0, 0), None), len(flat.groups)
    found: dict[str, list[float]] = {"forward_backward": [], "fused": [], "eager": []}
    for index in range(rounds):
        found["forward_backward"].append(seconds(functools.partial(plain.forward, start_P,
                                                                   MinibatchIndex(0, 0,
                                                                                  index), None)))
        for engine, state in states.items():
            found[engine].append(seconds(functools.partial(state.step, grad_P, [0.01] * num_layers, [0.9] * num_layers)))
    shares = {engine: [step / both for step, both in zip(found[engine], found["forward_backward"], strict=True)]
              for engine in states}
    plan, ratios = HyperparameterPlan.constant(_RUN_STEPS, num_layers, lr=0.1), []
    for _ in range(max(1, rounds // 10)):
        plain_s = seconds(lambda: plain_run(task, _RUN_STEPS))
        whole_s = seconds(lambda: hypergradient(task, plan, "reversible"))
        ratios.append(2.0 * whole_s / (plain_s + seconds(lambda: plain_run(task, _RUN_STEPS))))
    tell(what="cost", parameters=flat.size, ms={name: 1e3 * statistics.median(values) for name, values in found.items()},
         **{f"{engine}_share": spread(values) for engine, values in shares.items()}, hypergradient_in_plain_runs=spread(ratios))


def spread(values: list[float]) -> list[float]:
    """Median, and lower and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return [middle, low, high]


def memory() -> None:
    """Peak resident memory above that of torch and one baseline run of 2 steps, in separate
    processes; 0.15 M parameters.
    """
    for method, num_steps in (("reversible", 100), ("reversible", 1000), ("torchopt", 100), ("torchopt", 300)):
        done = subprocess.run([sys.executable, __file__, "memory-of", "--method", method, "--steps", str(num_steps)], check=False,
                              capture_output=True, text=True)
        print(done.stdout.strip() or done.stderr[-300:], flush=True)


def memory_of(method: str, num_steps: int) -> None:
    task = drawn_task([200, 256, 256, 128], 32)

    def ours(steps: int) -> float:
        return float(hypergradient(task, HyperparameterPlan.constant(steps, 3, lr=0.1),
                                   "reversible").lr_TG.sum())

    def theirs(steps: int) -> float:
        import torchopt

        model, lr = copy.deepcopy(task.module), torch.tensor(0.01, requires_grad=True)
        optimizer = torchopt.MetaSGD(model, lr=lr, momentum=0.9)
        for step in range(steps):
            x_ND, y_N = task.batch(MinibatchIndex(0, 0, step))
            optimizer.step(nn.functional.cross_entropy(model(x_ND), y_N))
        x_ND, y_N = task._validation[0]
        return float(torch.autograd.grad(nn.functional.cross_entropy(model(x_ND), y_N), lr)[0])
    run = ours if method == "reversible" else theirs
    plain_run(task, 2)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(num_steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = sum(p.numel() for p in task.start.values())
    tell(what="memory", method=method, steps=num_steps, parameters=parameters, base_mb=base / 1024, peak_mb=peak / 1024)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "numbers": lambda options: numbers(options.steps or 10_000),
    "network": lambda options: network(options.steps or 10_000),
    "cost": lambda options: cost(options.rounds),
    "memory": lambda options: memory(),
    "memory-of": lambda options: memory_of(options.method, options.steps),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--method", default="reversible", choices=("reversible", "torchopt"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
