"""The tasks of the track: data in memory, network, target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.learning import Frames
from ngsgd.launcher.config.compose import compose
from ngsgd.models import build_model
from ngsgd.pipeline.prepare import prepare

MINIBATCH = 256


@dataclass(frozen=True)
class TrackTask:
    """A task: settings of `ngsgd train` for data and network, and the target of the track."""

    settings: tuple[str, ...]
    # validation cross-entropy, nats per frame
    target: float
    # standard deviation over seeds of AdamW near the target
    sigma: float
    needs_source: bool = False


TASKS = {
    # synthetic digits of 95 voices, 73 classes, 4 layers of 256
    "digits": TrackTask(("recipe=digits", "model=relu"), target=0.775, sigma=0.003),
    # 13 cepstra, 102 states, 4 layers of 256
    "an4": TrackTask(("recipe=an4", "model=relu", "model.hidden_dim=256", "model.dropout_schedule=''"), target=0.75,
                     sigma=0.006, needs_source=True),
}


def minibatches(frames: Frames, num_steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches of new random orders of all frames; the rest of an order is omitted."""
    generator = torch.Generator().manual_seed(1000 + seed)
    per_epoch = len(frames) // MINIBATCH
    for step in range(num_steps):
        if step % per_epoch == 0:
            order_T = torch.randperm(len(frames), generator=generator)
        first = step % per_epoch * MINIBATCH
        yield frames.minibatch(order_T[first:first + MINIBATCH])


class LoadedTask:
    """The frames of a task, prepared once and cached."""

    def __init__(self, name: str, cache: Path, source: str) -> None:
        task = TASKS[name]
        words = [f"data.source={source}"] if task.needs_source else []
        self.config = compose([*task.settings, *words, f"data.cache_dir={cache}", "cluster=in_process"])
        corpus = prepare(self.config, print).corpus
        egs = self.config.egs
        self.train, self.valid = (
            Frames.of(np.asarray(one.features_TD), one.pdf_T, one.offsets, corpus.num_pdfs,
                      left=egs.left_context, right=egs.right_context)
            for one in (corpus.train.frames, corpus.valid.frames))

    def model(self, seed: int) -> nn.Module:
        """Return the network with the initial values of a seed."""
        return build_model(self.config.model, self.train.windows_PW.shape[1], self.train.num_pdfs, seed)
