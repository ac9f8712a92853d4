"""A model's parameters as one flat float32 vector, in a fixed order: what travels between workers and coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the floating-point entries of a state dict, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        entries = [(name, tuple(t.shape)) for name, t in model.state_dict().items() if t.is_floating_point()]
        return cls(tuple(name for name, _ in entries), tuple(shape for _, shape in entries))

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Name to shape."""
        return dict(zip(self.names, self.shapes, strict=True))

    def flatten(self, state: Mapping[str, Tensor]) -> Vector:
        return np.concatenate([state[name].detach().float().cpu().numpy().reshape(-1) for name in self.names])

    def unflatten(self, vector: Vector) -> dict[str, Tensor]:
        """Copies, so that nothing aliases the vector (Ray hands out read-only memory)."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return {name: torch.tensor(part).reshape(shape)
                for name, shape, part in zip(self.names, self.shapes, parts, strict=True)}

    def load(self, model: nn.Module, vector: Vector) -> None:
        """Sets the model's floating-point entries; counters and the like stay as they are."""
        model.load_state_dict(self.unflatten(vector), strict=False)

    def relative_change(self, before: Vector, after: Vector) -> dict[str, float]:
        """Per entry: norm of the change over norm of the entry before."""
        old, new = self.unflatten(before), self.unflatten(after)
        return {name: float((new[name] - old[name]).norm() / old[name].norm().clamp(min=1e-10)) for name in self.names}
