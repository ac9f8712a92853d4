"""Sequence training: objectives of complete sequences, such as lattice-free MMI."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader
from ngsgd.sequence.archives import SequenceReader
from ngsgd.sequence.objectives import Denominator, SequenceObjective
from ngsgd.tasks.frames import FrameClassification, with_accuracy
from ngsgd.training.task import BatchLoss


class SequenceTraining(FrameClassification):
    """Chunks of utterances, scored against a denominator graph.

    Held-out scores are those of single frames: results are compared by them, but a drop of the
    average is not divergence, because the objf of single frames is not what is trained.
    """

    optimizes_held_out_objf = False

    def __init__(self, config: RunConfig, frames: EgsReader, sequences: SequenceReader, denominator: Denominator,
                 device: torch.device | None = None) -> None:
        super().__init__(config, frames, device, sequences)
        self._denominator = denominator

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        logits_NP = model(data.x_ND)
        loss = self._criterion(logits_NP, data.pdf_N, data.lengths, data.log_weight_B)
        return with_accuracy(loss, logits_NP, data)

    @cached_property
    def _criterion(self) -> SequenceObjective:
        return SequenceObjective(self.config.objective, self._denominator, device=self.device)
