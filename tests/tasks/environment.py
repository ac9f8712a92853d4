"""A task that writes down the environment of each process that trains it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ngsgd.tasks import DatasetTask
from tests.tasks import blobs


def make_task(folder: str) -> DatasetTask:
    """The task of `blobs`; the first loss of a process writes `PID.json` into `folder`."""
    file = Path(folder) / f"{os.getpid()}.json"

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not file.exists():
            file.write_text(json.dumps(dict(os.environ)))
        return blobs.mean_loss(model, batch)
    return DatasetTask(blobs.dataset(), blobs.make_model, loss, shard_size=240, num_eval_examples=50)
