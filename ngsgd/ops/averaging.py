"""Averages of parameters: sums run in float64, so the result hardly depends on the order of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

_CHUNK = 1 << 18  # elements; keeps the float64 copy in the cache


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
    shares = _shares(len(state_dicts), weights)
    for index, other in enumerate(state_dicts[1:], start=1):
        if other.keys() != state_dicts[0].keys():
            raise ValueError(f"state dict {index} has other keys: {sorted(other.keys() ^ state_dicts[0].keys())[:5]}")
    return {name: _mean_tensor([state[name] for state in state_dicts], shares) for name in state_dicts[0]}


def weighted_mean(vectors: Sequence[npt.NDArray[np.float32]], weights: Sequence[float]) -> npt.NDArray[np.float32]:
    """The weighted mean of flat float32 parameter vectors, summed in the order given."""
    shares = _shares(len(vectors), weights)
    mean = np.empty_like(vectors[0])
    for first in range(0, len(mean), _CHUNK):
        part = slice(first, first + _CHUNK)
        # dtype matters: a Python float times float32 stays float32
        total = np.multiply(vectors[0][part], shares[0], dtype=np.float64)
        for share, vector in zip(shares[1:], vectors[1:], strict=True):
            total += np.multiply(vector[part], share, dtype=np.float64)
        mean[part] = total
    return mean


def _mean_tensor(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0].clone()
    total = tensors[0].double() * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total.add_(tensor.double(), alpha=share)
    return total.to(tensors[0].dtype)


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    if count == 0:
        raise ValueError("there is nothing to average")
    weights = [1.0] * count if weights is None else weights
    total = float(sum(weights))
    if len(weights) != count or min(weights) < 0.0 or not 0.0 < total < float("inf"):
        raise ValueError(f"Invalid weights: {list(weights)} for {count} models")
    return [weight / total for weight in weights]
