"""The plan of LocalSGD: what the ranks exchange of each parameter and buffer, by kind and dtype.

| kind | tensors | at the start | at an average |
|---|---|---|---|
| trained | trainable parameters, and those that were trainable at the last average | equal | mean, then the outer rule |
| followed | frozen parameters, floating-point and complex buffers | equal | mean if they differ |
| fixed | all other dtypes | equal | nothing |

Only ranks with samples count. Means of trained parameters are computed in float32, or in float64
for float64 and complex128; all others in float64. Complex numbers count as pairs of real ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ngsgd.errors import ConfigError
from ngsgd.ops.averaging import DTYPES_WITH_MEAN, is_statistic
from ngsgd.ops.tensors import refuse_sharded

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_BUCKET = 2**25  # bytes broadcast at a time
# columns of the words of a tensor in its mark, and an odd factor that spreads their positions
_COLUMNS, _ODD = 4096, 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Exchanged:
    """A parameter or buffer, and its kind; tied ones have one name."""

    name: str
    tensor: Tensor
    kind: Literal["trained", "followed", "fixed"]
    role: str  # must be equal on all ranks, as name, dtype and shape

    @property
    def layout(self) -> str:
        return f"{self.name}: {str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}"

    @property
    def line(self) -> str:
        return f"{self.role} {self.layout}"

    @property
    def precision(self) -> torch.dtype:
        """Dtype of sums over ranks."""
        is_double = self.kind != "trained" or self.tensor.dtype in (torch.float64, torch.complex128)
        return torch.float64 if is_double else torch.float32

    @property
    def size(self) -> int:
        """Number of real values."""
        return compact(self.tensor).numel() * (2 if self.tensor.is_complex() else 1)


def planned(model: nn.Module, trained: Collection[int] = (), known: Collection[int] | None = None) -> list[Exchanged]:
    """Return the plan of a model.

    Args:
        model: the module.
        trained: id() of the parameters that were trained at the last average.
        known: id() of the parameters that are equal on all ranks at the start; None at the start.

    Raises:
        ConfigError: tensors cannot be exchanged.
    """
    refuse_sharded(model, "LocalSGD", "use DistributedDataParallel inside of a replica")
    found, problems = list[Exchanged](), list[str]()
    for name, p in model.named_parameters():
        is_trained = p.requires_grad or id(p) in trained
        role = f"{'trainable' if p.requires_grad else 'frozen'} parameter"
        if is_trained and known is not None and id(p) not in trained:
            role = f"unfrozen {role}"
        misfits = list(_misfits(f"the parameter {name}", p, needs_mean=is_trained))
        if not misfits and known is not None and id(p) not in known:
            misfits = [f"the parameter {name} came into the model after LocalSGD was created, as when a layer is replaced; its "
                       "start values can differ between ranks. Create the optimizer and LocalSGD again after the change."]
        problems += misfits
        found.append(Exchanged(name, p, "trained" if is_trained else "followed" if p.dtype in DTYPES_WITH_MEAN else "fixed", role))
    for name, buffer in model.named_buffers():
        problems += _misfits(f"the buffer {name}", buffer, needs_mean=False)
        found.append(Exchanged(name, buffer, "followed" if buffer.dtype in DTYPES_WITH_MEAN else "fixed", "buffer"))
    devices = {str(one.tensor.device): one.name for one in reversed(found) if isinstance(one.tensor, nn.Parameter)}
    if len(devices) > 1 and not problems:
        problems = ["the parameters are on several devices: "
                    f"{', '.join(f'{name} on {device}' for device, name in sorted(devices.items()))}. "
                    "Move the model to one device before an average."]
    if problems:
        # one reason often holds for all parameters
        raise ConfigError([*problems[:3], *([f"{len(problems) - 3} more tensors"] if len(problems) > 3 else [])])
    return found


def _misfits(what: str, tensor: Tensor, *, needs_mean: bool) -> Iterator[str]:
    """Yield the reason why a tensor cannot be exchanged, if there is one."""
    if is_lazy(tensor):
        yield f"{what} is not initialized; run the model once before creating LocalSGD."
    elif tensor.is_meta:
        yield f"{what} is on the meta device and has no values; call to_empty(device=...) and initialize it."
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_inference():
        kind = "an inference tensor" if tensor.is_inference() else f"of {tensor.dtype} and layout {tensor.layout}"
        yield f"{what} is {kind}, which LocalSGD cannot exchange; use a dense tensor, or a plain attribute that each rank sets."
    elif needs_mean and tensor.dtype not in DTYPES_WITH_MEAN:
        yield f"{what} is of {tensor.dtype}, which has no mean; freeze it."


def compact(tensor: Tensor) -> Tensor:
    """Return the view without repeated elements of expanded dimensions."""
    tensor = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def values_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the real values of a tensor as a vector of `dtype`."""
    tensor = compact(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64).resolve_conj())
    return tensor.to(dtype).reshape(-1)


