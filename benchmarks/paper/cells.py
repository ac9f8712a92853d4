"""The experiments: tasks, methods, outer optimizers, numbers of jobs, seeds; every cell is one
`ngsgd train`.

A method's learning rate is the best of its rates by validation objf on seed 0 with one job: grids
of five for all, a factor of 2 apart.  With more jobs the effective rate is the same; the
service sets the rate of a job to N / gain times as much.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

JOBS = (1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
# effective, per frame, at the start; a tenth of it at the end
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008)
# whose steps do not depend on the size of the gradient
_OWN_RATES = {"adam": (0.0001, 0.0002, 0.0004, 0.0008, 0.0016)}
_FINAL = 0.1

# steps of the papers, without the limits of NG-SGD
UNLIMITED = ("optimizer.max_change=0", "optimizer.max_param_change=0")
METHODS: dict[str, list[str]] = {
    "sgd": ["optimizer=sgd"],
    # a job here is too short for new Fisher estimates
    "online-ng": ["optimizer=ngsgd", "optimizer.curvature_state=keep"],
    "adam": ["optimizer=adam", "optimizer.graft=gradient"],
    # with the limits of NG-SGD, and steps as long as the gradient
    "adam-limits": ["optimizer=adam", "optimizer.graft=gradient"],
    "adamw-limits": ["optimizer=adamw", "optimizer.graft=gradient"],
    "muon-limits": ["optimizer=muon", "optimizer.graft=gradient"],
    "shampoo-limits": ["optimizer=shampoo"],
    "adamw-plain": ["optimizer=adamw", *UNLIMITED, "optimizer.curvature_state=keep"],
    "muon-plain": ["optimizer=muon", *UNLIMITED, "optimizer.beta1=0.9", "optimizer.curvature_state=keep"],
    "soap-plain": ["optimizer=soap", *UNLIMITED],
    "kfac": ["optimizer=kfac", "optimizer.curvature_state=keep"],
}
# with minibatches of 64 frames: the average over many jobs reduces the noise of a gradient anyway
METHODS |= {"online-ng-64": [*METHODS["online-ng"], "schedule.minibatch_size=64"],
            "muon-64": [*METHODS["muon-plain"], "schedule.minibatch_size=64"],
            # jobs begin with the mean of the momentum of all jobs
            "muon-32": ["optimizer=muon", *UNLIMITED, "optimizer.beta1=0.95", "optimizer.curvature_state=average",
                        "schedule.minibatch_size=32"]}
MATRIX_METHODS = ("sgd", "adam", "online-ng")
# Synchronous baselines on as many machines. "plain" is as their authors run them; the search then
# doubles or halves until the best rate is not the last one. With limits, the rate matters little.
SYNCHRONOUS_RATES = {"adamw-plain": (0.001, 0.002, 0.004), "muon-plain": (0.01, 0.02, 0.04)}
LIMITED = ("adam-limits", "adamw-limits", "muon-limits", "shampoo-limits")
OUTERS = {
    "average": ["outer=average"],
    "sqrt-gain": ["outer=bmuf", "outer.gain=0"],
    "diloco": ["outer=diloco"],
    "nesterov 0.5": ["outer=diloco", "outer.lr=1", "outer.momentum=0.5"],
    "gain 4, half the rate": ["outer=bmuf", "outer.gain=4"],
    "gain 4, constant rate": ["outer=bmuf", "outer.gain=4"],
    "gain 4, a third of the rate": ["outer=bmuf", "outer.gain=4"],
}
# of the initial rate, at the end
_FINALS = {"gain 4, half the rate": 0.5, "gain 4, constant rate": 1.0, "gain 4, a third of the rate": 0.325}
# the others have a rate of their own (many_jobs.py)
MATRIX_OUTERS = ("average", "sqrt-gain")
FRAMES_PER_JOB = 2048

Words = list[str]
Variant = Callable[[str, int], Words]   # of a task and a number of jobs


@dataclass(frozen=True)
class Task:
    """The data, network and length of training."""

    net: Words
    epochs: int
    minibatch: int
    decode: Words
    needs_source: bool = False

    def settings(self) -> Words:
        return [*self.net, f"schedule.num_epochs={self.epochs}", f"schedule.minibatch_size={self.minibatch}",
                f"egs.samples_per_iter={FRAMES_PER_JOB}", *self.decode]


_AN4 = ["decode.oracle=false", "decode.acoustic_scales=[0.0833,0.1,0.125,0.1667]", "decode.word_penalties=[0.0,0.5]"]
_DIGITS = ["decode.acoustic_scales=[0.1,0.15,0.2]", "decode.word_penalties=[0.0,4.0]"]
TASKS = {
    # one splice of +-7 cepstra, 102 states; 2048 frames a job, so that 16 jobs still average about
    # 28 times
    "an4-relu": Task(["recipe=an4", "model=relu", "model.hidden_dim=256", "model.dropout_schedule=''"], 4, 128, _AN4, True),
    "digits": Task(["recipe=digits", "model=relu", "data.train_minutes=40"], 2, 256, _DIGITS),
    # large enough that 16 jobs average more than a hundred times
    "digits-10h": Task(["recipe=digits", "model=relu", "data.train_minutes=600"], 1, 256, _DIGITS),
}
# ten times as much speech for validation and test, so that WER depends less on the seed
_LARGE_SETS = [*TASKS["digits"].net, "data.valid_minutes=50", "data.test_minutes=100"]
DIGITS_EPOCHS = {f"digits-{epochs}-epochs": epochs for epochs in (2, 3, 4, 5)}
TASKS |= {name: replace(TASKS["digits"], net=_LARGE_SETS, epochs=epochs) for name, epochs in DIGITS_EPOCHS.items()}

# remedies for the loss of averaging over many jobs (tried with online-ng)
REMEDIES: dict[str, Variant] = {
    "gain 1.5 sqrt(N)": lambda task, num_jobs: ["outer=bmuf", f"outer.gain={1.5 * num_jobs ** 0.5:.3f}"],
    "half the frames per iteration": lambda task, num_jobs: [*OUTERS["sqrt-gain"], "egs.samples_per_iter=1024"],
    "ramp from a quarter": lambda task, num_jobs: [*OUTERS["sqrt-gain"], f"schedule.num_jobs_initial={max(1, num_jobs // 4)}"],
    "Fisher state fresh in every job": lambda task, num_jobs: [*OUTERS["sqrt-gain"], "optimizer.curvature_state=reset"],
}


def _outer_at(outer: str, frames: int) -> Variant:
    return lambda task, num_jobs: [*OUTERS[outer], f"egs.samples_per_iter={frames}"]


# frames of a job between two averagings; 1024 is a remedy, 2048 the matrix
PERIODS: dict[str, Variant] = {f"{frames} frames a job": _outer_at("sqrt-gain", frames) for frames in (512, 4096, 8192)}


def _synchronous(task: str, num_jobs: int, frames: int) -> Words:
    """Machines that sum their gradients after `frames` frames each: one job with a minibatch as
    large as all of theirs.
    """
    return ["outer=average", "cluster.num_workers=1", f"schedule.minibatch_size={frames * num_jobs}",
            f"egs.samples_per_iter={FRAMES_PER_JOB * num_jobs}"]


def _compressed(outer: str, codec: str) -> Variant:
    return lambda task, num_jobs: [*OUTERS[outer], f"cluster.compression={codec}"]


COMPRESSED: dict[str, Variant] = {f"{outer}, {codec}": _compressed(outer, codec)
                                  for outer in ("average", "nesterov 0.5") for codec in ("int8", "sparse")}
SYNCHRONOUS: dict[str, Variant] = {
    "synchronous, equal frames": lambda task, num_jobs: _synchronous(task, num_jobs, TASKS[task].minibatch),
    "synchronous, equal bytes": lambda task, num_jobs: _synchronous(task, num_jobs, FRAMES_PER_JOB),
}
CONTROLS: dict[str, Variant] = {
    **SYNCHRONOUS,
    "one of the jobs alone": lambda task, num_jobs: ["outer=average", "cluster.num_workers=1",
                                                     f"schedule.num_epochs={TASKS[task].epochs / num_jobs:g}"],
}

# lines of the communication frontier: optimizer, outer optimizer, first rate of the sweep
DILOCO = "DiLoCo"
FRONTIER = {
    DILOCO: ("adamw-plain", "diloco", 0.0005),
    "AdamW + average": ("adamw-plain", "average", 0.001),
    "MuLoCo": ("muon-plain", "diloco", 0.008),
    "Muon + average": ("muon-plain", "average", 0.008),
    "NG-SGD + nesterov 0.5": ("online-ng", "nesterov 0.5", 0.004),
    "K-FAC + nesterov 0.5": ("kfac", "nesterov 0.5", 0.004),
    "NG-SGD + sqrt-gain": ("online-ng", "sqrt-gain", 0.002),
    "NG-SGD + average": ("online-ng", "average", 0.002),
}
PERIOD_OUTERS = {(outer, frames): f"{outer}, averaged every {frames} frames"
                 for _, outer, _ in FRONTIER.values() for frames in (128, 512, 2048, 8192)}
VARIANTS = {**REMEDIES, **PERIODS, **CONTROLS, **COMPRESSED,
            **{name: _outer_at(*setting) for setting, name in PERIOD_OUTERS.items()}}


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    method: str
    outer: str
    num_jobs: int
    seed: int
    rate: float

    def settings(self) -> list[str]:
        """Arguments of `ngsgd train`, without folders."""
        outer = VARIANTS[self.outer](self.task, self.num_jobs) if self.outer in VARIANTS else OUTERS[self.outer]
        return [*TASKS[self.task].settings(), *METHODS[self.method], "cluster=in_process",
                f"cluster.num_workers={self.num_jobs}", *outer, f"seed={self.seed}",
                f"schedule.lr_initial={self.rate:g}",
                f"schedule.lr_final={self.rate * _FINALS.get(self.outer, _FINAL):g}"]

    def key(self) -> str:
        """The cell with any setting changed."""
        return hashlib.sha256(json.dumps(self.settings()).encode()).hexdigest()[:16]


def grid(task: str, methods: tuple[str, ...]) -> Iterator[Cell]:
    """The search for each method's learning rate."""
    for method in methods:
        for rate in _OWN_RATES.get(method, RATES):
            yield Cell(task, method, "average", 1, 0, rate)


def matrix(task: str, rates: dict[str, float], outers: tuple[str, ...], jobs: tuple[int, ...],
           seeds: tuple[int, ...]) -> Iterator[Cell]:
    """The figure and the table; one job is the same under every outer optimizer of gain one, so it
    runs once.
    """
    for seed, num_jobs, (method, rate) in itertools.product(seeds, jobs, rates.items()):
        for outer in outers if num_jobs > 1 else ("average",):
            yield Cell(task, method, outer, num_jobs, seed, rate)
