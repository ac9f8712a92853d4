"""The averaged model on fixed subsets of frames, and the average posterior that decoding divides by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ngsgd.egs.reader import EgsReader, Minibatch
from ngsgd.schedules import Shard
from ngsgd.training.records import SubsetScore

_ROWS_AT_ONCE = 8192
_MIN_PRIOR = 1e-15  # Kaldi's floor of nnet3-am-adjust-priors


@torch.no_grad()
def score_subset(model: nn.Module, subset: Minibatch) -> SubsetScore:
    """Objf per frame and frame accuracy."""
    logits_NP = torch.cat([model(part) for part in subset.x_ND.split(_ROWS_AT_ONCE)])
    objf = -nn.functional.cross_entropy(logits_NP, subset.pdf_N)
    accuracy = (logits_NP.argmax(dim=1) == subset.pdf_N).double().mean()
    return SubsetScore(float(objf), float(accuracy))


@torch.no_grad()
def average_posterior(model: nn.Module, reader: EgsReader, num_frames: int) -> npt.NDArray[np.float64]:
    """Mean posterior of each class over about `num_frames` training frames, floored and normalised (Kaldi's priors)."""
    total_P = torch.zeros(reader.info.num_classes, dtype=torch.float64)
    seen = 0
    for archive in range(reader.info.num_archives):
        for x_ND, _ in reader.minibatches(Shard(archive, 0), _ROWS_AT_ONCE, seed=0, outer_iter=0, job=0):
            wanted_ND = x_ND[:num_frames - seen]
            if not len(wanted_ND):  # a module of the user's own need not know what to do with no rows
                break
            total_P += model(wanted_ND).softmax(dim=1).sum(dim=0, dtype=torch.float64)
            seen += len(wanted_ND)
        if seen >= num_frames:
            break
    prior_P = (total_P / seen).clamp(min=_MIN_PRIOR).numpy()
    return np.asarray(prior_P / prior_P.sum())