def write(tensor: Tensor, values: Tensor) -> None:
    """Set a tensor to a vector of real values."""
    tensor = compact(tensor)
    if tensor.is_complex():
        # a copy, because complex numbers begin at even positions
        tensor.copy_(torch.view_as_complex(values.clone().view(*tensor.shape, 2)))
    else:
        tensor.copy_(values.view_as(tensor))


def fill(vector: Tensor, tensors: Sequence[Exchanged], num_samples: int) -> bool:
    """Write samples times the values of the tensors; return whether they are finite."""
    if not num_samples:
        # also for values that are not finite
        vector.zero_()
        return True
    totals = []
    for one, part in zip(tensors, vector.split([one.size for one in tensors]), strict=True):
        if one.tensor.dtype == vector.dtype and one.tensor.is_contiguous():
            torch.mul(one.tensor.detach(), num_samples, out=part.view_as(one.tensor))
        else:
            part.copy_(values_of(one.tensor, vector.dtype)).mul_(num_samples)
        totals.append(part.sum())
    # a sum of finite numbers can overflow; one that is finite has finite terms
    return not totals or bool(torch.stack(totals).sum().isfinite()) or bool(vector.isfinite().all())


def first_not_finite(tensors: Iterable[Exchanged]) -> str:
    """Return the name of the first tensor whose values are not finite."""
    return next((one.name for one in tensors if not bool(values_of(one.tensor, one.precision).isfinite().all())), "")


def buckets(tensors: Sequence[Exchanged]) -> Iterator[list[Exchanged]]:
    """Yield groups of tensors on one device, of about `_BUCKET` bytes."""
    bucket, size = list[Exchanged](), 0
    for one in sorted(tensors, key=lambda one: str(one.tensor.device)):
        if bucket and (size > _BUCKET or one.tensor.device != bucket[-1].tensor.device):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.tensor.numel() * one.tensor.element_size()
    if bucket:
        yield bucket


def content_of(one: Exchanged) -> Tensor:
    """Return the bytes of a tensor; raise ConfigError if torch cannot copy its dtype."""
    try:
        return compact(one.tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    except RuntimeError as error:
        raise ConfigError(f"{one.line} cannot be copied ({str(error).splitlines()[0]}); make it contiguous, or use a plain "
                          "attribute that each rank sets.") from error


def overwrite(one: Exchanged, content: Tensor) -> None:
    """Set a tensor to bytes of `content_of`; its strides stay."""
    tensor = compact(one.tensor)
    if tensor.is_contiguous():
        # torch copies bytes of every dtype
        tensor.view(-1).view(torch.uint8).copy_(content)
    else:
        # a copy begins at an address that fits its dtype
        tensor.copy_(content.clone().view(tensor.dtype).view(tensor.shape))


def marks_of(tensors: Sequence[Exchanged]) -> dict[str, int]:
    """Return a number for each tensor that changes with its bits and their order."""
    if not tensors:
        return {}
    marks = torch.stack([_mark(content_of(one), one.tensor.element_size()).cpu() for one in tensors])
    return dict(zip([one.name for one in tensors], marks.tolist(), strict=True))


def _mark(content: Tensor, element_size: int) -> Tensor:
    words = content.view(_WORDS[element_size])
    rows, columns = len(words) // _COLUMNS, _COLUMNS
    table = words[:rows * columns].view(rows, columns)

    def weighted(numbers: Tensor) -> Tensor:
        return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device).mul_(_ODD)).sum()
    return (weighted(table.sum(0, dtype=torch.int64)) + 3 * weighted(table.sum(1, dtype=torch.int64))
            + 5 * weighted(words[rows * columns:].to(torch.int64)))


def num_not_finite(one: Exchanged) -> int:
    """Return the number of NaN, and in statistics of normalization layers also of infinities."""
    values = values_of(one.tensor, one.precision)
    # infinities of other buffers are legitimate, as in masks
    return int((values.isfinite().logical_not() if is_statistic(one.name) else values.isnan()).sum())


def means_of_variances(tensors: Sequence[Exchanged]) -> dict[str, Exchanged]:
    """Return the running mean that belongs to each running variance, by name."""
    by_name = {one.name: one for one in tensors}
    pairs = {name: by_name.get(f"{name.removesuffix('running_var')}running_mean") for name in by_name
             if name.rpartition(".")[2] == "running_var"}
    return {name: mean for name, mean in pairs.items() if mean is not None and mean.tensor.shape == by_name[name].tensor.shape}


def digest_of(text: str) -> int:
    """Return a number of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def first_difference(texts: Mapping[Any, str]) -> str:
    """Describe the first line in which the texts of two ranks differ."""
    (first, text), *others = texts.items()
    for rank, other in others:
        mine, theirs = text.splitlines(), other.splitlines()
        for number in range(max(len(mine), len(theirs))):
            pair = [lines[number] if number < len(lines) else "nothing" for lines in (mine, theirs)]
            if pair[0] != pair[1]:
                return f"{first} has {pair[0]}, {rank} has {pair[1]}"
    return ""
