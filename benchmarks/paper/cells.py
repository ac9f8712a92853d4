"""What is run: tasks, methods, outer optimisers, numbers of jobs, seeds; every cell is one `ngsgd train`.

A method's learning rate is the best of RATES by valid objf on seed 0 with one job: the same grid, hence the same budget of
tuning, for all.  With more jobs the effective rate stays: a job's own rate is N / gain times as high, which the service sees to.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

JOBS = (1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008)   # effective, per frame, at the start; a tenth of it at the end
_FINAL = 0.1

METHODS = {
    "sgd": ["optimizer=sgd"],
    "online-ng": ["optimizer=ngsgd", "optimizer.ng_state=keep"],   # a job here is too short to estimate a Fisher matrix anew
    "simple-ng": ["optimizer=sgd", "preconditioner=simple"],
}
OUTERS = {
    "average": ["outer=average"],
    "sqrt-gain": ["outer=bmuf", "outer.gain=0"],
    "diloco": ["outer=diloco"],
}
# remedies for what averaging over many jobs costs (tried with online-ng); see RESULTS.md
REMEDIES = {
    "gain 1.5 sqrt(N)": lambda num_jobs: ["outer=bmuf", f"outer.gain={1.5 * num_jobs ** 0.5:.3f}"],
    "half the frames per iteration": lambda num_jobs: [*OUTERS["sqrt-gain"], "egs.samples_per_iter=1024"],
    "ramp from a quarter": lambda num_jobs: [*OUTERS["sqrt-gain"], f"schedule.num_jobs_initial={max(1, num_jobs // 4)}"],
}

_SMALL_DECODE = ["decode.oracle=false"]
TASKS = {
    # one splice of +-7 cepstra, 102 states; 2048 frames a job, so that 16 jobs still average some 28 times
    "an4-relu": ["recipe=an4", "model=relu", "model.hidden_dim=256", "model.dropout_schedule=''", "schedule.num_epochs=4",
                 "schedule.minibatch_size=128", "egs.samples_per_iter=2048", *_SMALL_DECODE,
                 "decode.acoustic_scales=[0.0833,0.1,0.125,0.1667]", "decode.word_penalties=[0.0,0.5]"],
    "an4-pnorm": ["recipe=an4", "model=pnorm", "model.hidden_dim=500", "model.dropout_schedule=''", "schedule.num_epochs=4",
                  "schedule.minibatch_size=128", "egs.samples_per_iter=2048", *_SMALL_DECODE,
                  "decode.acoustic_scales=[0.0833,0.1,0.125,0.1667]", "decode.word_penalties=[0.0,0.5]"],
    "digits": ["recipe=digits", "model=relu", "data.train_minutes=40", "schedule.num_epochs=2", "schedule.minibatch_size=256",
               "egs.samples_per_iter=2048", "decode.acoustic_scales=[0.1,0.15,0.2]", "decode.word_penalties=[0.0,4.0]"],
}
NEEDS_SOURCE = ("an4-relu", "an4-pnorm")


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
        """Words for `ngsgd train`, without folders."""
        outer = REMEDIES[self.outer](self.num_jobs) if self.outer in REMEDIES else OUTERS[self.outer]
        return [*TASKS[self.task], *METHODS[self.method], "cluster=in_process", f"cluster.num_workers={self.num_jobs}", *outer,
                f"seed={self.seed}", f"schedule.lr_initial={self.rate:g}", f"schedule.lr_final={self.rate * _FINAL:g}"]

    def key(self) -> str:
        """Changes with any setting."""
        return hashlib.sha256(json.dumps(self.settings()).encode()).hexdigest()[:16]


def grid(task: str, methods: tuple[str, ...]) -> Iterator[Cell]:
    """The search for each method's learning rate."""
    for method, rate in itertools.product(methods, RATES):
        yield Cell(task, method, "average", 1, 0, rate)


def matrix(task: str, rates: dict[str, float], outers: tuple[str, ...], jobs: tuple[int, ...],
           seeds: tuple[int, ...]) -> Iterator[Cell]:
    """The figure and the table; one job is the same under every outer optimiser of gain one, so it is run once."""
    for seed, (method, rate), num_jobs in itertools.product(seeds, rates.items(), jobs):
        for outer in outers if num_jobs > 1 else ("average",):
            yield Cell(task, method, outer, num_jobs, seed, rate)
