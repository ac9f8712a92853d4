"""Outer optimisers: what turns the mean of the jobs' models into the next model.

B broadcast model (jobs start from it), W the model that is evaluated and saved.  A rule (`ngsgd.optim.outer_rules`) works
element by element, so the engine may cut the model into chunks and share them among threads without changing a bit; the
arithmetic is float64, the stored copies float32, and the sum over jobs runs in the order of the jobs.

Source of the moving average of models: arXiv 1703.01024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np

from ngsgd.errors import ConfigError
from ngsgd.ops.averaging import mean_of_chunk, shares_of
from ngsgd.optim.outer_rules import (
    Array,
    Average,
    BlockMomentum,
    Bmuf,
    DiLoCo,
    OuterInfo,
    OuterRule,
    TakeMean,
    make_rule,
)

__all__ = ["Average", "BlockMomentum", "Bmuf", "DiLoCo", "OuterInfo", "OuterOptimizer", "OuterRule", "make_rule"]

# (part of the model, where the jobs' vectors hold it)
Pieces = Sequence[tuple[slice, slice]]
_T = TypeVar("_T")


class OuterOptimizer:
    """A rule and its state: the model, the rule's buffers, and, on the side, a moving average of the model.

    The state has the dtype of `model`, in a run float32.  A step needs memory for at most a dozen chunks in float64 for
    each thread: on one thread less than a tenth of a model of a million elements.  A rule with `center` also needs the
    chunks of all jobs.
    """

    def __init__(self, rule: OuterRule, model: Array, *, ema_decay: float = 0.0, num_threads: int = 1) -> None:
        _require_vector(model, "the model")
        if isinstance(rule, type) or not hasattr(rule, "coefficients"):
            raise ConfigError(f"the rule of OuterOptimizer is {rule!r}; give it a rule with its settings, such as Bmuf(2.0), and "
                              "then the model.")
        self.rule = rule
        # E = decay E + (1 - decay) W, never broadcast; 0 = none
        self.ema_decay = ema_decay
        self.num_threads = num_threads
        # elements; changes the speed, never a bit
        self.chunk_size = _chunk_size(len(model))
        self.numbers: dict[str, float] = {}
        self.arrays: dict[str, Array] = {"model": model.copy()}
        for name, value in rule.buffers.items():
            self.arrays[name] = np.full_like(model, value)
        if ema_decay:
            self.arrays["ema"] = model.copy()
        # glibc hands freed memory back, to be taken again page by page for every chunk, until it
        # has seen a block as large as
        # a chunk's temporaries go: ten times slower
        np.empty(12 * self.chunk_size)

    def broadcast(self, out: Array | None = None) -> Array:
        """B, in `out` if given."""
        model = self.arrays["model"]
        found = np.empty_like(model) if out is None else out
        if found.shape != model.shape:
            raise ValueError(f"the model has {len(model)} elements, and what it should be written to {found.shape}")

        def write(part: slice) -> None:
            found[part] = self.rule.broadcast(self._read(part), self.numbers)
        nothing = self._read(slice(0, 0))
        # jobs start from W, which is float32 already
        if self.rule.broadcast(nothing, self.numbers) is nothing["model"]:
            np.copyto(found, model)
        else:
            self._share(write, self._chunks(slice(0, len(model))))
        return found

    @property
    def takes_mean(self) -> bool:
        """Whether the step is a function of the jobs' weighted mean, so that the mean alone may stand for the vectors."""
        return not hasattr(self.rule, "center")

    def eval_model(self) -> Array:
        """W: what is evaluated and saved; a view, which the next step changes."""
        return self.arrays["model"]

    def final_model(self) -> Array:
        """What is shipped: the moving average where there is one."""
        return self.arrays.get("ema", self.arrays["model"])

    def step(self, vectors: Sequence[Array], weights: Sequence[float], info: OuterInfo, *, pieces: Pieces | None = None,
             statistics: Sequence[slice] = (), returns: Literal["parameters", "move"] = "parameters") -> None:
        """Takes the mean of `vectors` (weighted, summed in the order given), or the rule's `center`, into the model, in place.

        `pieces` are for vectors that hold only a fragment; the rest of the model stays as it is.  `statistics` are parts of
        the model that take the mean itself.  `returns` says what the vectors are: the jobs' parameters, or their moves.
        Raises ValueError, and changes nothing, where vectors, weights and pieces do not fit the model.
        """
        for index, vector in enumerate(vectors):
            _require_vector(vector, f"vector {index}")
        shares = shares_of(len(vectors), weights)
        found = _pieces_that_fit(pieces, len(self.arrays["model"]), vectors)
        now = self.rule.coefficients(info, self.numbers)
        rules: tuple[OuterRule, OuterRule] = self.rule, TakeMean(self.rule.buffers)

        def advance(task: tuple[slice, int, bool]) -> None:
            part, offset, is_statistic = task
            rule = rules[is_statistic]
            center = getattr(rule, "center", mean_of_chunk)
            mean = center(vectors, shares, slice(part.start + offset, part.stop + offset))
            before = self._read(part)
            start = self._as_received(rule.broadcast(before, self.numbers), before["model"])
            if returns == "move":
                mean += start
            for name, values in rule.update(before, start, mean, now).items():
                self.arrays[name][part] = values
        self._share(advance, [(chunk, offset, is_statistic) for part, offset, is_statistic in _stretches(found, statistics)
                              for chunk in self._chunks(part)])
        self.numbers = now
        if self.ema_decay:
            self._move_average(info.outer_iter)

    def put(self, part: slice, values: Array) -> None:
        """Sets a part of the model to something else altogether: no momentum leads there, and no average remembers what was."""
        for name, array in self.arrays.items():
            array[part] = self.rule.buffers.get(name, values)

    def state_dict(self) -> dict[str, Any]:
        """{"arrays": name to vector, "numbers": name to float}; views, not copies."""
        return {"arrays": dict(self.arrays), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of the same rule, size and dtype; raises ValueError for another's."""
        found = {name: f"{vector.dtype}{list(vector.shape)}" for name, vector in state["arrays"].items()}
        wanted = {name: f"{vector.dtype}{list(vector.shape)}" for name, vector in self.arrays.items()}
        if found != wanted:
            raise ValueError(f"this is another outer optimiser's state: it has {found}, expected {wanted}")
        for name, vector in state["arrays"].items():
            self.arrays[name][:] = vector
        self.numbers = dict(state["numbers"])

    def _move_average(self, outer_iter: int) -> None:
        # the plain mean of the models until there are enough of them, so that the first one, which
        # is random, has no part
        decay = min(self.ema_decay, 1.0 - 1.0 / (outer_iter + 1))
        model, average = self.arrays["model"], self.arrays["ema"]

        def move(part: slice) -> None:
            average[part] = decay * average[part].astype(np.float64) + (1.0 - decay) * model[part].astype(np.float64)
        self._share(move, self._chunks(slice(0, len(model))))

    def _read(self, part: slice) -> dict[str, Array]:
        return {name: self.arrays[name][part].astype(np.float64) for name in ("model", *self.rule.buffers)}

    def _as_received(self, start: Array, model: Array) -> Array:
        """Jobs start from B in the dtype that it travels in; what it was rounded by is not their move."""
        return start if start is model else start.astype(self.arrays["model"].dtype).astype(np.float64)

    def _chunks(self, part: slice) -> list[slice]:
        return [slice(first, min(first + self.chunk_size, part.stop)) for first in range(part.start, part.stop, self.chunk_size)]

    def _share(self, work: Callable[[_T], None], tasks: Sequence[_T]) -> None:
        """Elements are independent, so any number of threads gives the same bits; NumPy computes without the GIL."""
        if self.num_threads == 1 or len(tasks) == 1:
            for task in tasks:
                work(task)
            return
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(work, tasks))


