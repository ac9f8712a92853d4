"""Outer optimizers: compute the next model from the weighted mean of the models of the jobs.

B is the broadcast model, from which jobs start, W the one that is evaluated and saved. Float64
sums run in job order, element by element. Source of the moving average: arXiv 1703.01024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np

from ngsgd.errors import ConfigError
from ngsgd.ops.averaging import mean_of_chunk, shares_of
from ngsgd.optim.outer.rules import Array, OuterInfo, OuterRule, TakeMean

# (part of the model, its place in the vectors of the jobs)
Pieces = Sequence[tuple[slice, slice]]
_T = TypeVar("_T")


class OuterOptimizer:
    """An outer rule with its state: the model, the buffers of the rule, and a moving average.

    The state has the dtype of `model`, which is float32 in a run. A step needs memory for at most
    12 chunks in float64 per thread; on one thread less than a tenth of a model of a million
    elements. A rule with `center` also needs the chunks of all jobs.

    Example:
        >>> import numpy as np
        >>> from ngsgd.optim.outer import Average, OuterInfo
        >>> outer = OuterOptimizer(Average(), np.zeros(2, np.float32))
        >>> info = OuterInfo(outer_iter=0, num_outer_iters=1, num_jobs=2, lr=0.1)
        >>> outer.step([np.ones(2, np.float32), np.full(2, 3, np.float32)], [1.0, 1.0], info)
        >>> outer.eval_model()
        array([2., 2.], dtype=float32)
    """

    def __init__(self, rule: OuterRule, model: Array, *, ema_decay: float = 0.0, num_threads: int = 1) -> None:
        _require_vector(model, "the model")
        if isinstance(rule, type) or not hasattr(rule, "coefficients"):
            raise ConfigError(f"the rule of OuterOptimizer is {rule!r}; give a rule with its "
                              "settings, such as Bmuf(2.0), then the model.")
        self.rule = rule
        # E = decay E + (1 - decay) W, which is never broadcast; 0 = none
        self.ema_decay = ema_decay
        self.num_threads = num_threads
        # Elements; it changes the speed, never the result.
        # A power of two: large against call overhead, small for the cache, and at most 1/10 of it.
        self.chunk_size = int(1 << min(max((len(model) // 150).bit_length() - 1, 12), 16))
        self.numbers: dict[str, float] = {}
        self.arrays: dict[str, Array] = {"model": model.copy()}
        for name, value in rule.buffers.items():
            self.arrays[name] = np.full_like(model, value)
        if ema_decay:
            self.arrays["ema"] = model.copy()
        # Until it has freed one block of this size, glibc returns freed memory to the system and
        # every chunk faults its pages again: ten times slower.
        np.empty(12 * self.chunk_size)

    def broadcast(self, out: Array | None = None) -> Array:
        """Return B, in `out` if given."""
        model = self.arrays["model"]
        found = np.empty_like(model) if out is None else out
        if found.shape != model.shape:
            raise ValueError(f"the model has {len(model)} elements, but the output array {found.shape}")

        def write(part: slice) -> None:
            found[part] = self.rule.broadcast(self._read(part), self.numbers)
        if self.broadcasts_model:
            np.copyto(found, model)
        else:
            self._share(write, self._chunks(slice(0, len(model))))
        return found

    @property
    def broadcasts_model(self) -> bool:
        """Whether B is W, as stored."""
        nothing = self._read(slice(0, 0))
        return self.rule.broadcast(nothing, self.numbers) is nothing["model"]

    def eval_model(self) -> Array:
        """Return W, the model that is evaluated and saved, as a view that the next step changes."""
        return self.arrays["model"]

    def final_model(self) -> Array:
        """Return the model to export: the moving average if there is one, else W."""
        return self.arrays.get("ema", self.arrays["model"])

    def step(self, vectors: Sequence[Array], weights: Sequence[float], info: OuterInfo, *, pieces: Pieces | None = None,
             statistics: Sequence[slice] = (), returns: Literal["parameters", "move"] = "parameters") -> None:
        """Apply the rule to the weighted mean of `vectors`, or to `center` of the rule, in place.

        Args:
            vectors: flat vectors of the jobs, summed in this order.
            weights: one weight per vector; normalized to sum 1.
            info: the outer iteration.
            pieces: parts of the model that the vectors hold; the rest is unchanged. None: the
                complete model.
            statistics: parts of the model that take the mean itself.
            returns: whether the vectors are "parameters" or parameter deltas ("move").

        Raises:
            ValueError: vectors, weights and pieces do not fit the model; nothing is changed.
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
            start = rule.broadcast(before, self.numbers)
            if start is not before["model"]:
                # As received by the jobs: rounding in transit is not counted as their change.
                start = start.astype(self.arrays["model"].dtype).astype(np.float64)
            if returns == "move":
                mean += start
            for name, values in rule.update(before, start, mean, now).items():
                self.arrays[name][part] = values
        self._share(advance, [(chunk, offset, is_statistic) for part, offset, is_statistic in _stretches(found, statistics)
                              for chunk in self._chunks(part)])
        self._end_step(now, info)

    def adopt(self, shards: Sequence[Mapping[str, Array]], info: OuterInfo) -> None:
        """Take the arrays after a step that owners of consecutive `shards` of the model took."""
        for name in ("model", *self.rule.buffers):
            np.concatenate([shard[name] for shard in shards], out=self.arrays[name])
        self._end_step(self.rule.coefficients(info, self.numbers), info)

    def _end_step(self, now: dict[str, float], info: OuterInfo) -> None:
        self.numbers = now
        if self.ema_decay:
            # A plain mean over the first models: the random initial model must keep no weight.
            decay = min(self.ema_decay, 1.0 - 1.0 / (info.outer_iter + 1))
            model, average = self.arrays["model"], self.arrays["ema"]

            def move(part: slice) -> None:
                average[part] = decay * average[part].astype(np.float64) + (1.0 - decay) * model[part].astype(np.float64)
            self._share(move, self._chunks(slice(0, len(model))))

    def put(self, part: slice, values: Array) -> None:
        """Replace a part of the model and reset its momentum and moving average."""
        for name, array in self.arrays.items():
            array[part] = self.rule.buffers.get(name, values)

    def state_dict(self) -> dict[str, Any]:
        """Return {"arrays": name to vector, "numbers": name to float}; views, not copies."""
        return {"arrays": dict(self.arrays), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; ValueError if it belongs to another rule, size or dtype."""
        found, wanted = ({name: f"{vector.dtype}{list(vector.shape)}" for name, vector in arrays.items()}
                         for arrays in (state["arrays"], self.arrays))
        if found != wanted:
            raise ValueError(f"the state belongs to another outer optimizer: it has {found}, expected {wanted}")
        for name, vector in state["arrays"].items():
            self.arrays[name][:] = vector
        self.numbers = dict(state["numbers"])

    def _read(self, part: slice) -> dict[str, Array]:
        return {name: self.arrays[name][part].astype(np.float64) for name in ("model", *self.rule.buffers)}

    def _chunks(self, part: slice) -> list[slice]:
        return [slice(first, min(first + self.chunk_size, part.stop)) for first in range(part.start, part.stop, self.chunk_size)]

    def _share(self, work: Callable[[_T], None], tasks: Sequence[_T]) -> None:
        """Process elements in threads, with identical results; NumPy releases the GIL."""
        if self.num_threads == 1 or len(tasks) == 1:
            for task in tasks:
                work(task)
            return
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(work, tasks))


def _require_vector(vector: Any, what: str) -> None:
    if not isinstance(vector, np.ndarray) or vector.ndim != 1:
        shape = f" of shape {list(vector.shape)}" if hasattr(vector, "shape") else ""
        raise ConfigError(f"{what} is a {type(vector).__name__}{shape}; OuterOptimizer takes flat NumPy vectors. Convert "
                          "with torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy() and back "
                          "with vector_to_parameters().")


def _pieces_that_fit(pieces: Pieces | None, size: int, vectors: Sequence[Array]) -> Pieces:
    """Return the pieces in the order of the model; ValueError if one misfits or two overlap."""
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1 or (pieces is None and lengths != {size}):
        raise ValueError(f"the vectors of the jobs have {sorted(lengths)} elements, the model {size}")
    # An empty list of pieces, unlike None, is an empty fragment.
    if pieces is None:
        return [(slice(0, size), slice(0, size))]
    (length,), filled = lengths, 0
    ordered = sorted(pieces, key=lambda pair: (pair[0].start, pair[0].stop))
    for part, source in ordered:
        is_there = part.start <= part.stop <= size and 0 <= source.start <= source.stop <= length
        if not is_there or part.stop - part.start != source.stop - source.start or part.start < filled:
            raise ValueError(f"elements {part.start} to {part.stop} of a model of {size} cannot come from {source.start} to "
                             f"{source.stop} of vectors of {length}; earlier pieces end at {filled}")
        filled = part.stop
    return ordered


def _stretches(pieces: Pieces, statistics: Sequence[slice]) -> Iterator[tuple[slice, int, bool]]:
    """Yield disjoint (part of the model, offset in the vectors of jobs, whether a statistic)."""
    edges = {edge for part in statistics for edge in (part.start, part.stop)}
    for part, source in pieces:
        inner = {edge for edge in edges if part.start < edge < part.stop}
        for first, stop in pairwise(sorted({part.start, part.stop} | inner)):
            is_statistic = any(statistic.start <= first < statistic.stop for statistic in statistics)
            yield slice(first, stop), source.start - part.start, is_statistic
