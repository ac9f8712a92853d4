"""Datasets and functions as users write them by mistake, and a guard against endless loops."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from ngsgd.tasks import DatasetTask

NUM, DIM = 64, 5
X = torch.randn(NUM, DIM, generator=torch.Generator().manual_seed(0))
Y = torch.arange(NUM) % 3
# lines of ngsgd/tasks that a test may run; a run of it takes about 20,000
_MOST_LINES = 2_000_000


@contextmanager
def bounded() -> Iterator[None]:
    """Raise AssertionError in an endless loop of ngsgd/tasks; counts lines, so no clock decides."""
    count = 0

    def trace(frame: Any, _event: str, _argument: Any) -> Any:
        nonlocal count
        if "/ngsgd/tasks/" not in frame.f_code.co_filename:
            return None
        count += 1
        assert count < _MOST_LINES, "an endless loop"
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Fields:
    x: Tensor
    y: Tensor


class Rows:
    """A map-style dataset without a base class."""

    def __init__(self, of: Callable[[int], Any] = lambda i: (X[i], int(Y[i])), size: int = NUM) -> None:
        self.of, self.size = of, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.of(index)


class TorchRows(Rows, Dataset[Any]):
    pass


def make_model() -> nn.Module:
    return nn.Linear(DIM, 3)


def inputs_of(batch: Any) -> tuple[Tensor, Tensor]:
    """The tensors of any minibatch below: the one with columns, and that of the classes."""
    leaves: list[Tensor] = []

    def visit(data: Any) -> None:
        if isinstance(data, np.ndarray) and data.dtype != object:
            data = torch.from_numpy(data)
        if isinstance(data, Tensor):
            leaves.append(data)
        elif hasattr(data, "batch_sizes"):
            leaves.append(data.data[data.unsorted_indices])
        elif isinstance(data, Fields):
            visit([data.x, data.y])
        elif hasattr(data, "values"):
            visit(list(data.values()))
        elif isinstance(data, (list, tuple)):
            for one in data:
                visit(one)
    visit(batch)
    return (next(leaf for leaf in leaves if leaf.ndim == 2 and leaf.shape[1] == DIM),
            next(leaf for leaf in leaves if leaf.ndim == 1 and not leaf.is_floating_point()))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x_ND, y_N = inputs_of(batch)
    return nn.functional.cross_entropy(model(x_ND), y_N)


def _pairs(found: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in found]), torch.tensor([y for _, y in found])


# name -> collate_fn whose minibatches hold the same numbers in another form
BATCHES: dict[str, Callable[[list[Any]], Any]] = {
    "string first": lambda found: [[f"utt{n}" for n in range(len(found))], *_pairs(found)],
    "string alone first": lambda found: ["name", *_pairs(found)],
    "empty string": lambda found: ["", *_pairs(found)],
    "bytes": lambda found: [b"bytes", *_pairs(found)],
    "none": lambda found: [None, *_pairs(found)],
    "number": lambda found: [3.5, *_pairs(found)],
    "zero-dimensional tensor": lambda found: [torch.tensor(3), *_pairs(found)],
    "empty list": lambda found: [[], *_pairs(found)],
    "empty tuple": lambda found: [(), *_pairs(found)],
    "empty dictionary": lambda found: [{}, *_pairs(found)],
    "numpy": lambda found: [pair.numpy() for pair in _pairs(found)],
    "numpy of objects": lambda found: [np.array(["a"] * len(found), object), *_pairs(found)],
    "dictionary": lambda found: dict(zip(("x", "y"), _pairs(found), strict=True)),
    "string in a dictionary": lambda found: {"id": ["u"] * len(found), **dict(zip(("x", "y"), _pairs(found), strict=True))},
    "ordered dictionary": lambda found: OrderedDict(zip(("x", "y"), _pairs(found), strict=True)),
    "user dictionary": lambda found: UserDict(zip(("x", "y"), _pairs(found), strict=True)),
    "namedtuple": lambda found: Pair(*_pairs(found)),
    "dataclass": lambda found: Fields(*_pairs(found)),
    "nested": lambda found: {"a": {"meta": ("s", None, [])}, "b": [_pairs(found)[0], {"c": (_pairs(found)[1],)}]},
    "packed sequence": lambda found: (pack_sequence([x[None] for x, _ in found], enforce_sorted=False), _pairs(found)[1]),
    "one mapping per example": lambda found: [tuple({"n": 1} for _ in found), *_pairs(found)],
    "other rows first": lambda found: [torch.zeros(len(found) + 5, 2), *_pairs(found)],
    "vector of another size last": lambda found: [*_pairs(found), torch.zeros(1000)],
    "examples without None": lambda found: default_collate([pair for pair in found if pair is not None]),
}


class Opaque:
    """A minibatch that shows no rows."""

    def __init__(self, pairs: tuple[Tensor, Tensor]) -> None:
        self.pairs = pairs


def _raise(error: Exception) -> Any:
    raise error


# name -> arguments of DatasetTask that are mistakes
MISTAKES: dict[str, dict[str, Any]] = {
    "opaque minibatch": {"collate_fn": lambda found: Opaque(_pairs(found)), "loss_fn": lambda m, b: loss_fn(m, b.pairs)},
    "list of strings": {"collate_fn": lambda found: "text", "loss_fn": lambda m, b: m(X[:4]).sum()},
    "time first": {"collate_fn": lambda found: [X[None].expand(7, -1, -1)[:, :3], *_pairs(found)[:1]],
                   "loss_fn": lambda m, b: m(b[0]).sum()},
    "collate_fn fails": {"collate_fn": lambda found: _raise(TypeError("no"))},
    "collate_fn returns None": {"collate_fn": lambda found: None},
    "an example is None": {"dataset": Rows(lambda i: None if i == 17 else (X[i], int(Y[i])))},
    "unequal shapes": {"dataset": Rows(lambda i: (X[i, :2 + i % 3], int(Y[i])))},
    "unequal structures": {"dataset": Rows(lambda i: (X[i], int(Y[i])) if i % 2 else {"x": X[i]})},
    "an example fails": {"dataset": Rows(lambda i: _raise(KeyError(i)) if i == 17 else (X[i], int(Y[i])))},
    "a shrinking dataset": {"dataset": Rows(lambda i: _raise(IndexError(i)) if i > 20 else (X[i], int(Y[i])))},
    "strings alone": {"dataset": Rows(lambda i: f"text {i}")},
    "valid fails": {"valid": Rows(lambda i: _raise(ValueError("broken")))},
    "valid is a string": {"valid": "0.1"}, "valid is None": {"valid": None}, "valid is empty": {"valid": []},
    "valid is True": {"valid": True}, "valid is a generator": {"valid": (pair for pair in list[Any]())},
    "valid is NaN": {"valid": float("nan")},
    "valid is an object": {"valid": object()}, "valid is negative": {"valid": -0.5},
    "dataset is None": {"dataset": None}, "dataset is a string": {"dataset": "mnist"}, "dataset is a class": {"dataset": Rows},
    "model_fn is a model": {"model_fn": nn.Linear(DIM, 3)}, "model_fn is None": {"model_fn": None},
    "model_fn returns None": {"model_fn": lambda: None}, "model_fn fails": {"model_fn": lambda: _raise(ValueError("no"))},
    "a lazy model": {"model_fn": lambda: nn.LazyLinear(3)}, "a lazy part": {"model_fn": lambda: nn.Sequential(nn.LazyLinear(4))},
    "loss_fn is None": {"loss_fn": None},
    **{f"loss: {name}": {"loss_fn": function} for name, function in {
        "float": lambda m, b: 1.0, "None": lambda m, b: None, "string": lambda m, b: "1.0",
        "vector": lambda m, b: m(b[0]).sum(1),
        "detached": lambda m, b: loss_fn(m, b).detach(), "integer": lambda m, b: torch.tensor(1),
        "numpy": lambda m, b: np.float32(1),
        "complex": lambda m, b: loss_fn(m, b) * (1 + 1j), "one element": lambda m, b: loss_fn(m, b)[None],
        "NaN": lambda m, b: loss_fn(m, b) * float("nan"), "fails": lambda m, b: m(b[0]).no_such_method(),
        "tuple": lambda m, b: (loss_fn(m, b), 1)}.items()},
    **{f"metrics: {name}": {"metrics_fn": lambda m, b, value=value: value} for name, value in {
        "number": 0.5, "None": None, "vector": torch.zeros(3), "list": [1.0], "string": "good", "nested": {"a": {"b": 1.0}},
        "entry None": {"a": None}, "entry string": {"a": "0.5"}, "entry vector": {"a": torch.zeros(3)}, "entry complex": {"a": 1j},
        "entry list": {"a": [1.0]}, "entry array": {"a": np.zeros(2)}, "key": {3: 1.0}}.items()},
    "metrics_fn fails": {"metrics_fn": lambda m, b: _raise(ZeroDivisionError())},
    "metrics_fn is a number": {"metrics_fn": 3},
    **{f"weight: {name}": {"weight_fn": lambda b, value=value: value} for name, value in {
        "zero": 0.0, "NaN": float("nan"), "None": None, "string": "4", "vector": torch.ones(3), "negative": -1.0}.items()},
    "weight_fn fails": {"weight_fn": lambda b: _raise(ValueError("no"))},
    "shard_size": {"shard_size": 2.5}, "shard_size text": {"shard_size": "64"}, "num_eval_examples": {"num_eval_examples": -3},
}

# name -> a validation set that any dataset may be
VALID: dict[str, Any] = {
    "list": [(X[i], int(Y[i])) for i in range(20)], "own class": Rows(size=20), "torch Dataset": TorchRows(size=20),
    "Subset": Subset(TorchRows(), range(20)), "TensorDataset": TensorDataset(X[:20], Y[:20]), "fraction": 0.25,
    "Subset of own class": Subset(cast("Any", Rows()), range(20)), "NumPy number": np.float32(0.25),
    "tuple": tuple(Rows(size=20)[i] for i in range(20))}


def make_task(**options: Any) -> DatasetTask:
    given = {"dataset": Rows(), "model_fn": make_model, "loss_fn": loss_fn, "valid": 0.25, "shard_size": 16, **options}
    return DatasetTask(given.pop("dataset"), given.pop("model_fn"), given.pop("loss_fn"), **given)


def by_name(table: str, name: str) -> DatasetTask:
    """For the command line: `task=tests.tasks.hostile:by_name`."""
    if table == "MISTAKES":
        return make_task(**MISTAKES[name])
    return make_task(collate_fn=BATCHES[name]) if table == "BATCHES" else make_task(valid=VALID[name])
