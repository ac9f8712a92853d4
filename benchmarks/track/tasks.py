"""The tasks of the track: data in memory, network, target.

Letters: T frames of a set, P padded frames, D features of a frame, W = (left + 1 + right) D inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ngsgd.data.frames import FrameSet
from ngsgd.launcher.config.compose import compose
from ngsgd.models import build_model
from ngsgd.pipeline.prepare import prepare

MINIBATCH = 256
_EVALUATED_AT_ONCE = 4096


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


@dataclass(frozen=True)
class Frames:
    """One set in memory, unspliced."""

    # a view: the windows of neighboring frames share memory
    windows_PW: Tensor
    # row of windows_PW that is centered on each frame
    first_rows_T: Tensor
    pdfs_T: Tensor

    @classmethod
    def of(cls, frames: FrameSet, left: int, right: int) -> Frames:
        """Repeat the first and the last frame of each utterance as context."""
        offsets = frames.offsets
        x_TD = np.asarray(frames.features_TD)
        padded = [np.pad(x_TD[first:end], ((left, right), (0, 0)), mode="edge")
                  for first, end in itertools.pairwise(offsets)]
        flat = torch.from_numpy(np.concatenate(padded)).flatten()
        rows_T = np.arange(len(x_TD)) + np.repeat(np.arange(len(offsets) - 1) * (left + right), np.diff(offsets))
        return cls(flat.unfold(0, (left + 1 + right) * x_TD.shape[1], x_TD.shape[1]), torch.from_numpy(rows_T),
                   torch.from_numpy(frames.pdf_T.astype(np.int64)))

    def __len__(self) -> int:
        return len(self.pdfs_T)

    def minibatch(self, indices_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return spliced inputs and classes of these frames."""
        return self.windows_PW.index_select(0, self.first_rows_T[indices_N]), self.pdfs_T[indices_N]

    def minibatches(self, num_steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield minibatches of new random orders of all frames; the rest of an order is omitted."""
        generator = torch.Generator().manual_seed(1000 + seed)
        per_epoch = len(self) // MINIBATCH
        for step in range(num_steps):
            if step % per_epoch == 0:
                order_T = torch.randperm(len(self), generator=generator)
            first = step % per_epoch * MINIBATCH
            yield self.minibatch(order_T[first:first + MINIBATCH])

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Cross-entropy over all frames, nats per frame."""
        total = torch.zeros((), dtype=torch.float64)
        for indices_N in torch.arange(len(self)).split(_EVALUATED_AT_ONCE):
            x_NW, pdfs_N = self.minibatch(indices_N)
            total += cross_entropy(model(x_NW), pdfs_N, reduction="sum")
        return float(total) / len(self)


class LoadedTask:
    """The frames of a task, prepared once and cached."""

    def __init__(self, name: str, cache: Path, source: str) -> None:
        task = TASKS[name]
        words = [f"data.source={source}"] if task.needs_source else []
        self.config = compose([*task.settings, *words, f"data.cache_dir={cache}", "cluster=in_process"])
        corpus = prepare(self.config, print).corpus
        egs = self.config.egs
        self.train, self.valid = (Frames.of(one.frames, egs.left_context, egs.right_context)
                                  for one in (corpus.train, corpus.valid))
        self.num_pdfs = corpus.num_pdfs

    def model(self, seed: int) -> nn.Module:
        """Return the network with the initial values of a seed."""
        return build_model(self.config.model, self.train.windows_PW.shape[1], self.num_pdfs, seed)
