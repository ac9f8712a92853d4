"""What is minimised.  Letters: N rows (frames), P classes."""

from __future__ import annotations

from torch import Tensor, nn


def summed_loss(logits_NP: Tensor, pdf_N: Tensor, weight_N: Tensor | None) -> Tensor:
    """Minus the objf, summed over the frames, each times its weight (Kaldi's posterior weights); not divided by anything."""
    if weight_N is None:
        return nn.functional.cross_entropy(logits_NP, pdf_N, reduction="sum")
    return (nn.functional.cross_entropy(logits_NP, pdf_N, reduction="none") * weight_N).sum()
