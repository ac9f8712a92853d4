"""Averages of parameters: sums run in float64, so the result hardly depends on the order of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

CHUNK = 1 << 15  # elements; the float64 copies stay in the cache


def average_parameters(state_dicts: Sequence[Mapping[str, Tensor]],
                       weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of models of the same shape; equal weights if `weights` is None.

    Weights are normalised to sum to one (give the number of samples each model was trained on).  Entries that are not
    floating point, such as counters, are taken from the first model.

    >>> import torch
    >>> first, second = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
    >>> average_parameters([first, second], weights=[3, 1])["w"]
    tensor([1.5000, 3.0000])
    """
    shares = shares_of(len(state_dicts), weights)
    for index, other in enumerate(state_dicts[1:], start=1):
        if other.keys() != state_dicts[0].keys():
            raise ValueError(f"state dict {index} has other keys: {sorted(other.keys() ^ state_dicts[0].keys())[:5]}")
    return {name: _mean_tensor([state[name] for state in state_dicts], shares) for name in state_dicts[0]}


def weighted_mean(vectors: Sequence[npt.NDArray[np.float32]], weights: Sequence[float]) -> npt.NDArray[np.float32]:
    """The weighted mean of flat float32 parameter vectors, summed in the order given."""
    shares = shares_of(len(vectors), weights)
    mean = np.empty_like(vectors[0])
    for first in range(0, len(mean), CHUNK):
        part = slice(first, first + CHUNK)
        mean[part] = mean_of_chunk(vectors, shares, part)
    return mean


def pool_variances(model: npt.NDArray[Any], vectors: Sequence[npt.NDArray[Any]], weights: Sequence[float],
                   parts: Sequence[tuple[slice, slice]]) -> None:
    """Sets the variances of `model` to those of the data of all vectors together, in place.

    `parts` are (mean, variance) of each normalisation layer.  The mean of variances alone would miss how far the means lie
    apart; pooled counts, sums and sums of squares, as Kaldi's batch normalisation keeps them, give the same.
    """
    shares = shares_of(len(vectors), weights)
    for mean, variance in parts:
        means = [vector[mean].astype(np.float64) for vector in vectors]
        center = sum(share * one for share, one in zip(shares, means, strict=True))
        model[variance] = sum(share * (vector[variance] + (one - center) ** 2)
                              for share, vector, one in zip(shares, vectors, means, strict=True))


def mean_of_chunk(vectors: Sequence[npt.NDArray[Any]], shares: Sequence[float], part: slice) -> npt.NDArray[np.float64]:
    """The mean of one part of the vectors in float64; `shares` sum to one."""
    # converted first: a Python float times float32 stays float32, and NumPy is slow at converting as it multiplies
    total: npt.NDArray[np.float64] = vectors[0][part].astype(np.float64)
    total *= shares[0]
    for share, vector in zip(shares[1:], vectors[1:], strict=True):
        term = vector[part].astype(np.float64)
        term *= share
        total += term
    return total


def _mean_tensor(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0].clone()
    total = tensors[0].double() * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total.add_(tensor.double(), alpha=share)
    return total.to(tensors[0].dtype)


def shares_of(count: int, weights: Sequence[float] | None) -> list[float]:
    """Weights that sum to one; ValueError for weights that cannot."""
    if count == 0:
        raise ValueError("there is nothing to average")
    weights = [1.0] * count if weights is None else weights
    total = float(sum(weights))
    if len(weights) != count or min(weights) < 0.0 or not 0.0 < total < float("inf"):
        raise ValueError(f"Invalid weights: {list(weights)} for {count} models")
    return [weight / total for weight in weights]
