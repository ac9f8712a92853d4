"""Layers that are made of several affine products: computed anew from their products, so that each product can be caught.

The output that the rest of the network sees is then the one computed here; it differs from torch's by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Product = Callable[..., Any]   # (name of the product, x, weight, bias) -> y
Expansion = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, Product], Any]


def expansion_of(module: nn.Module) -> Expansion | None:
    """The function that computes the module's output from its products; None for a module that is not made of them."""
    return None
