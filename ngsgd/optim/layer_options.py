"""Optimizer options that layers of a model declare."""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_options(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect `layer_options` for the optimizer (see `ngsgd.NGSGD`) from modules with that
    attribute.

    Patterns are relative to their module: "factor" in the module "tdnnf2" becomes "tdnnf2.factor".
    """
    return {f"{name}.{pattern}" if name else pattern: dict(options) for name, module in model.named_modules()
            for pattern, options in getattr(module, "layer_options", {}).items()}
