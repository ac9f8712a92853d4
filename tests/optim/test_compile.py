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
        # float32 in another order of operations
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    assert all(p.num_calls == 16 for _, p in [*ours.preconditioners(), *theirs.preconditioners()])


def affine_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Renormalize(), nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, 4))


class Images(nn.Module):
    """Convolutions of each kind and norms of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_images = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
            nn.GroupNorm(2, 4),
        )
        self.of_frames = nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3, stride=2),
                                       nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.of_frames(self.of_images(x)).mean(2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8)])
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return self.norms[1](x).mean(1)  # type: ignore[no-any-return]


class TorchAttention(nn.Module):
    """nn.MultiheadAttention of a sequence to itself and to another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x, x, x, need_weights=False)[0]
        return self.layers[1](y, x, x)[0].mean(1)  # type: ignore[no-any-return]


MODELS = {
    "affine": (affine_model, (32, 8)),
    "images": (Images, (6, 4, 5, 5)),
    "attention": (Attention, (6, 5, 8)),
    "multihead": (TorchAttention, (6, 5, 8)),
}


@pytest.mark.entry("L12", "you call `torch.compile(model, fullgraph=True)`", "works",
                   "Linear, convolutions, norms and attention compile into one graph, whose "
                   "parameters after training are those without compilation; give `NGSGD` the "
                   "plain model, and call the compiled one first after that")
@pytest.mark.parametrize("kind", ["attention", pytest.param("affine", marks=pytest.mark.slow),
                                  pytest.param("images", marks=pytest.mark.slow),
                                  pytest.param("multihead", marks=pytest.mark.slow)])
def test_layers_compile_into_one_graph_and_keep_their_estimates(kind: str) -> None:
    build, shape = MODELS[kind]
    both(build(), shape, fullgraph=True, backend="aot_eager")


def test_compiled_layers_of_one_class_share_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(12)))
    NGSGD(model, lr=0.01)
    torch.compiler.reset()
    compiled = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in model]
    x = torch.randn(4, 8)
    x = compiled[1](compiled[0](x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for block in compiled[2:]:
            x = block(x)
    x.sum().backward()


def test_a_compiled_layer_with_a_frozen_weight_has_a_plain_bias_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = NGSGD(model, lr=0.01)
    weight, bias = model.parameters()
    weight.requires_grad_(False)
    torch.compiler.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(5, 4)).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [5.0, 5.0, 5.0] and weight.grad is None
    assert all(p.num_calls == 0 for _, p in optimizer.preconditioners())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None,
                    reason="torch's default compiler calls a C++ compiler")
@pytest.mark.parametrize("kind", MODELS)
def test_the_default_compiler_gives_the_same(kind: str) -> None:
    build, shape = MODELS[kind]
    both(build(), shape, fullgraph=True, backend="inductor")
