"""What a model's layers ask of the optimiser."""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_options(model: nn.Module) -> dict[str, dict[str, Any]]:
    """`layer_options` for the optimiser (see `ngsgd.NGSGD`), from modules that have an attribute of that name.

    Patterns in such an attribute count from the module that has it: "factor" of the module "tdnnf2" is "tdnnf2.factor".
    """
    return {f"{name}.{pattern}" if name else pattern: dict(options) for name, module in model.named_modules()
            for pattern, options in getattr(module, "layer_options", {}).items()}
