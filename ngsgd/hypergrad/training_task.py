"""What is trained: a loss that is a pure function of parameters and of where the run stands, and a fixed validation loss.

Letters: P parameters, G layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn


class MinibatchIndex(NamedTuple):
    """One minibatch of a run; it decides the data and every random draw."""

    outer_iter: int
    job: int
    # within the outer iteration
    step: int

    def seed(self, run_seed: int) -> int:
        """For torch's generator."""
        return int(np.random.SeedSequence([run_seed, *self]).generate_state(1)[0])


class TrainingTask(Protocol):
    """What `hypergradient` differentiates.  Both losses must be pure: no state of a module may change what they give."""

    seed: int

    @property
    def start(self) -> Mapping[str, Tensor]:
        """The parameters before the first step, all float32 or all float64, in the order of the flat vector."""

    @property
    def layers(self) -> Mapping[str, Sequence[str]]:
        """Layer to its parameters; layers and parameters in the order of `start`."""

    def loss(self, parameters: Mapping[str, Tensor], place: MinibatchIndex,
             data_weights: Tensor | None) -> Tensor:
        """Of the minibatch at `place`; torch's generator has been seeded for it."""

    def validation(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """What the hyperparameters are to lower; on fixed data, without random draws."""


Batch = tuple[Tensor, ...]
LossOf = Callable[[Tensor, Batch, Tensor | None], Tensor]


class ModuleTask:
    """A task of a module: `batch(place)` is called anew whenever that minibatch is needed, and must give the same bits.

    Args:
        module: its parameters are the start; buffers are as they are now at every minibatch.
        batch: the minibatch at a place; the module is called with its first tensor.
        loss: (output, minibatch, data weights) to a number; sum or mean, learning rates go with it.
        validation: minibatches on which the mean of `loss` is what the hyperparameters are judged by (module in eval mode).
    """

    def __init__(self, module: nn.Module, batch: Callable[[MinibatchIndex], Batch], loss: LossOf,
                 validation: Sequence[Batch],
                 seed: int = 0) -> None:
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

    def loss(self, parameters: Mapping[str, Tensor], place: MinibatchIndex,
             data_weights: Tensor | None) -> Tensor:
        batch = self.batch(place)
        return self._loss(self._call(parameters, batch[0]), batch, data_weights)

    def validation(self, parameters: Mapping[str, Tensor]) -> Tensor:
        with _evaluating(self.module):
            losses = [self._loss(self._call(parameters, batch[0]), batch, None) for batch in self._validation]
        return torch.stack(losses).sum() / len(losses)

    def _call(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        # copies, so that running statistics are the same at every minibatch, on the way there and
        # back
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output: Tensor = torch.func.functional_call(self.module, {**parameters, **buffers}, (x,))
        return output


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was = {one: one.training for one in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for one, training in was.items():
            one.training = training


@dataclass(frozen=True)
class Flat:
    """The parameters of a task as one vector, a layer after the other."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    layer_names: tuple[str, ...]
    # of the vector, by layer
    groups: tuple[slice, ...]

    @classmethod
    def of(cls, task: TrainingTask) -> Flat:
        start, layers = task.start, task.layers
        names = [name for layer in layers.values() for name in layer]
        if names != list(start) or len({p.dtype for p in start.values()}) != 1:
            raise ValueError("Invalid task: layers must name all parameters in their order, and these must be of one type")
        ends = list(accumulate(sum(start[name].numel() for name in layer) for layer in layers.values()))
        groups = tuple(slice(first, stop) for first, stop in zip([0, *ends], ends, strict=False))
        return cls(tuple(names), tuple(start[name].shape for name in names), tuple(layers), groups)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def unflatten(self, vector_P: Tensor) -> list[Tensor]:
        """Views."""
        return [part.view(shape) for part, shape in zip(vector_P.split(self.sizes), self.shapes, strict=True)]

    def spread(self, values_G: Tensor) -> Tensor:
        """Each layer's number at each of its parameters."""
        return torch.repeat_interleave(values_G, torch.tensor([group.stop - group.start for group in self.groups]))

    def products(self, a_P: Tensor, b_P: Tensor) -> Tensor:
        """Inner products by layer, G."""
        return torch.stack([torch.dot(a_P[group], b_P[group]) for group in self.groups])
