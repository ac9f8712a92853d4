"""What a model is told about its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """What an input row is made of: frames with their context, laid end to end, and what goes beside them."""

    left_context: int     # frames
    right_context: int    # frames
    feature_dim: int      # of one frame
    # of what is not spliced, such as an i-vector; at the end of the row
    side_dim: int = 0

    @property
    def num_inputs(self) -> int:
        return (self.left_context + 1 + self.right_context) * self.feature_dim + self.side_dim


@dataclass(frozen=True)
class DataStatistics:
    """What a model takes from the training examples before the first minibatch (`ngsgd.models.statistics`)."""

    # frames of each class
    class_counts: tuple[float, ...] = ()
    input_transform: Tensor | None = None       # outputs x inputs + 1
