"""Minibatches from the examples of a user: collating them, and counting them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ngsgd.errors import ConfigError, DataError, NgsgdError
from ngsgd.imports import first_line
from ngsgd.training.task import Batch

# characters of a description in a message
_LONGEST_SHOWN = 200


def collated(found: Sequence[Any], name_of: Callable[[int], str], collate_fn: Callable[[list[Any]], Any], *,
             has_weight: bool) -> Batch:
    """Convert examples to a minibatch.

    Examples that are None count as missing: a `collate_fn` may drop them. `name_of` returns what to
    call an example, given its place, in a message. With `has_weight` the number of examples is not
    checked, because a `weight_fn` replaces it.

    Raises:
        DataError: an example is missing, or has another structure or shape than the first.
        ConfigError: `collate_fn` fails otherwise, or the minibatch does not show its number of
            examples.
    """
    try:
        data = collate_fn(list(found))
    except NgsgdError:
        raise
    except Exception as error:
        raise _unlike(found, name_of, error) from error
    num_examples = sum(example is not None for example in found)
    if not has_weight and (counted := num_rows(data)) != num_examples:
        raise ConfigError(f"a minibatch of {num_examples} examples seems to have {counted}, by the first dimensions of its "
                          "tensors; give weight_fn, which returns the total weight of a minibatch, such as its number of examples.")
    return Batch(data, num_examples or len(found))


def _unlike(found: Sequence[Any], name_of: Callable[[int], str], error: Exception) -> NgsgdError:
    """The error that names the example at fault."""
    kinds = [_description(example) for example in found]
    for place, kind in enumerate(kinds):
        if found[place] is None:
            return DataError(f"{name_of(place)} is None; return an example, or drop None in collate_fn.")
        if kind != kinds[0]:
            return DataError(f"{name_of(place)} is {kind}, but {name_of(0)} is {kinds[0]}, and collate_fn cannot combine them "
                             f"({first_line(error)}); make them equal, or pad them in collate_fn.")
    return ConfigError(f"collate_fn failed on {len(found)} examples, the first of them {name_of(0)}, which is {kinds[0]} "
                       f"({first_line(error)}); correct collate_fn.")


def _description(example: Any) -> str:
    """Structure, shapes and types of an example."""
    if hasattr(example, "shape"):
        text = f"{type(example).__name__}{list(example.shape)}"
    elif isinstance(example, Mapping):
        text = "{" + ", ".join(f"{key}: {_description(value)}" for key, value in example.items()) + "}"
    elif isinstance(example, (list, tuple)):
        text = "(" + ", ".join(map(_description, example)) + ")"
    else:
        text = type(example).__name__
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


# Counting -----------------------------------------------------------------------------------------


def num_rows(batch: Any) -> int:
    """Return the number of examples of a minibatch: the most common first dimension of its leaves.

    The first of equally common ones decides. Raises ConfigError if no leaf has rows.
    """
    sizes = Counter(_sizes(batch, is_outermost=True))
    if not sizes:
        raise ConfigError("a minibatch has no tensor whose first dimension is the number of examples; give weight_fn, which "
                          "returns the total weight of a minibatch, such as its number of examples.")
    return sizes.most_common(1)[0][0]


def _sizes(data: Any, *, is_outermost: bool = False) -> Iterator[int]:
    """Yield the first dimension of each leaf that has one."""
    if isinstance(data, PackedSequence):
        yield int(data.batch_sizes[0])
    elif isinstance(data, (Tensor, np.ndarray)):
        if data.ndim:
            yield data.size(0) if isinstance(data, Tensor) else len(data)
    elif isinstance(data, Mapping):
        yield from chain.from_iterable(map(_sizes, data.values()))
    elif is_dataclass(data) and not isinstance(data, type):
        yield from chain.from_iterable(_sizes(getattr(data, spec.name)) for spec in fields(data))
    elif isinstance(data, (list, tuple)):
        yield from _of_sequence(data, is_column=not is_outermost and not hasattr(data, "_fields"))


def _of_sequence(data: Sequence[Any], *, is_column: bool) -> Iterator[int]:
    if not any(isinstance(one, (Tensor, np.ndarray, Mapping, list, tuple)) or is_dataclass(one) for one in data):
        # names or numbers, one per example
        if data and len({type(one) for one in data}) == 1:
            yield len(data)
        return
    sizes = [list(_sizes(one)) for one in data]
    # one entry per example, such as images of several sizes, or mappings with their boxes
    if is_column and (all(isinstance(one, Mapping) for one in data) or any(one != sizes[0] for one in sizes)):
        yield len(data)
        return
    yield from chain.from_iterable(sizes[:1] if is_column else sizes)


# Reading ------------------------------------------------------------------------------------------


def read(dataset: Any, indices: Sequence[int], name: str) -> list[Any]:
    """Return examples of a dataset, which messages call `name`.

    Raises:
        DataError: an example cannot be read; the message holds its index.
    """
    at_once = getattr(dataset, "__getitems__", None)
    if at_once is not None:
        try:
            return list(at_once(list(indices)))
        except NgsgdError:
            raise
        except Exception as error:
            # which one
            _one_by_one(dataset, indices, name)
            raise DataError(f"{name} fails on the examples {list(indices)[:8]} together ({first_line(error)}); correct "
                            "its __getitems__.") from error
    return _one_by_one(dataset, indices, name)


def _one_by_one(dataset: Any, indices: Sequence[int], name: str) -> list[Any]:
    found = []
    for index in indices:
        try:
            found.append(dataset[index])
        except NgsgdError:
            raise
        except Exception as error:
            raise DataError(f"example {index} of {name} cannot be read ({first_line(error)}); correct its __getitem__ or "
                            "the data, and keep its length.") from error
    return found
