"""Cost of the audit of silent data corruption: paired runs with and without `failure.audit_every`.

    python benchmarks/audit_cost.py [PAIRS] [EVERY]

Four worker processes train one job each per outer iteration. A job waits for a fixed time instead
of computing, so that other programs on the machine change it little; all work of the coordinator
and all messages are real. The jobs of a run are a multiple of EVERY, so each run has the mean cost.
The second figure compares the audited outer iteration with the median of the others in its run,
which a changing load of the machine disturbs less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ngsgd
from ngsgd.files import read_json_lines
from ngsgd.tasks import DatasetTask

NUM_WORKERS, MINIBATCHES, MINIBATCH_S = 4, 8, 0.1
# examples of a minibatch, and inputs of a model of a million parameters
_SIZE, _DIM = 8, 1000


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        time.sleep(MINIBATCH_S)
    return mse_loss(model(batch[0]), batch[1])


def _model() -> nn.Module:
    return nn.Linear(_DIM, _DIM)


def make_task() -> DatasetTask:
    """One shard of few minibatches for each job of an outer iteration."""
    examples = torch.zeros(NUM_WORKERS * MINIBATCHES * _SIZE, _DIM)
    held_out = TensorDataset(examples[:_SIZE], examples[:_SIZE])
    return DatasetTask(TensorDataset(examples, examples), _model, _loss, valid=held_out, shard_size=MINIBATCHES * _SIZE)


def durations(every: int, num_outer_iters: int, folder: str) -> tuple[list[float], list[float]]:
    """Seconds of the outer iterations of one run without and with audits."""
    run = ngsgd.train(make_task, num_workers=NUM_WORKERS, output_dir=folder, num_epochs=num_outer_iters, batch_size=_SIZE, lr=1e-4,
                      optimizer="sgd", quiet=True, failure={"audit_every": every}, combination="none")
    steps = [line for line in read_json_lines(run.folder.events) if line["event"] == "outer_iteration"]
    found: tuple[list[float], list[float]] = [], []
    # the first one includes the warm-up of the workers
    for before, step in pairwise(steps):
        found[bool(step.get("num_audited"))].append(step["elapsed_s"] - before["elapsed_s"])
    return found


def main() -> None:
    pairs, every = (int(sys.argv[1]) if len(sys.argv) > 1 else 3), (int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    totals, rounds = [], []
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            order = (0, every) if pair % 2 == 0 else (every, 0)
            runs = {one: durations(one, every, str(Path(folder) / str(one))) for one in order}
        plain, audited = runs[every]
        without, with_audit = sum(runs[0][0]), sum(plain) + sum(audited)
        totals.append(100 * (with_audit / without - 1))
        rounds.append(100 * (sum(audited) / len(audited) / statistics.median(plain) - 1) / every)
        print(f"{without:.2f} s without, {with_audit:.2f} s with audits: {totals[-1]:+.2f} %; median outer iteration "
              f"{statistics.median(runs[0][0]):.3f} s without, {statistics.median(plain):.3f} s with; audited ones "
              f"{', '.join(f'{one:.3f}' for one in audited)} s: {rounds[-1]:.2f} %", flush=True)
    for name, values in (("pairs of runs", totals), ("outer iterations of a run", rounds)):
        print(f"audit_every={every} costs {statistics.median(values):.2f} % ({name}: median of {pairs}, {min(values):.2f} to "
              f"{max(values):.2f})")


if __name__ == "__main__":
    main()
