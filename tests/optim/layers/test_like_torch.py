"""Layers under NGSGD give the values, input gradients and second derivatives of torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ngsgd import NGSGD
from ngsgd.optim.layers.attach import NATURAL_GRADIENT_CLASSES

# a layer and the shapes of its input
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 8), (7, 12)), "linear of frames": (lambda: nn.Linear(12, 8), (3, 4, 12)),
    "linear of a vector": (lambda: nn.Linear(12, 8, bias=False), (12,)),
    "projection": (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(12, 8), (3, 4, 12)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1, dilation=2), (4, 6, 15)),
    "conv1d of groups": (lambda: nn.Conv1d(6, 8, 3, groups=2), (4, 6, 9)),
    "circular conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"), (4, 6, 9)),
    "unbatched conv1d": (lambda: nn.Conv1d(6, 8, 4, padding="same"), (6, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 8, 3, stride=2), (4, 6, 9, 9)), "conv3d": (lambda: nn.Conv3d(2, 8, 2), (3, 2, 4, 4, 4)),
    "depthwise conv2d": (lambda: nn.Conv2d(6, 6, 3, groups=6), (4, 6, 9, 9)),
    "attention": (lambda: nn.MultiheadAttention(12, 3, batch_first=True), (4, 5, 12)),
    "attention, time first": (lambda: nn.MultiheadAttention(12, 3), (5, 4, 12)),
    "layer norm": (lambda: nn.LayerNorm(12), (4, 5, 12)), "rms norm": (lambda: nn.RMSNorm(12), (4, 5, 12)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (4, 6, 5)), "batch norm": (lambda: nn.BatchNorm1d(6), (7, 6)),
    "batch norm of frames": (lambda: nn.BatchNorm1d(6), (4, 6, 7)),
    "batch norm of images": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(6), (4, 6, 3, 2, 2))}


def of(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    return y


def plainly(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = of(layer, x)
    y.square().sum().backward()
    return [y, x.grad]


def changed_in_place(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = torch.relu_(of(layer, x))
    y.square().sum().backward()
    return [y, x.grad]


def with_penalty(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    (g,) = torch.autograd.grad(of(layer, x).pow(3).sum(), x, create_graph=True)
    return [g, *torch.autograd.grad(g.square().sum(), [x, *layer.parameters()], allow_unused=True)]


def recomputed(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = checkpoint(lambda x: of(layer, x), x, use_reentrant=False)
    y.square().sum().backward()
    return [y, x.grad]


def with_other_parameters(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in layer.named_parameters()}
    found = functional_call(layer, others, (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,))
    y = found[0] if isinstance(found, tuple) else found
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in others.values())]


def copied(layer: nn.Module, x: Tensor) -> list[Tensor | None]:
    own = copy.deepcopy(layer)
    return [*plainly(own, x), *(p.grad for p in own.parameters())]



WAYS = (plainly, changed_in_place, with_penalty, recomputed, with_other_parameters, copied)
# other kernels of torch, whose sums have at most 200 terms
CLOSE: dict[torch.dtype, Any] = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float64: {"rtol": 1e-9, "atol": 1e-10}}


def test_every_kind_of_layer_is_here() -> None:
    assert {type(make()) for make, _ in LAYERS.values()} == NATURAL_GRADIENT_CLASSES.keys()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_used_as_torchs(name: str, way: Callable[[nn.Module, Tensor], list[Tensor | None]], dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    plain = make().to(dtype)
    layer = copy.deepcopy(plain)
    optimizer = NGSGD(layer, 0.1)
    x = torch.randn(shape, dtype=dtype)
    # initializes the estimates
    plainly(layer, x.clone().requires_grad_())
    layer.load_state_dict(plain.state_dict())
    optimizer.zero_grad()
    found, expected = (way(one, x.clone().requires_grad_()) for one in (layer, plain))
    assert sum(one is not None and bool(one.any()) for one in expected) >= 2
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, **CLOSE[dtype])
