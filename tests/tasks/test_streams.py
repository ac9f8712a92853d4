"""A task whose examples are read from beginning to end: order, minibatches and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import ngsgd
from ngsgd.errors import ConfigError, DataError
from ngsgd.schedules import Shard
from ngsgd.tasks import StreamTask
from tests.tasks import blobs

LENGTHS = (70, 90, 101)


def read(source: int) -> Iterator[dict[str, Tensor]]:
    """The examples of a source; each has its number."""
    x_ND, y_N = blobs.dataset().tensors
    first = sum(LENGTHS[:source])
    for index in range(first, first + LENGTHS[source]):
        yield {"x": x_ND[index], "y": y_N[index], "index": torch.tensor(index)}


class Source(IterableDataset[dict[str, Tensor]]):
    """The same as torch's class."""

    def __init__(self, source: int) -> None:
        self.source = source

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return read(self.source)


def make_task(**options: Any) -> StreamTask:
    given = {"examples_per_source": LENGTHS, "valid": list(read(0)), "shuffle_buffer": 16, **options}
    return StreamTask(range(3), read, blobs.make_model, blobs.mean_loss, metrics_fn=blobs.accuracy, **given)


def indices(task: StreamTask, source: int, seed: tuple[int, int, int] = (0, 0, 0), **part: int) -> list[int]:
    batches = task.batches(Shard(source, 0), 16, seed=seed, **part)
    return [index for batch in batches for index in batch.data["index"].tolist()]


def test_a_pass_has_every_example_once_in_an_order_that_the_seed_decides() -> None:
    task = make_task()
    assert sorted(indices(task, 1)) == list(range(70, 160))
    assert indices(task, 1) == indices(task, 1) != indices(task, 1, (0, 1, 0))
    assert indices(make_task(shuffle_buffer=1), 1) == list(range(70, 160))


def test_no_example_moves_forward_by_more_than_the_buffer() -> None:
    order = indices(make_task(shuffle_buffer=10), 2)
    assert all(index - 160 < place + 10 for place, index in enumerate(order))


def test_a_pass_that_starts_later_has_the_same_minibatches() -> None:
    task = make_task()
    count = task.num_batches(Shard(2, 0), 16)
    parts = [index for first in range(count) for index in indices(task, 2, first=first, stop=first + 1)]
    assert parts == indices(task, 2)


def test_minibatches_differ_by_one_example_at_most() -> None:
    sizes = [batch.num_examples for batch in make_task().batches(Shard(2, 0), 16, seed=(0, 0, 0))]
    assert sum(sizes) == 101 and max(sizes) - min(sizes) == 1 and len(sizes) == make_task().num_batches(Shard(2, 0), 16)


def test_a_stream_may_be_longer_but_not_shorter_than_announced() -> None:
    assert sorted(indices(make_task(examples_per_source=50), 1)) == list(range(70, 120))
    with pytest.raises(DataError):
        indices(make_task(examples_per_source=71), 0)


def test_it_trains(tmp_path: Any) -> None:
    def open_fn(source: int) -> Source:
        return Source(source)
    task = StreamTask(range(3), open_fn, blobs.make_model, blobs.mean_loss, examples_per_source=LENGTHS,
                      valid=list(read(0)), metrics_fn=blobs.accuracy)
    run = ngsgd.train(task, num_workers=2, cluster="in_process", num_epochs=8, batch_size=10, lr=0.02,
                      output_dir=tmp_path, quiet=True)
    assert run.metrics["valid/accuracy"] > 0.8


@pytest.mark.parametrize("options", [
    {"examples_per_source": [1, 2]}, {"examples_per_source": 0}, {"shuffle_buffer": 0}, {"loss_reduction": "none"}])
def test_wrong_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_task(**options)


def test_no_source_and_no_validation_example_are_refused() -> None:
    with pytest.raises(ConfigError):
        StreamTask([], read, blobs.make_model, blobs.mean_loss, examples_per_source=1, valid=[])
    task = make_task(valid=[])
    with pytest.raises(ConfigError):
        task.prepare_evaluation(task.model())
