"""The task of `blobs` with examples whose loss or gradient is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ngsgd.tasks import DatasetTask
from tests.tasks import blobs

# indices in the dataset; each is a training example
BAD = (17, 401)
# the loss of this example is not finite, although its input is
MARK = 1000.0


def make_task(kind: str = "none") -> DatasetTask:
    """A task with NaN in two examples ("input"), an infinite "loss" or "gradient", or "none".

    "statistics": NaN in two examples, and a model with batch normalization.
    """
    x_ND, y_N = (tensor.clone() for tensor in blobs.dataset().tensors)
    if kind != "none":
        x_ND[list(BAD)] = {"loss": MARK, "gradient": MARK}.get(kind, torch.nan)
    losses = {"loss": infinite_loss, "gradient": infinite_gradient}
    of_kind = make_normalized if kind == "statistics" else make_model
    return DatasetTask(TensorDataset(x_ND, y_N), of_kind, losses.get(kind, blobs.mean_loss), shard_size=60)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(blobs.DIM, 12), nn.ReLU(), nn.Linear(12, blobs.NUM_CLASSES))


def make_normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(blobs.DIM, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, blobs.NUM_CLASSES))


def infinite_loss(model: nn.Module, batch: Any) -> Tensor:
    is_bad_N = batch[0][:, 0] == MARK
    penalty_N = torch.where(is_bad_N, torch.inf, 0.0)
    return nn.functional.cross_entropy(model(batch[0].clamp(max=10.0)), batch[1]) + penalty_N.sum()


def infinite_gradient(model: nn.Module, batch: Any) -> Tensor:
    is_bad_N = batch[0][:, 0] == MARK
    logits_NP = model(batch[0].clamp(max=10.0))
    # the gradient of sqrt at 0 is infinite
    steep: Tensor = torch.sqrt(torch.where(is_bad_N[:, None], logits_NP - logits_NP.detach(), 1.0)).sum() / logits_NP.numel()
    loss: Tensor = nn.functional.cross_entropy(logits_NP, batch[1]) + steep
    return loss
