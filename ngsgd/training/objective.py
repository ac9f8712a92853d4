"""What is minimised.  Letters: N rows (frames), P classes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ngsgd.config import ObjectiveConfig
from ngsgd.data.reader import Minibatch
from ngsgd.errors import ConfigError
from ngsgd.sequence.archives import SequenceMinibatch
from ngsgd.sequence.objectives import Denominator, SequenceObjective


def summed_loss(logits_NP: Tensor, pdf_N: Tensor, weight_N: Tensor | None) -> Tensor:
    """Minus the objf, summed over the frames, each times its weight (Kaldi's posterior weights); not divided by anything."""
    if weight_N is None:
        return nn.functional.cross_entropy(logits_NP, pdf_N, reduction="sum")
    return (nn.functional.cross_entropy(logits_NP, pdf_N, reduction="none") * weight_N).sum()


class Objective(Protocol):
    """Minus the objf of a minibatch, summed over its frames."""

    def __call__(self, logits_NP: Tensor, minibatch: Minibatch | SequenceMinibatch) -> Tensor: ...


class CrossEntropy:
    """Frame by frame."""

    def __call__(self, logits_NP: Tensor, minibatch: Minibatch | SequenceMinibatch) -> Tensor:
        return summed_loss(logits_NP, minibatch.pdf_N, minibatch.weight_N)


class OfSequences:
    """A criterion of whole sequences."""

    def __init__(self, criterion: SequenceObjective) -> None:
        self.criterion = criterion

    def __call__(self, logits_NP: Tensor, minibatch: Minibatch | SequenceMinibatch) -> Tensor:
        assert isinstance(minibatch, SequenceMinibatch)
        return self.criterion(logits_NP, minibatch.pdf_N, minibatch.lengths, minibatch.log_weight_B)


def make_objective(config: ObjectiveConfig, denominator: Denominator | None, device: torch.device) -> Objective:
    """The run's."""
    if config.kind == "ce":
        return CrossEntropy()
    if denominator is None:
        raise ConfigError(f"objective.kind is {config.kind}, and this works with single frames alone; give it objective=ce.")
    return OfSequences(SequenceObjective(config, denominator, device=device))


def on_device(minibatch: Minibatch | SequenceMinibatch, device: torch.device) -> Minibatch | SequenceMinibatch:
    """The minibatch with its tensors there."""
    moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in minibatch._asdict().items()
                             if isinstance(value, Tensor)}
    return minibatch._replace(**moved)
