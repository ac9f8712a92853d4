"""Scaling of directions P g: to the gradient norm, by kl_clip, and by a limit on the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ngsgd.errors import ConfigError

# below every meaningful norm
_TINY = 1e-30


def grafted(found: Mapping[str, Tensor], blocks: Mapping[str, Sequence[str]], norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scale the direction of each block to the norm of its gradient.

    The learning rate then has the meaning that it has for SGD.

    Args:
        found: directions by parameter name.
        blocks: parameters of each block, by the name of one of them.
        norms: gradient norms of the blocks.
    """
    scaled = dict(found)
    for name, block in blocks.items():
        numbers = torch.finfo(norms[name].dtype)
        # A zero direction stays zero.
        scale = (norms[name] / norm_of([found[each] for each in block]).clamp(min=numbers.tiny)).clamp(max=numbers.max)
        for each in block:
            scaled[each] = found[each] * scale
    return scaled


def kl_clipped(found: Mapping[str, Tensor], grads: Mapping[str, Tensor], limit: float, lr: float | None) -> dict[str, Tensor]:
    """Multiply directions by min(1, sqrt(limit / lr^2 |<P g, g>|)).

    ConfigError without a learning rate.
    """
    if lr is None:
        raise ConfigError("kl_clip needs the learning rate: call step(lr=...) with the learning "
                          "rate of the optimizer.")
    change = lr * lr * sum(float((found[name] * g).sum()) for name, g in grads.items())
    scale = min(1.0, (limit / max(abs(change), _TINY)) ** 0.5)
    return {name: value * scale for name, value in found.items()}


def norm_limited(found: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Scale directions to a joint L2 norm of at most `limit`."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(found.values()))))
    scale = (limit / norm.clamp(min=_TINY)).clamp(max=1.0)
    return {name: value * scale for name, value in found.items()}


def norm_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the joint L2 norm."""
    norms: list[Tensor] = [torch.linalg.vector_norm(part) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
