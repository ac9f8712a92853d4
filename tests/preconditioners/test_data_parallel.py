"""DistributedDataParallel on two processes over gloo, against one process with the rows of both."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS, GradientMaker, Preconditioner
from tests.gloo import gloo_group
from tests.preconditioners.problems import move
from tests.tiers import HANGS_S

DDP = nn.parallel.DistributedDataParallel
F = nn.functional
ROWS = 6   # of each rank
STEPS = 3
LR = 0.05
# all need two processes that train
pytestmark = pytest.mark.slow

SPLIT = ("kfac", "diagonal", "unit", "layer", "shampoo", "soap", "tnt", "fang")
# they use the averaged gradients alone
AGREE = ("mfac", "ggt", "tonga", "tonga_unit", "lbfgs", "neumann", "adam", "adamw", "muon")
REFUSED = tuple(kind for kind in METHODS if kind not in SPLIT + AGREE)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)).double()


def _rows(step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2 * ROWS, 5, generator=generator, dtype=torch.float64), torch.randint(4, (2 * ROWS,), generator=generator)
    part = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return x[part], y[part]


def _trained(kind: str, way: str, rank: int | None) -> list[Tensor]:
    """Parameters after a few steps; `way`: place of the preconditioner and calls of the loop."""
    model = _net()
    called: nn.Module = model if rank is None else DDP(model)
    preconditioner = METHODS[kind](called if "outer" in way else model, damping=0.1)
    for step in range(STEPS):
        x, y = _rows(step, rank)
        called.zero_grad()
        if "maker" in way:
            maker = GradientMaker(called, preconditioner)
            maker.setup_loss_call(F.cross_entropy, maker.setup_model_call(called, x), y)
            maker.forward_and_backward(lr=0.05)
        elif "at once" in way:
            preconditioner.evaluate_and_step(lambda x=x, y=y: F.cross_entropy(called(x), y), lr=0.05)
        else:
            preconditioner.evaluate(lambda x=x, y=y: F.cross_entropy(called(x), y))
            preconditioner.step(lr=0.05)
        move(model, LR)
    return [p.detach() for p in model.parameters()]


CASES = [(kind, "inner") for kind in SPLIT + AGREE] + [("kfac", "inner at once"), ("kfac", "outer"), ("kfac", "outer at once"),
                                                       ("kfac", "outer maker"), ("adam", "inner at once")]


def _refusal(kind: str, way: str, rank: int) -> str:
    """The error, and that nothing was computed before."""
    try:
        _trained(kind, way, rank)
    except ConfigError as error:
        return str(error)
    return ""


def _warnings_of_an_own_loop(kind: str) -> list[str]:
    """Of a loop that averages gradients without DistributedDataParallel."""
    model, (x, y) = _net(), _rows(0, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preconditioner = METHODS[kind](model, damping=0.1)
        for _ in range(2):
            preconditioner.evaluate(lambda: F.cross_entropy(model(x), y))
            preconditioner.step(lr=0.05)
    return [str(warning.message) for warning in caught]


def _on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with gloo_group(folder, rank, 2):
        found: dict[Any, Any] = {case: _trained(*case, rank) for case in CASES}
        found |= {("refused", kind, way): _refusal(kind, way, rank) for kind in REFUSED for way in ("inner", "outer")}
        found |= {("fsdp", kind, when): _refusal_of_fsdp(kind, when) for kind in ("kfac", "shampoo", "adam", "psgd")
                  for when in ("before", "after")}
        found |= {("own loop", kind): _warnings_of_an_own_loop(kind) for kind in ("kfac", "seng", "psgd", "adam", "soap")}
        torch.save(found, f"{folder}/{rank}.pt")


@functools.cache
def _found() -> list[dict[Any, Any]]:
    """Of each rank; the processes start once for all tests of this file."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [multiprocessing.get_context("spawn").Process(target=_on_rank, args=(rank, folder)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(HANGS_S)
        assert [process.exitcode for process in processes] == [0, 0]
        assert os.environ.get("RANK") is None
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.entry("A1", "you use K-FAC and related methods under DistributedDataParallel", "works",
                   "KFAC, TNT, DiagonalNG, UnitWiseNG, LayerWiseNG, Shampoo and SOAP average their curvature over the ranks. "
                   "Replicas are bitwise equal, and equal to one process with all rows to 1e-7. Methods whose curvature has no "
                   "mean over ranks raise ConfigError before the first step. A loop that averages gradients itself gets a "
                   "warning if split_work was not called")
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_replicas_are_equal_to_each_other_and_to_one_process(kind: str, way: str) -> None:
    one, other = (found[kind, way] for found in _found())
    for first, second, wanted in zip(one, other, _trained(kind, way, None), strict=True):
        assert torch.equal(first, second)
        # float64, condition up to 1e5; the sums of the ranks' parts round otherwise
        torch.testing.assert_close(first, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.entry("A1")
@pytest.mark.parametrize("kind", REFUSED)
def test_methods_that_cannot_agree_are_refused(kind: str) -> None:
    for way in ("inner", "outer"):
        for found in _found():
            assert "DistributedDataParallel" in found["refused", kind, way], (kind, way)


@pytest.mark.entry("A1")
def test_a_process_group_without_a_split_is_warned_of_once() -> None:
    for found in _found():
        for kind in ("kfac", "seng", "psgd"):
            (message,) = found["own loop", kind]
            assert "2 processes" in message and ("split_work" in message) == (kind == "kfac")
        assert not found["own loop", "adam"] and not found["own loop", "soap"]


@pytest.mark.entry("A1")
def test_sharded_parameters_are_refused() -> None:
    for found in _found():
        for when in ("before", "after"):
            for kind in ("kfac", "shampoo", "adam", "psgd"):
                assert "DTensor" in found["fsdp", kind, when], (kind, when)


def _refusal_of_fsdp(kind: str, when: str) -> str:
    """`when` the preconditioner is made: before or after `fully_shard`."""
    model, (x, y) = _net().float(), _rows(0, 0)
    try:
        preconditioner = METHODS[kind](model) if when == "before" else None
        fully_shard(model)
        preconditioner = preconditioner or METHODS[kind](model)
        preconditioner.evaluate(lambda: F.cross_entropy(model(x.float()), y))
    except ConfigError as error:
        return str(error)
    return ""


def test_every_method_states_its_support_of_replicas() -> None:
    assert {kind for kind in METHODS if METHODS[kind].traits.splits_work} == {*SPLIT}
    assert {kind for kind in METHODS if METHODS[kind].traits.agrees_over_ranks} == {*AGREE, "shampoo", "soap"}
    assert issubclass(METHODS["kfac"], Preconditioner)
