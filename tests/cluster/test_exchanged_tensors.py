"""LocalSGD and kinds of tensors: each is right against float64, or refused by a typed error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngsgd
from ngsgd.errors import ConfigError
from tests.cluster.ranks import made, results, run_ranks

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
SAMPLES = [(3, 3), (1, 5), (0, 4)]
# relative error of the sum over ranks, in float32 at least, and of one rounding to the dtype
TOLERANCE = {torch.float64: 1e-15, torch.complex128: 1e-15, torch.float32: 3e-7, torch.complex64: 3e-7,
             torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.complex32: 1e-3, torch.float8_e4m3fn: 0.13,
             torch.float8_e4m3fnuz: 0.13, torch.float8_e5m2: 0.25, torch.float8_e5m2fnuz: 0.25}
MEANS = list(TOLERANCE)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t, "scalar": lambda t: t[0, 0, 0, 0].clone(), "empty": lambda t: t[:0].clone(),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last), "transposed": lambda t: t.transpose(0, 1)}
KINDS = ("trained", "frozen", "buffer", "temporary")


def random_tensor(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of order 1, or random bytes of dtypes without arithmetic."""
    random = torch.Generator().manual_seed(seed)
    if dtype in MEANS:
        real = torch.randn(2, 3, 4, 2, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=random)
        return real.to(dtype)
    size = torch.empty(48, dtype=dtype).element_size() * 48
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8, generator=random).view(dtype).view(2, 3, 4, 2)


def content(tensor: Tensor) -> Tensor:
    """Bytes, which torch can copy for every dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copied(tensor: Tensor) -> Tensor:
    return content(tensor).clone().view(tensor.dtype).view(tensor.shape)


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(content(first), content(second))


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


class Model(nn.Module):
    """One tensor of a kind and dtype, in several shapes, and a parameter that is trained."""

    def __init__(self, kind: str, dtype: torch.dtype, shapes: list[str], seed: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), float(seed)))
        for index, shape in enumerate(shapes):
            tensor = SHAPES[shape](random_tensor(dtype, 10 * seed + index))
            if kind in ("trained", "frozen"):
                setattr(self, shape, nn.Parameter(tensor, requires_grad=kind == "trained"))
            else:
                self.register_buffer(shape, tensor, persistent=kind == "buffer")
        if kind == "trained":
            self.tied = getattr(self, shapes[0])


def changed(kind: str, dtype: torch.dtype, shapes: list[str], samples: tuple[int, ...], outer: str) -> list[Any]:
    """Values before and after an average, and strides, by rank and shape."""
    def rank_of(rank: int) -> dict[str, list[Any]]:
        model: Any = Model(kind, dtype, shapes, rank + 1)
        strides = {shape: getattr(model, shape).stride() for shape in shapes}
        local = ngsgd.LocalSGD(model, torch.optim.SGD([model.trained], 0.1), sync_every=1, outer=outer)
        start = {shape: copied(getattr(model, shape)) for shape in shapes}
        with torch.no_grad():
            for index, shape in enumerate(shapes):
                tensor, new = getattr(model, shape), SHAPES[shape](random_tensor(dtype, 100 + 10 * rank + index))
                if tensor.is_contiguous():
                    content(tensor).copy_(content(new))
                else:
                    tensor.copy_(new)
        before = {shape: copied(getattr(model, shape)) for shape in shapes}
        local.step(samples[rank])
        assert not hasattr(model, "tied") or model.tied is getattr(model, shapes[0])
        return {shape: [start[shape], before[shape], getattr(model, shape).detach(), strides[shape]] for shape in shapes}
    return run_ranks(len(samples), rank_of)


def check(kind: str, dtype: torch.dtype, shapes: list[str], samples: tuple[int, ...], outer: str = "average") -> str:
    found = changed(kind, dtype, shapes, samples, outer)
    if any(isinstance(one, BaseException) for one in found):
        assert all(isinstance(one, ConfigError) for one in found), found
        return "error"
    first = Model(kind, dtype, shapes, 1)
    for shape in shapes:
        ranks = [one[shape] for one in found]
        for start, before, after, strides in ranks:
            # all begin with the tensor of the lowest rank
            assert same(start, getattr(first, shape))
            assert after.dtype is dtype and after.stride() == strides
            if dtype not in MEANS:
                assert same(after, before)
            else:
                assert same(after, ranks[0][2])
                mean = sum(count * exact(one[1]) for count, one in zip(samples, ranks, strict=True)) / sum(samples)
                torch.testing.assert_close(exact(after), mean, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # something moved, on a rank at least
    assert any(not same(one["plain"][0], one["plain"][2]) for one in found)
    return "works"


@pytest.mark.entry("D3", "you train a float64, complex or mixed model with `LocalSGD`", "works",
                   "Sums are in float32 at least, and in float64 for float64 and complex128. Complex numbers are averaged by real "
                   "and imaginary part. Buffers are averaged in float64.")
@pytest.mark.entry("F1", "you train complex parameters, or have complex buffers, with `LocalSGD`", "works",
                   "The constructor makes them equal, and averages keep their imaginary parts.")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_tensor_is_averaged_in_its_precision(dtype: torch.dtype) -> None:
    assert check("trained", dtype, list(SHAPES), (1, 5)) == "works"


@pytest.mark.entry("D3")
@pytest.mark.entry("F1")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_of_every_kind_is_right_or_refused(kind: str, samples: tuple[int, int]) -> None:
    outcomes = {}
    for dtype in DTYPES:
        if kind == "trained" and not (dtype.is_floating_point or dtype.is_complex):
            # torch allows no gradient
            continue
        for shape, laid_out in SHAPES.items():
            try:
                Model(kind, dtype, ["plain", shape], 1)
                laid_out(random_tensor(dtype, 0))
            except (RuntimeError, TypeError):
                # torch has no such tensor
                continue
            outcomes[dtype, shape] = check(kind, dtype, list(dict.fromkeys(["plain", shape])), samples)
    assert all(outcomes[dtype, shape] == "works" for dtype, shape in itertools.product(MEANS, SHAPES))
    assert all(outcomes[dtype, "plain"] == "works" for dtype in (torch.bool, torch.int64, torch.uint8) if kind != "trained")


class Buffers(nn.Module):
    """A layer, and buffers that each rank makes at random."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(rank)
        self.layer = nn.Linear(4, 2)
        # the mean of equal numbers that are trained rounds
        nn.init.ones_(self.layer.bias)
        with torch.no_grad():
            self.layer.weight.normal_(generator=random)
        self.layer.weight.requires_grad_(False)
        mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
        mask[0, 0] = float("nan") if rank == 0 else 5.0
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("permutation", torch.randperm(100, generator=random))
        self.register_buffer("flags", torch.rand(9, generator=random) > 0.5)
        self.register_buffer("phases", torch.randn(5, dtype=torch.complex64, generator=random))
        self.register_buffer("table", torch.randn(1, 7, generator=random).expand(3, 7))


