"""A task from any dataset: examples, order, and scoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from ngsgd.errors import ConfigError
from ngsgd.schedules import Shard
from ngsgd.tasks import DatasetTask
from ngsgd.training.task import seeded_model
from tests.tasks import blobs


def rows_task(**options: Any) -> tuple[DatasetTask, blobs.Rows]:
    rows = blobs.Rows()
    return DatasetTask(rows, blobs.make_model, blobs.mean_loss, **options), rows


def indices(task: DatasetTask, rows: blobs.Rows, archive: int, seed: tuple[int, int, int], size: int = 16) -> list[int]:
    """The examples that one pass over a shard reads, in order."""
    rows.read.clear()
    list(task.batches(Shard(archive, 0), size, seed=seed))
    return list(rows.read)


def test_an_epoch_has_every_training_example_once_and_no_validation_example() -> None:
    task, rows = rows_task(valid=0.1, shard_size=130)
    read = [index for archive in range(task.shards().num_archives) for index in indices(task, rows, archive, (5, archive, 0))]
    assert Counter(read) == Counter(dict.fromkeys(read, 1)) and len(read) == 900
    rows.read.clear()
    task.evaluate(seeded_model(task, 0).eval())
    held_out = set(rows.read) - set(read)
    assert len(held_out) == 100 and task.num_valid == 100


def test_the_order_depends_on_seed_outer_iteration_and_job() -> None:
    task, rows = rows_task()
    seeds = ((0, 0, 0), (0, 1, 0), (0, 0, 1))
    orders = [indices(task, rows, 0, seed) for seed in seeds]
    assert orders[0] == indices(task, rows, 0, (0, 0, 0))
    assert orders[0] != orders[1] and orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[1])
    assert sorted(orders[0]) != sorted(indices(task, rows, 0, (1, 0, 0)))


def test_a_pass_starts_anywhere() -> None:
    task, _ = rows_task(shard_size=100)
    batches = list(task.batches(Shard(1, 0), 16, seed=(0, 2, 1)))
    later = list(task.batches(Shard(1, 0), 16, seed=(0, 2, 1), first=2, stop=4))
    assert len(later) == 2
    for one, other in zip(later, batches[2:4], strict=True):
        assert torch.equal(one.data["x"], other.data["x"]) and one.num_examples == other.num_examples


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_minibatches_differ_by_one_example_at_most(size: int) -> None:
    task, _ = rows_task(shard_size=111)
    sizes = [batch.num_examples for batch in task.batches(Shard(0, 0), size, seed=(0, 0, 0))]
    assert len(sizes) == task.num_batches(Shard(0, 0), size) and max(sizes) - min(sizes) <= 1


def test_tensors_are_read_at_once_with_the_same_values() -> None:
    task, _ = rows_task()
    at_once = DatasetTask(blobs.dataset(), blobs.make_model, blobs.mean_loss)
    for one, other in zip(task.batches(Shard(2, 0), 32, seed=(0, 0, 0)), at_once.batches(Shard(2, 0), 32, seed=(0, 0, 0)),
                          strict=True):
        assert torch.equal(one.data["x"], other.data[0]) and torch.equal(one.data["y"], other.data[1])


def test_mean_and_summed_losses_are_the_same_objective() -> None:
    mean = DatasetTask(blobs.dataset(), blobs.make_model, blobs.mean_loss)
    summed = DatasetTask(blobs.dataset(), blobs.make_model, blobs.summed_loss, loss_reduction="sum")
    model = seeded_model(mean, 0).eval()
    [batch, *_] = mean.batches(Shard(0, 0), 32, seed=(0, 0, 0))
    one, other = mean.loss(model, batch.data), summed.loss(model, batch.data)
    # float32 sums of 32 terms in another order
    torch.testing.assert_close(one.total, other.total, rtol=1e-5, atol=0.0)
    assert one.weight == other.weight == batch.num_examples


def test_a_weight_replaces_the_number_of_examples() -> None:
    task = DatasetTask(blobs.dataset(), blobs.make_model, blobs.mean_loss, weight_fn=lambda batch: 3 * len(batch[0]))
    model = seeded_model(task, 0).eval()
    [batch, *_] = task.batches(Shard(0, 0), 32, seed=(0, 0, 0))
    found = task.loss(model, batch.data)
    assert found.weight == 3 * batch.num_examples
    torch.testing.assert_close(found.total, found.weight * blobs.mean_loss(model, batch.data))


def test_scores_are_means_over_all_held_out_examples() -> None:
    data = blobs.dataset()
    valid = TensorDataset(*(tensor[:300] for tensor in data.tensors))
    task = DatasetTask(data, blobs.make_model, blobs.mean_loss, valid=valid, metrics_fn=blobs.accuracy,
                       num_eval_examples=1000)
    model = seeded_model(task, 0).eval()
    found = task.evaluate(model)
    x_ND, y_N = valid.tensors
    with torch.no_grad():
        logits_NC = model(x_ND)
    # float32 means over minibatches of 128, 128 and 44
    assert found.valid.objf == pytest.approx(-float(nn.functional.cross_entropy(logits_NC, y_N)), rel=1e-5)
    assert found.figures["valid/accuracy"] == pytest.approx(float((logits_NC.argmax(dim=1) == y_N).float().mean()), rel=1e-5)
    assert found.figures.keys() == {"train/accuracy", "valid/accuracy"} and found.valid.accuracy == found.figures["valid/accuracy"]
    assert task.held_out_objf(model) == pytest.approx(found.valid.objf, rel=0.5)


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(("dataset", "options"), [
    (Stream(), {}),
    (TensorDataset(torch.zeros(1, 6), torch.zeros(1).long()), {}),
    (blobs.dataset(), {"valid": 1.5}),
    (blobs.dataset(), {"valid": TensorDataset(torch.zeros(0, 6))}),
    (blobs.dataset(), {"shard_size": 0}),
    (blobs.dataset(), {"loss_reduction": "none"}),
], ids=["no length", "one example", "share", "empty", "shard", "reduction"])
def test_unusable_training_data_is_rejected(dataset: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DatasetTask(dataset, blobs.make_model, blobs.mean_loss, **options)


def test_a_loss_of_several_numbers_is_refused() -> None:
    task = DatasetTask(blobs.dataset(), blobs.make_model, lambda model, batch: model(batch[0]))
    [batch, *_] = task.batches(Shard(0, 0), 8, seed=(0, 0, 0))
    with pytest.raises(ConfigError):
        task.loss(seeded_model(task, 0), batch.data)


@pytest.mark.parametrize(("returned", "declared", "is_wrong"), [
    ("mean", "mean", False), ("sum", "sum", False), ("sum", "mean", True), ("mean", "sum", True)])
def test_a_loss_that_contradicts_the_reduction_is_found(returned: str, declared: Any, is_wrong: bool) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[0], reduction=returned)
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    task = DatasetTask(TensorDataset(x), lambda: nn.Linear(3, 3), loss_fn, loss_reduction=declared)
    # a mean over examples and features is a mean; a sum over both is a sum
    assert bool(task.wrong_reduction(nn.Linear(3, 3))) == is_wrong


def test_a_loss_that_is_neither_mean_nor_sum_is_not_judged() -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    task = DatasetTask(TensorDataset(x), lambda: nn.Linear(3, 3), lambda model, batch: model(batch[0]).square().max())
    assert not task.wrong_reduction(nn.Linear(3, 3))
