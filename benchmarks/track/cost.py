"""Time of a training step of each entry, compared with plain SGD in the same process.

Blocks of the entry and of SGD alternate on the same minibatches of random numbers with the network
of `digits`. The ratio is the median over pairs of blocks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.paper.cells import UNLIMITED
from benchmarks.track.tasks import MINIBATCH
from benchmarks.track.training import Entry, Step, make_step
from ngsgd.config import ModelConfig
from ngsgd.models import build_model

COSTS = Path(__file__).parent / "results" / "cost.json"
_INPUTS, _CLASSES = 440, 73
# minibatches of a block, a multiple of 48 and 64, the longest intervals; pairs of blocks
_BLOCK, _PAIRS, _WARM_UP = 192, 5, 1
_PLAIN = Entry("sgd", ("optimizer=sgd", *UNLIMITED), 0.0)


def measure(entries: Sequence[Entry]) -> None:
    """Print and store the ratio of each entry."""
    costs = json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.exists() else {}
    for entry in entries:
        costs[entry.name] = round(_ratio(entry), 3)
        print(entry.name, costs[entry.name], flush=True)
        COSTS.parent.mkdir(exist_ok=True)
        COSTS.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")


def _ratio(entry: Entry) -> float:
    own, plain = (make_step(_model(), one, 0) for one in (entry, _PLAIN))
    x, pdfs = torch.randn(_BLOCK, MINIBATCH, _INPUTS), torch.randint(_CLASSES, (_BLOCK, MINIBATCH))
    pairs = [(_seconds(own, x, pdfs), _seconds(plain, x, pdfs)) for _ in range(_WARM_UP + _PAIRS)]
    return statistics.median(first / second for first, second in pairs[_WARM_UP:])


def _model() -> nn.Module:
    return build_model(ModelConfig(kind="relu", num_layers=4, hidden_dim=256), _INPUTS, _CLASSES, 0)


def _seconds(step: Step, x: Tensor, pdfs: Tensor) -> float:
    began = time.process_time()
    for x_NW, pdfs_N in zip(x, pdfs, strict=True):
        step(x_NW, pdfs_N, 1e-4)
    return time.process_time() - began
