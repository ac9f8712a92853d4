"""Tasks: a pure loss of parameters and index, a fixed validation loss; P parameters, G layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.errors import ArgumentError, ConfigError
from ngsgd.ops.tensors import dense


class MinibatchIndex(NamedTuple):
    """Index of a minibatch of a run; it determines the data and all random numbers.

    Example:
        >>> MinibatchIndex(0, 0, 3).step
        3
    """

    outer_iter: int
    job: int
    # within the outer iteration
    step: int

    def seed(self, run_seed: int) -> int:
        """Return the seed for torch's generator."""
        return int(np.random.SeedSequence([run_seed, *self]).generate_state(1)[0])


class TrainingTask(Protocol):
    """Interface of the tasks of `hypergradient`, whose losses are pure: no state changes them."""

    seed: int

    @property
    def start(self) -> Mapping[str, Tensor]:
        """Return the initial parameters, all float32 or all float64, in the order of the vector."""

    @property
    def layers(self) -> Mapping[str, Sequence[str]]:
        """Return the parameters of each layer, in the order of `start`."""

    def loss(self, parameters: Mapping[str, Tensor], place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        """Return the loss of the minibatch at `place`; torch's generator is seeded for it."""

    def validation(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the loss to minimize over hyperparameters; fixed data, and no random numbers."""


Batch = tuple[Tensor, ...]
LossOf = Callable[[Tensor, Batch, Tensor | None], Tensor]


class ModuleTask:
    """Task of a module.

    Args:
        module: its parameters are the initial ones; every minibatch uses its current buffers.
        batch: returns the minibatch at a place. It is called whenever the minibatch is needed, and
            must be bitwise reproducible. The module is called with its first tensor.
        loss: (output, minibatch, data weights) -> number; a sum or mean, to which learning rates
            apply.
        validation: minibatches of the validation loss, the mean of `loss` with the module in eval
            mode.

    Raises:
        ConfigError: a batch norm has running statistics. They do not follow the reversible steps,
            so the validation loss would use the initial ones.

    Example:
        >>> module = torch.nn.Linear(3, 2)
        >>> batch = (torch.randn(8, 3), torch.randn(8, 2))
        >>> task = ModuleTask(module, lambda place: batch, lambda y, b, _: (y - b[1]).square().mean(), [batch])
        >>> list(task.start)
        ['weight', 'bias']
    """

    def __init__(self, module: nn.Module, batch: Callable[[MinibatchIndex], Batch], loss: LossOf,
                 validation: Sequence[Batch], seed: int = 0) -> None:
        if running := [name for name, one in module.named_modules() if isinstance(one, nn.modules.batchnorm._NormBase)
                       and one.track_running_stats and one.running_mean is not None and one.training]:
            raise ConfigError(f"layer {running[0]} has running statistics, which do not follow reversible steps; use GroupNorm or "
                              "LayerNorm, or create it with track_running_stats=False (statistics of the minibatch in "
                              "validation, too).")
        self.module, self.batch, self._loss, self._validation, self.seed = module, batch, loss, validation, seed

    @cached_property
    def start(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        layers: dict[str, list[str]] = {}
        for name in self.start:
            layers.setdefault(name.rpartition(".")[0] or type(self.module).__name__, []).append(name)
        return layers

    def loss(self, parameters: Mapping[str, Tensor], place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        batch = self.batch(place)
        return self._loss(self._call(parameters, batch[0]), batch, data_weights)

    def validation(self, parameters: Mapping[str, Tensor]) -> Tensor:
        was = {one: one.training for one in self.module.modules()}
        self.module.eval()
        try:
            losses = [self._loss(self._call(parameters, batch[0]), batch, None) for batch in self._validation]
        finally:
            for one, training in was.items():
                one.training = training
        return torch.stack(losses).sum() / len(losses)

    def _call(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        # Copies, so that running statistics are equal at every minibatch, in both directions.
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output: Tensor = torch.func.functional_call(self.module, {**parameters, **buffers}, (x,))
        return output


@dataclass(frozen=True)
class Flat:
    """Parameters of a task as one vector, layer by layer."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    layer_names: tuple[str, ...]
    # slices of the vector, by layer
    groups: tuple[slice, ...]

    @classmethod
    def of(cls, task: TrainingTask) -> Flat:
        """Create the layout of a task."""
        start, layers = task.start, task.layers
        names = [name for layer in layers.values() for name in layer]
        dtypes = {p.dtype for p in start.values()}
        if names != list(start) or len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            raise ArgumentError("Invalid task: layers must list all parameters in their order, all float32 or all float64; they "
                                f"are {', '.join(sorted(map(str, dtypes))) or 'none'}. Convert the model, as in model.float().")
        ends = list(accumulate(sum(start[name].numel() for name in layer) for layer in layers.values()))
        groups = tuple(slice(first, stop) for first, stop in zip([0, *ends], ends, strict=False))
        return cls(tuple(names), tuple(start[name].shape for name in names), tuple(layers), groups)

    @cached_property
    def sizes(self) -> list[int]:
        r"""Sizes of the layers."""
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        r"""P"""
        return sum(self.sizes)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        r"""Concatenate tensors to a vector."""
        return torch.cat([dense(tensor).reshape(-1) for tensor in tensors])

    def unflatten(self, vector_P: Tensor) -> list[Tensor]:
        """Return views of the vector in the shapes of the parameters."""
        return [part.view(shape) for part, shape in zip(vector_P.split(self.sizes), self.shapes, strict=True)]

    def spread(self, values_G: Tensor) -> Tensor:
        """Repeat the number of each layer for each of its parameters."""
        return torch.repeat_interleave(values_G, torch.tensor([group.stop - group.start for group in self.groups]))

    def products(self, a_P: Tensor, b_P: Tensor) -> Tensor:
        """Return inner products by layer, G."""
        return torch.stack([torch.dot(a_P[group], b_P[group]) for group in self.groups])