def _require_vector(vector: Any, what: str) -> None:
    if not isinstance(vector, np.ndarray) or vector.ndim != 1:
        shape = f" of shape {list(vector.shape)}" if hasattr(vector, "shape") else ""
        raise ConfigError(f"{what} is a {type(vector).__name__}{shape}; OuterOptimizer takes flat NumPy vectors: "
                          "torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy(), and "
                          "vector_to_parameters() of the result to get back.")


def _chunk_size(size: int) -> int:
    """A power of two: large enough to drown the calls, small enough for the cache and for a tenth of the model."""
    return int(1 << min(max((size // 150).bit_length() - 1, 12), 16))


def _pieces_that_fit(pieces: Pieces | None, size: int, vectors: Sequence[Array]) -> Pieces:
    """The pieces in the order of the model; ValueError unless each is there, and no element is met twice."""
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1 or (pieces is None and lengths != {size}):
        raise ValueError(f"the jobs' vectors have {sorted(lengths)} elements, the model {size}")
    # while no pieces at all are an empty fragment
    if pieces is None:
        return [(slice(0, size), slice(0, size))]
    (length,), filled = lengths, 0
    ordered = sorted(pieces, key=lambda pair: (pair[0].start, pair[0].stop))
    for part, source in ordered:
        is_there = part.start <= part.stop <= size and 0 <= source.start <= source.stop <= length
        if not is_there or part.stop - part.start != source.stop - source.start or part.start < filled:
            raise ValueError(f"elements {part.start} to {part.stop} of a model of {size} cannot come from {source.start} to "
                             f"{source.stop} of vectors of {length}; pieces before it reach to {filled}")
        filled = part.stop
    return ordered


def _stretches(pieces: Pieces, statistics: Sequence[slice]) -> Iterator[tuple[slice, int, bool]]:
    """(part of the model, offset of the jobs' vectors against it, whether it is a statistic), disjoint."""
    edges = {edge for part in statistics for edge in (part.start, part.stop)}
    for part, source in pieces:
        inner = {edge for edge in edges if part.start < edge < part.stop}
        for first, stop in pairwise(sorted({part.start, part.stop} | inner)):
            is_statistic = any(statistic.start <= first < statistic.stop for statistic in statistics)
            yield slice(first, stop), source.start - part.start, is_statistic
