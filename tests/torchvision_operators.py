"""Operators of a torchvision that was built for another torch: libraries only import it."""

from __future__ import annotations

import torch

try:
    import torchvision  # type: ignore[import-untyped]  # noqa: F401
except RuntimeError:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
