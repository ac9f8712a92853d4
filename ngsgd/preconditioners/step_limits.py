"""What directions P g can be scaled by: to the norm of the gradient, by a clip of lr^2 <P g, g>, by a limit on the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ngsgd.errors import ConfigError

# below any norm that means something
_TINY = 1e-30


def grafted(found: Mapping[str, Tensor], blocks: Mapping[str, Sequence[str]], norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each block's direction with the norm of its gradient: what the learning rate means is then that of SGD.

    `blocks` has the parameters of each by the name of one; `norms` those of the gradients.
    """
    scaled = dict(found)
    for name, block in blocks.items():
        numbers = torch.finfo(norms[name].dtype)
        # a direction of 0 stays 0
        scale = (norms[name] / norm_of([found[each] for each in block]).clamp(min=numbers.tiny)).clamp(max=numbers.max)
        for each in block:
            scaled[each] = found[each] * scale
    return scaled


def kl_clipped(found: Mapping[str, Tensor], grads: Mapping[str, Tensor], limit: float, lr: float | None) -> dict[str, Tensor]:
    """Directions times min(1, sqrt(limit / lr^2 |<P g, g>|)); ConfigError without a learning rate."""
    if lr is None:
        raise ConfigError("kl_clip needs the learning rate: call step(lr=...) with that of the optimiser.")
    change = lr * lr * sum(float((found[name] * g).sum()) for name, g in grads.items())
    scale = min(1.0, (limit / max(abs(change), _TINY)) ** 0.5)
    return {name: value * scale for name, value in found.items()}


def norm_limited(found: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Directions of together at most that L2 norm."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(found.values()))))
    scale = (limit / norm.clamp(min=_TINY)).clamp(max=1.0)
    return {name: value * scale for name, value in found.items()}


def norm_of(parts: Sequence[Tensor]) -> Tensor:
    """L2, of all parts together."""
    norms: list[Tensor] = [torch.linalg.vector_norm(part) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
