"""Description of the input of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """Composition of an input row: concatenated frames with context, then side values."""

    left_context: int     # frames
    right_context: int    # frames
    feature_dim: int      # of one frame
    # values that are not spliced, such as an i-vector, at the end of the row
    side_dim: int = 0

    @property
    def num_inputs(self) -> int:
        r"""Length of a row."""
        return (self.left_context + 1 + self.right_context) * self.feature_dim + self.side_dim


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the training examples that a model needs (`ngsgd.models.statistics`)."""

    # frames of each class
    class_counts: tuple[float, ...] = ()
    input_transform: Tensor | None = None       # outputs x inputs + 1
