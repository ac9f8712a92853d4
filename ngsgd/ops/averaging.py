"""Averages of parameters in float64, so that results hardly depend on the order of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.errors import DataError

# Elements; the float64 copies fit into the cache.
CHUNK = 1 << 15
# Dtypes whose numbers have a mean: float8_e8m0fnu holds exponents, float4 pairs.
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
DTYPES_WITH_MEAN = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    *(getattr(torch, name) for name in _FLOAT8 if hasattr(torch, name))})


class AveragingError(DataError, ValueError):
    """Models cannot be averaged: keys, shapes or dtypes differ, or numbers are not finite."""


def average_parameters(models: Sequence[Mapping[str, Tensor] | nn.Module],
                       weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Return the weighted mean of models of the same shape.

    Weights are normalized to sum to one; use the number of samples of each model. Values of a model
    with weight 0 do not count. Running variances of batch normalization are pooled with their
    running means, which gives the variance of all data together. Integer entries, such as counters,
    are those of the first model. Entries that are equal in all models, such as masks with
    infinities, stay bitwise equal.

    Args:
        models: state dicts, or modules.
        weights: one per model, at least 0; default equal weights.

    Returns:
        A state dict with the dtypes and devices of the first model.

    Raises:
        AveragingError: keys, shapes or dtypes differ, an entry is no dense tensor or not finite, or
            the weights sum to 0.

    Example:
        >>> import torch
        >>> first, second = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}
        >>> average_parameters([first, second], weights=[3, 1])["w"]
        tensor([1.5000, 3.0000])
    """
    states = [model.state_dict() if isinstance(model, nn.Module) else model for model in models]
    shares = shares_of(len(states), weights)
    for index, state in enumerate(states):
        if not isinstance(state, Mapping):
            raise AveragingError(f"model {index} is a {type(state).__name__}; average_parameters takes a sequence of state dicts "
                                 "(model.state_dict()) or of modules.")
        _require_like(state, states[0], index)
    counted = {index: states[index] for index, share in enumerate(shares) if share}
    weights = [shares[index] for index in counted]
    return {name: _mean_entry(name, counted, weights).to(first.device) if first.dtype in DTYPES_WITH_MEAN
            else first.detach().clone() for name, first in states[0].items()}


def is_statistic(name: str) -> bool:
    """Whether an entry of a state dict is a statistic of the data, as in batch normalization."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _mean_entry(name: str, states: Mapping[int, Mapping[str, Tensor]], shares: Sequence[float]) -> Tensor:
    tensors = [state[name].detach() for state in states.values()]
    mean = f"{name.removesuffix('running_var')}running_mean" if name.rpartition(".")[2] == "running_var" else name
    means = [state[mean].detach() if mean in state else tensors[0] for state in states.values()]
    if len(tensors) > 1 and all(torch.equal(_comparable(one[0]), _comparable(each.to(one[0].device)))
                                for one in (tensors, means) for each in one[1:]):
        return tensors[0].clone()
    for index, tensor in zip(states, tensors, strict=True):
        if not bool(_comparable(tensor).isfinite().all()):
            raise AveragingError(f"entry {name} of state dict {index} has numbers that are not "
                                 "finite; exclude that model.")
    first = tensors[0]
    if mean != name and len(tensors) > 1 and means[0].shape == first.shape:
        vectors = [torch.cat([one.reshape(-1), tensor.reshape(-1)]).double().cpu().numpy()
                   for one, tensor in zip(means, tensors, strict=True)]
        C = first.numel()
        pooled = np.empty(2 * C)
        pool_variances(pooled, vectors, shares, [(slice(0, C), slice(C, 2 * C))])
        return torch.from_numpy(pooled[C:]).view_as(first).to(first)
    exact = torch.complex128 if first.is_complex() else torch.float64
    total = first.to(exact) * shares[0]
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total.add_(tensor.to(first.device, exact), alpha=share)
    return total.to(first.dtype)


def _comparable(tensor: Tensor) -> Tensor:
    """Return values of a dtype that torch can compare: it cannot compare float8 and complex32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.element_size() > 1 else tensor.float()


def _require_like(state: Mapping[str, Tensor], first: Mapping[str, Tensor], index: int) -> None:
    if state.keys() != first.keys():
        raise AveragingError(f"state dict {index} has other keys than state dict 0: {sorted(state.keys() ^ first.keys())[:5]}; "
                             "average models of the same class and options.")
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise AveragingError(f"entry {name} of state dict {index} is a "
                                 f"{type(tensor).__name__}, not a tensor; remove it.")
        if tensor.shape != first[name].shape or tensor.dtype != first[name].dtype:
            raise AveragingError(f"entry {name} of state dict {index} is {_described(tensor)}, and "
                                 f"of state dict 0 {_described(first[name])}; average models of "
                                 "the same shapes and dtypes.")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"of {tensor.dtype} and layout {tensor.layout}"
            raise AveragingError(f"entry {name} of state dict {index} is {kind}; average dense tensors with values.")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


def pool_variances(model: npt.NDArray[Any], vectors: Sequence[npt.NDArray[Any]], weights: Sequence[float],
                   parts: Sequence[tuple[slice, slice]]) -> None:
    """Set the variances of `model` to those of the data of all vectors together, in place.

    The mean of the variances alone would ignore the distance of the means. Pooled counts, sums and
    sums of squares, as in Kaldi's batch normalization, give the same result.

    Args:
        model: vector to change.
        vectors: vectors of the jobs.
        weights: one per vector.
        parts: (mean, variance) slices of each normalization layer.
    """
    shares = shares_of(len(vectors), weights)
    for mean, variance in parts:
        means = [vector[mean].astype(np.float64) for vector in vectors]
        center = sum(share * one for share, one in zip(shares, means, strict=True))
        model[variance] = sum(share * (vector[variance] + (one - center) ** 2)
                              for share, vector, one in zip(shares, vectors, means, strict=True))


def mean_of_chunk(vectors: Sequence[npt.NDArray[Any]], shares: Sequence[float], part: slice) -> npt.NDArray[np.float64]:
    """Return the mean of one part of the vectors in float64; `shares` sum to one."""
    # Convert first: a Python float times float32 stays float32, and conversion within a product is
    # slow.
    total: npt.NDArray[np.float64] = vectors[0][part].astype(np.float64)
    total *= shares[0]
    for share, vector in zip(shares[1:], vectors[1:], strict=True):
        term = vector[part].astype(np.float64)
        term *= share
        total += term
    return total


def shares_of(count: int, weights: Sequence[float] | None) -> list[float]:
    """Return weights that sum to one; AveragingError (a ValueError) for invalid weights."""
    if count == 0:
        raise AveragingError("there is nothing to average; give at least one model.")
    weights = [1.0] * count if weights is None else weights
    total = float(sum(weights))
    if len(weights) != count or min(weights) < 0.0 or not 0.0 < total < float("inf"):
        raise AveragingError(f"Invalid weights: {list(weights)} for {count} models; give one "
                             "number for each, at least 0 and not all 0.")
    return [weight / total for weight in weights]
