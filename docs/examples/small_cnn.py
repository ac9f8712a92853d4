"""A small convolutional network over time and frequency, trained by ngsgd: docs/own-model.md.

Letters: N rows, W frames of the window, D features of a frame, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SmallCnn(nn.Module):
    """Two convolutions, pooling along frequency, one hidden layer."""

    def __init__(self, *, num_inputs: int, num_classes: int, feature_dim: int, channels: int = 32, hidden_dim: int = 256,
                 **_: Any) -> None:
        super().__init__()
        num_frames = num_inputs // feature_dim
        self.shape = (num_frames, feature_dim)
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d((1, 2)),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d((1, 2)))
        num_left = channels * num_frames * (feature_dim // 2 // 2)
        self.hidden = nn.Linear(num_left, hidden_dim)
        self.output = nn.Linear(hidden_dim, num_classes)
        nn.init.zeros_(self.output.weight)  # equal probabilities at the start
        nn.init.zeros_(self.output.bias)

    def forward(self, x_NI: Tensor) -> Tensor:
        image_NCWD = x_NI.unflatten(1, (1, *self.shape))
        logits: Tensor = self.output(torch.relu(self.hidden(self.convolutions(image_NCWD).flatten(1))))
        return logits
