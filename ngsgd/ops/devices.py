"""Transfer of numbers to a device without blocking the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers of the host to `device`, through pinned memory, so that the host does not wait.

    Example:
        >>> to_device(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
