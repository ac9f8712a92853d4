"""A task that reads examples from sequential sources, such as tar archives or JSON lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from ngsgd.errors import ConfigError, DataError, NgsgdError
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
)
from ngsgd.training.task import Batch, ShardGrid

OpenFunction = Callable[[Any], Iterable[Any]]


class StreamTask(FunctionTask):
    """Trains a model on sources that can only be read sequentially.

    Each job of an outer iteration trains on one source. Provide several times as many sources as
    workers, of about equal length. A run reads each source once per epoch. Examples are shuffled
    within a buffer. A job that is retried, or that continues in the middle of a source, reads the
    source from the beginning and drops the earlier examples.

    Args:
        sources: arguments of `open_fn`, such as file names; one shard each.
        open_fn: `open_fn(source)` returns an iterable of examples, the same at every call, such as
            an `IterableDataset` or a generator.
        model_fn: returns a new model. The generator of torch is seeded with the seed of the run.
        loss_fn: `loss_fn(model, batch)` returns the loss of a minibatch, a scalar tensor.
        examples_per_source: number of examples to read from each source, or one number per source.
            Further examples of a stream are ignored; a shorter stream raises DataError.
        valid: iterable of validation examples; the first `num_eval_examples` are scored.
        collate_fn: converts a list of examples to a minibatch, as for a `DataLoader`.
        metrics_fn: see `DatasetTask`. Default: None.
        loss_reduction: whether `loss_fn` returns the "mean" over the minibatch or the "sum".
            Default: "mean".
        weight_fn: see `DatasetTask`. Default: None.
        shuffle_buffer: examples held in memory, from which the next one is sampled; 1 keeps the
            order of the stream.
        num_eval_examples: examples of the first source and of `valid` that are scored after each
            outer iteration.

    Raises:
        ConfigError: there is no source, or a number is out of range.

    Example:
        >>> import torch
        >>> def read(source):
        ...     return ((torch.full((4,), float(n)), n % 2) for n in range(100))
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> task = StreamTask(["a.jsonl", "b.jsonl"], read, lambda: torch.nn.Linear(4, 2), loss_fn,
        ...                   examples_per_source=100, valid=list(read("valid.jsonl")))
        >>> task.shards().num_archives
        2
    """

    def __init__(self, sources: Sequence[Any], open_fn: OpenFunction, model_fn: ModelFunction,
                 loss_fn: LossFunction, *, examples_per_source: int | Sequence[int], valid: Iterable[Any],
                 collate_fn: CollateFunction = default_collate,
                 metrics_fn: MetricsFunction | None = None, loss_reduction: LossReduction = "mean",
                 weight_fn: WeightFunction | None = None, shuffle_buffer: int = 1000, num_eval_examples: int = 1000) -> None:
        super().__init__(model_fn, loss_fn, metrics_fn=metrics_fn, loss_reduction=loss_reduction, weight_fn=weight_fn)
        self.sources = list(sources)
        if not self.sources:
            raise ConfigError("StreamTask has no sources; give at least one.")
        given = examples_per_source
        self.lengths = list(given) if isinstance(given, (Sequence, np.ndarray)) else [given] * len(self.sources)
        if not callable(open_fn) or not isinstance(valid, Iterable):
            raise ConfigError("open_fn must be a function that returns an iterable, and valid an iterable of examples.")
        if len(self.lengths) != len(self.sources):
            raise ConfigError(f"examples_per_source has {len(self.lengths)} numbers for "
                              f"{len(self.sources)} sources; give one for each.")
        numbers = [*self.lengths, shuffle_buffer, num_eval_examples]
        if any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) or one < 1 for one in numbers):
            raise ConfigError("examples_per_source, shuffle_buffer and num_eval_examples must be integers of at least 1.")
        self.open_fn, self.valid, self.collate_fn = open_fn, valid, collate_fn
        self.shuffle_buffer, self.num_eval_examples = shuffle_buffer, num_eval_examples

    def shards(self) -> ShardGrid:
        return ShardGrid(len(self.sources))

    def num_batches(self, shard: Shard, size: int) -> int:
        return max(1, round(self.lengths[shard.archive] / size))

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        length, count = self.lengths[shard.archive], self.num_batches(shard, size)
        examples = self._shuffled(shard.archive, seed)
        for number in range(count if stop is None else stop):
            # sizes differ by at most one: a last minibatch of one example would break batch norms
            num_examples = (number + 1) * length // count - number * length // count
            read = list(itertools.islice(examples, num_examples))
            if number >= first:
                yield self._batch(read, f"minibatch {number} of source {self.sources[shard.archive]!r}")

    @cached_property
    def train_subset(self) -> list[tuple[Any, int]]:
        return self._minibatches(self._read(0))

    @cached_property
    def valid_subset(self) -> list[tuple[Any, int]]:
        if not (subset := self._minibatches(self.valid)):
            raise ConfigError("valid has no example; give at least one.")
        return subset

    @property
    def check_subset(self) -> list[tuple[Any, int]]:
        return self.valid_subset[:1]

    def _shuffled(self, number: int, seed: tuple[int, int, int]) -> Iterator[Any]:
        random = np.random.default_rng([*seed, number])
        stream = self._read(number)
        buffer = list(itertools.islice(stream, self.shuffle_buffer))
        for example in stream:
            place = int(random.integers(len(buffer)))
            yield buffer[place]
            buffer[place] = example
        random.shuffle(buffer)
        yield from buffer

    def _read(self, number: int) -> Iterator[Any]:
        """Yield the declared number of examples of a source."""
        count = 0
        try:
            for example in itertools.islice(self.open_fn(self.sources[number]), self.lengths[number]):
                count += 1
                yield example
        except NgsgdError:
            raise
        except Exception as error:
            raise DataError(f"source {self.sources[number]!r} cannot be read after {count} examples ({first_line(error)}); correct "
                            "open_fn or the source.") from error
        if count < self.lengths[number]:
            raise DataError(f"source {self.sources[number]!r} ended after {count} of "
                            f"{self.lengths[number]} examples; correct examples_per_source.")

    def _minibatches(self, examples: Iterable[Any]) -> list[tuple[Any, int]]:
        some = list(itertools.islice(examples, self.num_eval_examples))
        parts = [some[first:first + NUM_CHECK_EXAMPLES] for first in range(0, len(some), NUM_CHECK_EXAMPLES)]
        return [tuple(self._batch(part, "the examples to score")) for part in parts]

    def _batch(self, examples: Sequence[Any], where: str) -> Batch:
        return collated(examples, lambda place: f"example {place} in {where}", self.collate_fn,
                        has_weight=self.weight_fn is not None)
