"""The networks of the benchmarks.

Curvature: BackPACK's two and two acoustic models.  Cost of a step: four narrow ones.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, relu, scaled_dot_product_attention


def conv_net_3c3d() -> nn.Sequential:
    """3C3D of DeepOBS, on 32 x 32 images of 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def all_cnn_c() -> nn.Sequential:
    """All-CNN-C (Springenberg et al. 2015), on 32 x 32 images of 100 classes, without dropout."""
    layers: list[nn.Module] = []
    for num_in, num_out, kernel, stride, padding in ((3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1), (96, 192, 3, 1, 1),
                                                     (192, 192, 3, 1, 1), (192, 192, 3, 2, 1), (192, 192, 3, 1, 0),
                                                     (192, 192, 1, 1, 0), (192, 100, 1, 1, 0)):
        layers += [nn.Conv2d(num_in, num_out, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten())


def mlp() -> nn.Sequential:
    """A feed-forward acoustic model: 360 inputs, four hidden layers of 1024, 2000 states."""
    dims = [360, 1024, 1024, 1024, 1024]
    hidden = [part for pair in itertools.pairwise(dims) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 2000))


def small_mlp() -> nn.Sequential:
    """Two hidden layers of 512 and 100 classes, small enough for quantities with a vector for each
    class.
    """
    return nn.Sequential(nn.Linear(360, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))


def tdnn() -> nn.Sequential:
    """A TDNN of dilated convolutions over time, 3.0 million parameters, one target for a window of
    29 frames.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = 40
    for index, dilation in enumerate((1, 1, 3, 3, 3), start=1):
        layers[f"tdnn{index}"], layers[f"relu{index}"] = nn.Conv1d(width, 384, 3, dilation=dilation), nn.ReLU()
        width = 384
    layers["flatten"], layers["output"] = nn.Flatten(), nn.Linear(384 * 7, 1000 // 3)
    return nn.Sequential(layers)


@dataclass(frozen=True)
class Net:
    """A network and its minibatch."""

    build: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    num_classes: int
    batch: int


NETS = {
    "3c3d": Net(conv_net_3c3d, (3, 32, 32), 10, 16),
    "allcnnc": Net(all_cnn_c, (3, 32, 32), 100, 8),
    "mlp": Net(mlp, (360,), 2000, 512),
    "tdnn": Net(tdnn, (40, 29), 333, 32),
    "smallmlp": Net(small_mlp, (360,), 100, 64),
}


class SelfAttention(nn.Module):
    """Causal self-attention by two Linear layers."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, dim=-1)
        )
        return self.out(  # type: ignore[no-any-return]
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class TorchAttention(nn.Module):
    """The same with nn.MultiheadAttention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y: Tensor = self.attention(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
        return y


class Residual(nn.Sequential):
    """The input plus the output of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return,no-untyped-call]


class Gpt(nn.Module):
    """Two blocks of width 64, 4 heads, over 100 characters."""

    def __init__(
        self, attention: Callable[[int, int], nn.Module], context: int = 64, dim: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, dim), nn.Embedding(context, dim)
        blocks = [
            part
            for _ in range(2)
            for part in (
                Residual(nn.LayerNorm(dim), attention(dim, 4)),
                Residual(
                    nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
                ),
            )
        ]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(dim), nn.Linear(dim, 100))

    def forward(self, x: Tensor) -> Tensor:
        # through the layer, sample by sample: K-FAC refuses a weight that is used outside it
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        logits: Tensor = self.blocks(self.tokens(x) + self.positions(positions))
        return logits.flatten(0, 1)


class ResidualConvolutions(nn.Module):
    """The block of a ResNet."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut = nn.Identity() if num_in == num_out else nn.Sequential(
            nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.body(x) + self.shortcut(x))


def resnet14(width: int = 8) -> nn.Sequential:
    """Three stages of two blocks for images of 3 x 32 x 32, 31 layers with parameters."""
    blocks = [ResidualConvolutions(num_in, num_out, stride) for num_in, num_out, stride in (
        (width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1),
        (2 * width, 4 * width, 2), (4 * width, 4 * width, 1))]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class ConformerConvolution(nn.Module):
    """The convolution module of a Conformer: pointwise, GLU, depthwise, batch norm, pointwise."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.widen = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.rest = nn.Sequential(
            nn.Conv1d(dim, dim, 15, padding=7, groups=dim),
            nn.BatchNorm1d(dim),
            nn.SiLU(),
            nn.Conv1d(dim, dim, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest(glu(self.widen(self.norm(x).transpose(1, 2)), dim=1))
        return x + y.transpose(1, 2)


def conformer(dim: int = 24) -> nn.Sequential:
    """Two Conformer blocks over 40 features, 30 classes per frame."""
    def feed_forward() -> nn.Module:
        return Residual(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)
        )

    blocks = [
        part
        for _ in range(2)
        for part in (
            feed_forward(),
            Residual(nn.LayerNorm(dim), SelfAttention(dim, 4)),
            ConformerConvolution(dim),
            feed_forward(),
            nn.LayerNorm(dim),
        )
    ]
    return nn.Sequential(nn.Linear(40, dim), *blocks, nn.Linear(dim, 30), nn.Flatten(0, 1))


@dataclass(frozen=True)
class NarrowNet:
    """A network whose layers are too small for GEMMs to dominate, and a minibatch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    num_targets: int
    num_classes: int


NARROW_NETS = {
    "GPT d=64": NarrowNet(
        lambda: Gpt(SelfAttention), lambda: torch.randint(100, (16, 64)), 16 * 64, 100
    ),
    "MHA-GPT d=64": NarrowNet(
        lambda: Gpt(TorchAttention), lambda: torch.randint(100, (16, 64)), 16 * 64, 100
    ),
    "ResNet w=8": NarrowNet(resnet14, lambda: torch.randn(16, 3, 32, 32), 16, 10),
    # that of the optimizer track
    "MLP 195-256x4-102": NarrowNet(lambda: nn.Sequential(
        *(layer for width in (195, 256, 256, 256) for layer in (nn.Linear(width, 256), nn.ReLU())), nn.Linear(256, 102)),
        lambda: torch.randn(256, 195), 256, 102),
    "Conformer d=24": NarrowNet(conformer, lambda: torch.randn(8, 100, 40), 800, 30),
}