@pytest.mark.entry("F2", "ranks of `LocalSGD` start with other parameters, frozen ones too, or other buffers", "works",
                   "The constructor sets all parameters and buffers of every dtype to those of the lowest rank, bitwise. Buffers "
                   "and frozen parameters that no rank changes stay so.")
@pytest.mark.parametrize("samples", SAMPLES)
def test_all_parameters_and_buffers_start_equal_and_constants_stay(samples: tuple[int, int]) -> None:
    def rank_of(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], ngsgd.LocalSGD]:
        model: Any = Buffers(rank)
        own = {name: copied(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        local = made(model)
        local.step(samples[rank])
        return own, {**dict(model.named_parameters()), **dict(model.named_buffers())}, local
    (first, one, _), (second, two, _) = results(2, rank_of)
    assert not same(first["layer.weight"], second["layer.weight"]) and not same(first["permutation"], second["permutation"])
    assert one.keys() == first.keys()
    assert all(same(one[name], first[name]) and same(two[name], first[name]) for name in first)


@pytest.mark.entry("F2")
@pytest.mark.parametrize("samples", [(3, 3), (1, 6), (0, 4), (5, 0)])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_those_of_the_data_of_ranks_with_samples(norm: Any, samples: tuple[int, int]) -> None:
    def rank_of(rank: int) -> tuple[Tensor, Tensor]:
        model: Any = nn.Sequential(nn.Conv1d(4, 4, 1), norm(4, track_running_stats=True))
        local = made(model)
        random = torch.Generator().manual_seed(rank)
        # far from 0, where var + mean^2 - mean^2 in float32 has no digits
        model[1].running_mean.copy_(1e4 + torch.randn(4, generator=random))
        model[1].running_var.copy_(torch.rand(4, generator=random) if samples[rank] else torch.full((4,), torch.nan))
        statistics = torch.stack([model[1].running_mean, model[1].running_var]).double()
        local.step(samples[rank])
        return statistics, torch.stack([model[1].running_mean, model[1].running_var])
    found = results(2, rank_of)
    shares = [count / sum(samples) for count in samples]
    statistics = [(share, *one) for share, (one, _) in zip(shares, found, strict=True) if share]
    mean = sum(share * m for share, m, _ in statistics)
    var = sum(share * (v + (m - mean).square()) for share, m, v in statistics)
    for _, after in found:
        # means of 1e4 in float64 leave 1e-8 of a variance
        torch.testing.assert_close(after.double(), torch.stack([mean, var]), rtol=1e-6, atol=1e-7)


@pytest.mark.entry("F2")
def test_a_constant_infinity_is_no_fault_and_a_changed_buffer_is_averaged() -> None:
    def rank_of(rank: int) -> dict[str, Tensor]:
        model: Any = Buffers(0)
        local = made(model)
        # also a buffer that the module replaces
        model.phases = model.phases * 0 + (1 + rank * 1j)
        model.mask[2, 0] = rank
        local.step(1 + 2 * rank)
        return {name: copied(buffer) for name, buffer in model.named_buffers()}
    for one in results(2, rank_of):
        assert one["phases"].tolist() == [1 + 0.75j] * 5
        assert one["mask"][2, 0] == 0.75 and one["mask"][0, 1] == -torch.inf and bool(one["mask"][0, 0].isnan())


def test_memory_that_several_names_share_is_exchanged_once() -> None:
    def rank_of(rank: int) -> tuple[float, float]:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model.register_buffer("view", model[0].weight.detach())
        local = made(model, outer="diloco")
        with torch.no_grad():
            model[0].weight.fill_(rank)
        local.step()
        assert model[1].weight is model[0].weight
        return float(model[0].weight.detach()[0, 0]), float(model.view[0, 0])
    (weight, view), other = results(2, rank_of)
    assert weight == view and (weight, view) == other and weight != 0.5


@pytest.mark.parametrize("samples", [-1, 2.5, float("nan"), True, "3", None, torch.tensor(2.5), torch.tensor([1, 2]), [4], 2**60])
def test_numbers_of_samples_are_checked(samples: Any) -> None:
    def rank_of(rank: int) -> tuple[int, int]:
        local = made(nn.Linear(2, 2), sync_every=2)
        for number in (3.0, torch.tensor(2)):
            local.step(number)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as error:
            local.step(samples)
        assert "num_samples" in str(error.value)
        return local.num_steps, local.num_rounds
    assert results(1, rank_of) == [(2, 1)]
