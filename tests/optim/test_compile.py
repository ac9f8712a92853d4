"""NGSGD under torch.compile: the same parameters as without it."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.models import Renormalize


def train(model: nn.Module, compiled: Callable[[Tensor], Tensor], shape: tuple[int, ...], num_steps: int) -> NGSGD:
    optimizer = NGSGD(model, lr=0.01, rank_in=3, rank_out=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x = torch.randn(shape, generator=generator)
        optimizer.zero_grad()
        y = compiled(x)
        nn.functional.cross_entropy(y, torch.zeros(y.shape[0], *y.shape[2:]).long(), reduction="sum").backward()
        optimizer.step()
    return optimizer


def both(model: nn.Module, shape: tuple[int, ...], *, fullgraph: bool, backend: str) -> None:
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=fullgraph, backend=backend)
    ours, theirs = train(model, compiled, shape, 16), train(plain, plain, shape, 16)
    for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)  # float32 in another order of operations
    assert all(p.num_calls == 16 for _, p in [*ours.preconditioners(), *theirs.preconditioners()])


def affine_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Renormalize(), nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, 4))


@pytest.mark.slow
def test_affine_layers_compile_into_one_graph_and_keep_their_estimates() -> None:
    both(affine_model(), (32, 8), fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="torch's default compiler calls a C++ compiler")
def test_the_default_compiler_gives_the_same() -> None:
    both(affine_model(), (32, 8), fullgraph=True, backend="inductor")


@pytest.mark.slow
def test_convolutions_and_norms_break_the_graph_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(5, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 3))
    both(model, (6, 5, 10), fullgraph=False, backend="aot_eager")
