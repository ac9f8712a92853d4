"""Layers and parameter counts of a model, as a table of plain text."""

from __future__ import annotations

from torch import nn

# longer tables list the top-level modules only
_MAX_ROWS = 20


def summary(model: nn.Module) -> list[str]:
    """List the modules that own parameters: name, type, shape of the largest parameter, number of
    parameters.

    Args:
        model: any module. Parameters shared by several modules count once.

    Returns:
        A line with the totals, then one line per module; in models with more than 20 such modules,
        one line per top-level module.

    Example:
        >>> summary(nn.Sequential(nn.Linear(3, 2)))
        ['model: 8 parameters', '  0  Linear  2 x 3  8']
    """
    seen: set[nn.Parameter] = set()
    rows = []
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one not in seen]
        seen.update(own)
        if own:
            largest = max(own, key=nn.Parameter.numel)
            rows.append((name or "(model)", _public_name(type(module)), " x ".join(map(str, largest.shape)), _count(own)))
    if len(rows) > _MAX_ROWS:
        rows = [(name, _public_name(type(module)), "", _count(list(module.parameters())))
                for name, module in model.named_children() if any(True for _ in module.parameters())][:_MAX_ROWS]
    fixed = sum(one.numel() for one in seen if not one.requires_grad)
    total = f"model: {sum(one.numel() for one in seen):,} parameters{f', {fixed:,} of them fixed' if fixed else ''}"
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    return [total, *("  " + "  ".join([*(f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=False)),
                                       f"{row[3]:>{widths[3]}}"]) for row in rows)]


def _public_name(kind: type[nn.Module]) -> str:
    """The name of a class; a private class of torch has that of the layer that it derives from."""
    if kind.__module__.partition(".")[0] != "torch":
        return kind.__name__
    return next((base.__name__ for base in kind.__mro__ if hasattr(nn, base.__name__)), kind.__name__)


def _count(parameters: list[nn.Parameter]) -> str:
    return f"{sum(one.numel() for one in parameters):,}"
