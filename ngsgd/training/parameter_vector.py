"""The parameters of a model as one flat float32 vector in a fixed order, the unit of transfer."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.ops.averaging import is_statistic

Vector = npt.NDArray[np.float32]
# (slice of the model, slice of a shorter vector that holds it)
Pieces = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class FlatLayout:
    """Names and shapes of the floating-point entries of a state dict, in order.

    A tied tensor has one entry, under its first name: averaged parts of it would differ.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> FlatLayout:
        first = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        entries = [(name, tuple(t.shape)) for name, t in model.state_dict(keep_vars=True).items()
                   if t.is_floating_point() and first[id(t)] == name]
        return cls(tuple(name for name, _ in entries), tuple(shape for _, shape in entries))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each entry, followed by the total size."""
        return (0, *accumulate(int(np.prod(shape)) for shape in self.shapes))

    @property
    def size(self) -> int:
        return self.offsets[-1]

    def by_name(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return dict(zip(self.names, self.shapes, strict=True))

    @cached_property
    def _parts(self) -> dict[str, slice]:
        return {name: slice(*ends) for name, ends in zip(self.names, pairwise(self.offsets), strict=True)}

    def difference(self, state: Mapping[str, Tensor]) -> str:
        """Describe the first entry of a state that has another shape here; "" if all are equal."""
        wanted, found = self.by_name(), {name: tuple(tensor.shape) for name, tensor in state.items()}
        name = next((name for name in {**wanted, **found} if wanted.get(name) != found.get(name)), "")
        return name and f"its {name} has shape {found.get(name, 'none')}, and that of this model {wanted.get(name, 'none')}"

    def part(self, name: str) -> slice:
        """Slice of the vector that holds an entry."""
        return self._parts[name]

    def name_at(self, element: int) -> str:
        """Name of the entry that contains an element of the vector."""
        return self.names[bisect_right(self.offsets, element) - 1]

    def flatten(self, state: Mapping[str, Tensor], out: Vector | None = None) -> Vector:
        """Return the vector, written into `out` if given; one copy per tensor from any device."""
        vector = np.empty(self.size, dtype=np.float32) if out is None else out
        whole = torch.from_numpy(vector)
        for name, part in self._parts.items():
            whole[part].copy_(state[name].detach().reshape(-1))
        return vector

    def unflatten(self, vector: Vector) -> dict[str, Tensor]:
        """Return copies, which do not alias the vector (vectors from Ray are read-only memory)."""
        return {name: torch.tensor(vector[self._parts[name]]).reshape(shape) for name, shape in self.by_name().items()}

    def load(self, model: nn.Module, vector: Vector) -> None:
        """Load the floating-point entries with one copy; other entries, such as counters, stay."""
        # torch has no read-only tensors and warns about read-only memory; nothing writes to it here
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            whole = torch.from_numpy(vector)
        model.load_state_dict({name: whole[self._parts[name]].view(shape) for name, shape in self.by_name().items()}, strict=False)

    def relative_change(self, before: Vector, after: Vector) -> dict[str, float]:
        """Norm of the change over the norm before, per entry."""
        return {name: float(np.linalg.norm(after[part] - before[part])) / max(float(np.linalg.norm(before[part])), 1e-10)
                for name, part in self._parts.items()}

    def statistics(self) -> tuple[slice, ...]:
        """Entries that hold statistics of the data, such as those of batch normalization."""
        return tuple(self.part(name) for name in self.names if is_statistic(name))

    def mean_and_variance(self) -> tuple[tuple[slice, slice], ...]:
        """(running_mean, running_var) of each normalization layer."""
        variances = [name for name in self.names if name.endswith("running_var")]
        return tuple((self.part(f"{name.removesuffix('running_var')}running_mean"), self.part(name)) for name in variances)

    def fragment(self, index: int, count: int) -> Pieces:
        """Every `count`-th layer from `index`; a layer is the direct entries of one module."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in self.names))
        chosen = set(layers[index::count])
        pieces, filled = [], 0
        for name, part in self._parts.items():
            if name.rpartition(".")[0] in chosen:
                pieces.append((part, slice(filled, filled := filled + part.stop - part.start)))
        return tuple(pieces)
