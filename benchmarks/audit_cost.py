"""Cost of the audit of silent data corruption: paired runs with and without `failure.audit_every`.

    python benchmarks/audit_cost.py [PAIRS] [EVERY]

Four worker processes train one job each per outer iteration. A job waits for a fixed time instead
of computing, so that other programs on the machine change it little; all work of the coordinator
and all messages are real. The jobs of a run are a multiple of EVERY, so each run has the mean cost.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import ngsgd
from ngsgd.files import read_json_lines
from ngsgd.tasks import DatasetTask

NUM_WORKERS, MINIBATCHES, MINIBATCH_S = 4, 4, 0.1
# examples of a minibatch, and inputs of a model of a million parameters
_SIZE, _DIM = 8, 1000


def _loss(model: nn.Module, batch: Any) -> Tensor:
    if model.training:
        time.sleep(MINIBATCH_S)
    return mse_loss(model(batch[0]), batch[1])


def make_task() -> DatasetTask:
    """One shard of few minibatches for each job of an outer iteration."""
    examples = torch.zeros(NUM_WORKERS * MINIBATCHES * _SIZE, _DIM)
    return DatasetTask(TensorDataset(examples, examples), lambda: nn.Linear(_DIM, _DIM), _loss, num_shards=NUM_WORKERS,
                       validation=0.05)


def seconds(every: int, num_outer_iters: int, folder: str) -> tuple[float, int]:
    """Duration of the outer iterations, and number of audited jobs, of one run."""
    run = ngsgd.train(make_task, num_workers=NUM_WORKERS, output_dir=folder, num_epochs=num_outer_iters, batch_size=_SIZE, lr=1e-4,
                      optimizer="sgd", quiet=True, failure={"audit_every": every}, combination="none")
    steps = [line for line in read_json_lines(run.folder.events) if line["event"] == "outer_iteration"]
    # the first one includes the warm-up of the workers
    return steps[-1]["elapsed_s"] - steps[0]["elapsed_s"], sum(step.get("num_audited", 0) for step in steps)


def main() -> None:
    pairs, every = (int(sys.argv[1]) if len(sys.argv) > 1 else 3), (int(sys.argv[2]) if len(sys.argv) > 2 else 100)
    found = []
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            order = (0, every) if pair % 2 == 0 else (every, 0)
            by_every = {one: seconds(one, every, str(Path(folder) / str(one))) for one in order}
        (without, _), (with_audit, num_audited) = by_every[0], by_every[every]
        found.append(100 * (with_audit / without - 1))
        print(f"{without:.2f} s without, {with_audit:.2f} s with {num_audited} audited jobs: {found[-1]:+.2f} %", flush=True)
    print(f"audit_every={every} costs {statistics.median(found):.2f} % (median of {pairs} pairs, {min(found):.2f} to "
          f"{max(found):.2f})")


if __name__ == "__main__":
    main()
