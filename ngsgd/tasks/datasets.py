"""A task for map-style datasets with a model and a loss function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from numbers import Real
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from ngsgd.errors import ConfigError
from ngsgd.imports import first_line
from ngsgd.schedules import Shard
from ngsgd.tasks.functions import (
    NUM_CHECK_EXAMPLES,
    CollateFunction,
    FunctionTask,
    LossFunction,
    LossReduction,
    MetricsFunction,
    ModelFunction,
    WeightFunction,
    collated,
    read,
)
from ngsgd.training.task import Batch, ShardGrid

# a longer job makes the loss of a worker expensive; a shorter one makes averaging dominate
_MAX_SHARD = 16384
_MIN_SHARDS = 8
# examples whose order is computed at a time
_NUM_ORDERED = 4096
# seed of the split into training and validation examples; independent of the seed of the run, so
# that all runs of one dataset are scored on the same examples
_SPLIT_SEED = (0x6E67, 0x7364)
# of the check whether the loss is a mean or a sum; float32 sums of few terms
_NUM_REDUCTION_EXAMPLES, _REDUCTION_TOLERANCE = 4, 1e-4


class MapDataset(Protocol):
    """A map-style dataset: of torch, of Hugging Face, a list, or a class with these methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DatasetTask(FunctionTask):
    """Trains a model on a map-style dataset.

    The dataset is divided into shards of random examples. Each job of an outer iteration trains on
    one shard. The examples of a shard depend on the seed of the run; their order depends on the
    seed, the outer iteration and the job. No index is stored, so the memory does not depend on the
    number of examples, and a pass can start anywhere in constant time.

    A worker process builds its own copy of the task, so functions must be importable: defined with
    `def` at the top of a module or script.

    Args:
        dataset: object with `__len__` and `__getitem__`, such as a `TensorDataset`, a Hugging Face
            dataset or a list.
        model_fn: returns a new model. The generator of torch is seeded with the seed of the run.
        loss_fn: `loss_fn(model, batch)` returns the loss of a minibatch, a scalar tensor.
        valid: validation dataset of any type that `dataset` may have, or the fraction of `dataset`
            that is held out for validation. Default: 0.05.
        collate_fn: converts a list of examples to a minibatch, as for a `DataLoader`. Every tensor
            of a minibatch should have one row per example, unless `weight_fn` is given.
        metrics_fn: `metrics_fn(model, batch)` returns numbers by name, means over a minibatch, such
            as {"accuracy": ...}. It is called on held-out examples only. Default: None.
        loss_reduction: whether `loss_fn` returns the "mean" over the minibatch or the "sum".
            Default: "mean".
        weight_fn: `weight_fn(batch)` returns the total weight of a minibatch, such as its number of
            tokens for a language model. Default: the number of examples.
        shard_size: examples of a job. Default: 16384, or an eighth of a smaller dataset.
        num_eval_examples: examples of each of the training and validation sets that are scored
            after each outer iteration. Default: a quarter of a job, between 256 and 2000.

    Raises:
        ConfigError: there is no example to train on or to validate with, or an argument has a wrong
            type. Training raises DataError, with its index, for an example that cannot be read or
            combined with the others.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> dataset = TensorDataset(torch.randn(1000, 4), torch.arange(1000) % 2)
        >>> task = DatasetTask(dataset, lambda: torch.nn.Linear(4, 2), loss_fn)
        >>> task.num_examples, task.shards().num_archives
        (950, 8)
    """

    starts_anywhere = True
    names_examples = True
    _excluded: frozenset[int] = frozenset()

    def __init__(self, dataset: MapDataset, model_fn: ModelFunction, loss_fn: LossFunction, *,
                 valid: MapDataset | float = 0.05, collate_fn: CollateFunction = default_collate,
                 metrics_fn: MetricsFunction | None = None, loss_reduction: LossReduction = "mean",
                 weight_fn: WeightFunction | None = None, shard_size: int | None = None,
                 num_eval_examples: int | None = None) -> None:
        super().__init__(model_fn, loss_fn, metrics_fn=metrics_fn, loss_reduction=loss_reduction, weight_fn=weight_fn)
        self.dataset, self.valid, self.collate_fn = dataset, valid, collate_fn
        size = _length(dataset, "dataset")
        self._split: Permutation | None = None
        self.num_valid = 0
        # a number of NumPy is a Real, too
        if isinstance(valid, (int, float, Real)):
            if not 0.0 < float(valid) < 1.0:
                raise ConfigError(f"valid is {valid}; give a fraction between 0 and 1, or a dataset.")
            self.num_valid = max(1, round(float(valid) * size))
            self._split = Permutation(max(size, 1), _SPLIT_SEED)
        elif not _length(valid, "valid"):
            raise ConfigError("the validation dataset is empty; give at least one example.")
        self.num_examples = size - self.num_valid
        if self.num_examples < 1:
            raise ConfigError(f"the number of examples is {size} and that of held-out ones {self.num_valid}, so none is left "
                              "for training; add examples, or reduce valid.")
        for name, number in (("shard_size", shard_size), ("num_eval_examples", num_eval_examples)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1):
                raise ConfigError(f"{name} is {number!r}; give an integer of at least 1.")
        self.shard_size = min(self.num_examples, shard_size or min(_MAX_SHARD, math.ceil(self.num_examples / _MIN_SHARDS)))
        self.num_eval_examples = num_eval_examples or min(max(self.shard_size // 4, 256), 2000)

    def shards(self) -> ShardGrid:
        return ShardGrid(max(1, round(self.num_examples / self.shard_size)))

    def num_batches(self, shard: Shard, size: int) -> int:
        first, stop = self._range(shard)
        return max(1, round((stop - first) / size))

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        last = self.num_batches(shard, size) if stop is None else stop
        indices_of = self._order(shard, size, seed, last)
        for number in range(first, last):
            yield self._batch(self.dataset, indices_of(number))

    def example_ids(self, shard: Shard, size: int, *, seed: tuple[int, int, int], number: int) -> list[str]:
        """Indices in the dataset, such as "17"."""
        return [str(index) for index in self._order(shard, size, seed, number + 1)(number).tolist()]

    def _order(self, shard: Shard, size: int, seed: tuple[int, int, int], stop: int) -> Callable[[int], Indices]:
        """Number of a minibatch, below `stop` -> indices of its examples in the dataset."""
        begin, end = self._range(shard)
        length, count = end - begin, self.num_batches(shard, size)
        division = Permutation(self.num_examples, (seed[0],))
        order = Permutation(length, (*seed, shard.archive))
        # computed for several minibatches at a time: one would take as long
        known, known_from = np.empty(0, np.int64), 0

        def indices_of(number: int) -> Indices:
            nonlocal known, known_from
            # sizes differ by at most one: a last minibatch of one example would break batch norms
            row, end_row = number * length // count, (number + 1) * length // count
            if not known_from <= row <= end_row <= known_from + len(known):
                last = min(stop, number + max(1, _NUM_ORDERED * count // length))
                known, known_from = self._indices(division.of(begin + order.at(row, last * length // count))), row
            indices = known[row - known_from:end_row - known_from]
            # without examples in quarantine, unless none would be left
            kept = indices[[index not in self._excluded for index in indices.tolist()]] if self._excluded else indices
            return kept if len(kept) else indices
        return indices_of

    def exclude(self, examples: Sequence[str]) -> None:
        self._excluded = frozenset(map(int, examples))

    @torch.no_grad()
    def wrong_reduction(self, model: nn.Module) -> str:
        count = min(_NUM_REDUCTION_EXAMPLES, self.num_examples)
        if self.weight_fn is not None or count < _NUM_REDUCTION_EXAMPLES:
            return ""
        model.eval()
        # four examples, and the same ones as three and one
        parts = ((0, count), (0, count - 1), (count - 1, count))
        with torch.random.fork_rng(devices=[]):
            whole, most, last = (float(self.loss_fn(model, self._train_batch(np.arange(*part)).data)) for part in parts)
        of_mean, of_sum = ((count - 1) * most + last) / count, most + last
        is_mean, is_sum = (math.isclose(whole, one, rel_tol=_REDUCTION_TOLERANCE) for one in (of_mean, of_sum))
        found = "mean" if is_mean and not is_sum else "sum" if is_sum and not is_mean else self.loss_reduction
        if found == self.loss_reduction:
            return ""
        return (f"loss_fn seems to return a {found} over the minibatch, and loss_reduction is {self.loss_reduction}: losses and "
                f"learning rates are off by the minibatch size; give DatasetTask(..., loss_reduction=\"{found}\")")

    def _range(self, shard: Shard) -> tuple[int, int]:
        count = self.shards().num_archives
        return (shard.archive * self.num_examples // count, (shard.archive + 1) * self.num_examples // count)

    def _indices(self, examples: Indices) -> Indices:
        return examples if self._split is None else self._split.of(examples + self.num_valid)

    def _train_batch(self, examples: Indices) -> Batch:
        return self._batch(self.dataset, self._indices(examples))

    def _batch(self, dataset: Any, examples: Indices) -> Batch:
        if type(dataset) is TensorDataset and self.collate_fn is default_collate:
            # the same values as one example at a time, in one copy
            rows = torch.from_numpy(examples)
            return Batch([tensor[rows] for tensor in dataset.tensors], len(examples))
        name, indices = "valid" if dataset is self.valid else "dataset", examples.tolist()
        return collated(read(dataset, indices, name), lambda place: f"example {indices[place]} of {name}", self.collate_fn,
                        has_weight=self.weight_fn is not None)

    @cached_property
    def train_subset(self) -> list[tuple[Any, int]]:
        return self._subset(self._train_batch, self.num_examples, self.num_eval_examples)

    @cached_property
    def valid_subset(self) -> list[tuple[Any, int]]:
        return self._validation(self.num_eval_examples)

    @cached_property
    def check_subset(self) -> list[tuple[Any, int]]:
        return self._validation(NUM_CHECK_EXAMPLES)

    def _validation(self, wanted: int) -> list[tuple[Any, int]]:
        split, size = self._split, self.num_valid
        if split is None:
            fetch, size = partial(self._batch, self.valid), _length(self.valid, "valid")
            return self._subset(fetch, size, wanted)
        return self._subset(lambda examples: self._batch(self.dataset, split.of(examples)), size, wanted)

    def _subset(self, fetch: Callable[[Indices], Batch], size: int, wanted: int) -> list[tuple[Any, int]]:
        """Return the same random examples in every process, as minibatches."""
        chosen = Permutation(size, _SPLIT_SEED).at(0, min(size, wanted))
        parts = [chosen[first:first + NUM_CHECK_EXAMPLES] for first in range(0, len(chosen), NUM_CHECK_EXAMPLES)]
        return [tuple(fetch(part)) for part in parts]


def _length(dataset: Any, name: str) -> int:
    """Number of examples of a dataset; raises ConfigError unless it is map-style."""
    is_map_style = hasattr(dataset, "__getitem__") and not isinstance(dataset, (IterableDataset, str, bytes, type))
    try:
        if is_map_style:
            return len(dataset)
        why = "is not a map-style dataset"
    except Exception as error:
        why = f"has no length ({first_line(error)})"
    raise ConfigError(f"{name} is of type {type(dataset).__name__}, which {why}; DatasetTask needs a map-style dataset with "
                      "__len__ and __getitem__, and StreamTask reads streams.")


Indices = npt.NDArray[np.int64]

_NUM_ROUNDS = 6


class Permutation:
    """A permutation of 0 to `size` - 1, determined by `seed`, that needs no memory.

    A Feistel network of hash functions permutes the next larger power of four. Values out of range
    are permuted again until they are in range (cycle walking). The time for an entry does not
    depend on the size.

    Args:
        size: number of entries, at least 1.
        seed: non-negative integers; every different sequence gives another permutation.

    Example:
        >>> permutation = Permutation(5, seed=(1, 2))
        >>> sorted(permutation.at(0, 5).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one entry, not {size}")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        # the length, because a SeedSequence ignores trailing zeros
        self._keys = np.random.SeedSequence([len(seed), *seed]).generate_state(_NUM_ROUNDS, np.uint64)

    def at(self, first: int, stop: int) -> Indices:
        """Return the entries at positions `first` to `stop` - 1."""
        if not 0 <= first <= stop <= self.size:
            raise IndexError(f"positions {first} to {stop} of a permutation of {self.size} entries")
        return self.of(np.arange(first, stop))

    def of(self, positions: Indices) -> Indices:
        """Return the entries at these positions."""
        values = self._rounds(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._rounds(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _rounds(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right ^ key) & self._mask)
        return (left << self._shift) | right


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix all bits (splitmix64: Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
