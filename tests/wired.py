"""Modules from their layers and a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Wired(nn.Module):
    """Layers by name, and the function of this module and its inputs that is the forward pass."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)
