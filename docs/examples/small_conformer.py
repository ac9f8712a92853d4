"""A small Conformer-like encoder (Gulati et al. 2020) over a window of frames.

Described in docs/own-model.md.

Letters: N rows, W frames of the window, D features of a frame, C model dimension, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def feed_forward(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))


class Attention(nn.Module):
    """Self-attention of nn.Linear layers."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x_NWC: Tensor) -> Tensor:
        y_NWC = self.norm(x_NWC)
        q, k, v = (layer(y_NWC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))
        seen: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Convolution(nn.Module):
    """Pointwise with a gate, depthwise along time, pointwise."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gated = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.norm_after = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_NWC: Tensor) -> Tensor:
        y_NWC = nn.functional.glu(self.gated(self.norm(x_NWC)))
        y_NWC = self.depthwise(y_NWC.transpose(1, 2)).transpose(1, 2)
        y: Tensor = self.out(nn.functional.silu(self.norm_after(y_NWC)))
        return y


class Block(nn.Module):
    """Half-step feed-forward layers around attention and convolution, each with a bypass."""

    def __init__(self, dim: int, num_heads: int, kernel_size: int) -> None:
        super().__init__()
        self.before, self.after = feed_forward(dim), feed_forward(dim)
        self.attention = Attention(dim, num_heads)
        self.convolution = Convolution(dim, kernel_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_NWC: Tensor) -> Tensor:
        x_NWC = x_NWC + 0.5 * self.before(x_NWC)
        x_NWC = x_NWC + self.attention(x_NWC)
        x_NWC = x_NWC + self.convolution(x_NWC)
        y_NWC: Tensor = self.norm(x_NWC + 0.5 * self.after(x_NWC))
        return y_NWC


class SmallConformer(nn.Module):
    """Blocks over the frames of a window; the class is that of its middle frame."""

    def __init__(self, *, num_inputs: int, num_classes: int, left_context: int, feature_dim: int, dim: int = 64,
                 num_blocks: int = 2, num_heads: int = 4, kernel_size: int = 5, **_: Any) -> None:
        super().__init__()
        num_frames = num_inputs // feature_dim
        self.left_context, self.feature_dim = left_context, feature_dim
        self.front = nn.Linear(feature_dim, dim)
        self.position_WC = nn.Parameter(0.1 * torch.randn(num_frames, dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads, kernel_size) for _ in range(num_blocks)))
        self.output = nn.Linear(dim, num_classes)
        nn.init.zeros_(self.output.weight)  # equal probabilities at the start
        nn.init.zeros_(self.output.bias)

    def forward(self, x_NI: Tensor) -> Tensor:
        x_NWC = self.front(x_NI.unflatten(1, (-1, self.feature_dim))) + self.position_WC
        logits: Tensor = self.output(self.blocks(x_NWC)[:, self.left_context])
        return logits
