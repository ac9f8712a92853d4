"""Check whether training can have produced the parameter delta of a result.

It uses only norms measured by the worker (`ngsgd.training.parameter_deltas`). `impossible` examines
one job, and `compare` the jobs of an outer iteration.

The factors are at least three times the largest ratio seen in healthy runs: NG-SGD and SGD, with
and without clipping, momentum, weight decay, 2 to 24 jobs, 1 to 117 minibatches per job. They cover
all outer optimizers and both load balancing methods, on the toy task of the tests and on digits
(ReLU, TDNN).

Ratios of a job to the majority of the others, with the largest in a healthy run and the factor:

- norm of the delta, complete model: 1.8, factor 6
- norm of the delta, one layer: 3.5, factor 12
- difference of the deltas along the initial parameters over their norm, one layer: 0.8, factor 2.5
- fraction of the initial parameters kept, complete model: at least 0.93, factor 0.1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ngsgd.ops.averaging import is_statistic
from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout

_MODEL_FACTOR = 6.0
_LAYER_FACTOR = 12.0
_ALONG_FACTOR = 2.5
_LEAST_KEPT = 0.1
# fraction of the delta of the model: layers that hardly change are compared with this
_SMALL_LAYER = 0.1
# a job with less than 1/4 of the minibatches is not compared with a longer job
_MUCH_SHORTER = 4
_TINY = 1e-30

_Array = npt.NDArray[np.float64]
_STATISTICS = "statistics of "


class Compared(NamedTuple):
    """Comparison of the jobs of an outer iteration with each other."""

    # job -> reason of its rejection
    outliers: dict[int, str]
    # the same if the disagreeing jobs are not a minority: undecided
    contested: dict[int, str]


def impossible(result: JobResult, layout: FlatLayout) -> str:
    """Return why no job can have produced this delta; empty if one could."""
    deltas = result.deltas
    if deltas is None:
        return ""
    names = [layout.name_at(target.start) for target, _ in layout.fragment(*result.job.send)]
    beyond = np.flatnonzero(~(deltas.norms_E <= deltas.limits_E) | ~np.isfinite(deltas.norms_E))
    if len(beyond):
        size_E = np.nan_to_num(deltas.norms_E[beyond], nan=np.inf, posinf=np.inf)
        worst = beyond[np.argmax(size_E)]
        where = f"its parameter delta in {names[worst]} has norm {deltas.norms_E[worst]:.3g}"
        if math.isinf(deltas.limits_E[worst]):
            return f"{where}, beyond float32"
        return (f"{where}, but update-norm clipping allows at most {deltas.limits_E[worst]:.3g} in "
                f"{result.num_minibatches} minibatches")
    has_limit_E = np.isfinite(deltas.limits_E)
    total = float(np.linalg.norm(deltas.norms_E[has_limit_E]))
    if total > deltas.limit:
        return (f"its parameter delta has norm {total:.3g}, but update-norm clipping of the complete "
                f"model allows at most {deltas.limit:.3g} in {result.num_minibatches} minibatches")
    if result.job.send != (0, 1):
        return ""
    # whether the initial parameters are lost (zeros) or reversed (flipped signs)
    is_trained_E = np.array([not is_statistic(name) for name in names])
    squares = float(np.sum(deltas.starts_E[is_trained_E] ** 2))
    if squares <= 0.0:
        return ""
    kept = 1.0 + float(np.sum((deltas.along_E * deltas.starts_E)[is_trained_E])) / squares
    if kept >= _LEAST_KEPT:
        return ""
    share_E = 1.0 + deltas.along_E / np.maximum(deltas.starts_E, _TINY)
    layer = names[int(np.argmin(np.where(is_trained_E & (deltas.starts_E > 0.0), share_E, np.inf)))]
    return (f"its parameters keep {kept:.3g} of the initial parameters (1 is all, at least "
            f"{_LEAST_KEPT:g} is plausible), least in {layer}")


def compare(results: Sequence[JobResult], layout: FlatLayout) -> Compared:
    """Find results whose delta is much larger than most others, or differs along the initial model.

    A job is compared with each other job that had at least a quarter of its minibatches. Its delta
    may be larger in proportion to the minibatches; that of a shorter job may be as large as that of
    a longer one. It is an outlier if more than half of these jobs disagree with it.
    """
    known = [result for result in results if result.deltas is not None]
    if len(known) < 2:
        return Compared({}, {})
    table = _Table.of(known, layout)
    found: dict[int, str] = {}
    for index, result in enumerate(known):
        others = table.comparable(index)
        ratios = table.excess(index, others)
        if len(others) and np.sum(ratios.max(axis=1) > 1.0) * 2 > len(others):
            found[result.job.job] = table.describe(index, others, ratios)
    return Compared(found, {}) if len(found) * 2 < len(known) else Compared({}, found)


def disagrees(one: JobResult, other: JobResult, layout: FlatLayout) -> str:
    """Return why the first of two results is wrong if the second is right; empty if both can be."""
    if one.deltas is None or other.deltas is None:
        return ""
    table = _Table.of([one, other], layout)
    others = table.comparable(0)
    ratios = table.excess(0, others)
    return table.describe(0, others, ratios) if len(others) and ratios.max() > 1.0 else ""


@dataclass(frozen=True)
class _Table:
    """J jobs, B blocks: the complete model, then layers; statistics are separate blocks."""

    names: list[str]
    norms_JB: _Array
    along_JB: _Array
    minibatches_J: npt.NDArray[np.int64]

    @classmethod
    def of(cls, results: Sequence[JobResult], layout: FlatLayout) -> _Table:
        entries = [layout.name_at(target.start) for target, _ in layout.fragment(*results[0].job.send)]
        layers = [(_STATISTICS if is_statistic(name) else "") + (name.rpartition(".")[0] or name) for name in entries]
        names = list(dict.fromkeys(layers))
        members = [[not layer.startswith(_STATISTICS) for layer in layers],
                   *([layer == name for layer in layers] for name in names)]
        member_BE = np.array(members, dtype=np.float64)
        deltas: list[Any] = [result.deltas for result in results]
        norms_JE, along_JE, starts_JE = (np.stack([getattr(one, name) for one in deltas])
                                         for name in ("norms_E", "along_E", "starts_E"))
        starts_JB = np.sqrt(starts_JE**2 @ member_BE.T)
        return cls(["the complete model", *names], np.sqrt(norms_JE**2 @ member_BE.T), (along_JE * starts_JE) @ member_BE.T
                   / np.maximum(starts_JB, _TINY), np.array([max(result.num_minibatches, 1) for result in results]))

    def comparable(self, index: int) -> npt.NDArray[np.int64]:
        """The other jobs that this job can be compared with."""
        is_long = self.minibatches_J * _MUCH_SHORTER >= self.minibatches_J[index]
        is_long[index] = False
        return np.flatnonzero(is_long)

    def excess(self, index: int, others: npt.NDArray[np.int64]) -> _Array:
        """Others x 2 B: norms and differences along the start, over the largest plausible."""
        expected = self._expected(index, others)
        farther = self.norms_JB[index] / expected
        elsewhere = np.abs(self.along_JB[index] - self.along_JB[others]) / expected
        factors_B = np.full(len(self.names), _LAYER_FACTOR)
        factors_B[0] = _MODEL_FACTOR
        return np.hstack([farther / factors_B, elsewhere / _ALONG_FACTOR])

    def describe(self, index: int, others: npt.NDArray[np.int64], ratios: _Array) -> str:
        """Describe the block with the greatest excess over the median of the others."""
        column = int(np.argmax(np.median(ratios, axis=0)))
        block = column % len(self.names)
        name, usual = self.names[block], float(np.median(self._expected(index, others)[:, block]))
        if column < len(self.names):
            factor = _LAYER_FACTOR if block else _MODEL_FACTOR
            return (f"its parameter delta in {name} has norm {self.norms_JB[index, block]:.3g}, more "
                    f"than {factor:g} times that of most other jobs, {usual:.3g}")
        apart = float(np.median(np.abs(self.along_JB[index, block] - self.along_JB[others, block])))
        return (f"its parameters in {name} differ from those of most other jobs by {apart:.3g} in the direction of the "
                f"initial model, more than {_ALONG_FACTOR:g} times the norm of their parameter deltas, {usual:.3g}")

    def _expected(self, index: int, others: npt.NDArray[np.int64]) -> _Array:
        longer = np.maximum(1.0, self.minibatches_J[index] / self.minibatches_J[others])[:, None]
        norms = self.norms_JB[others]
        expected: _Array = np.maximum(np.maximum(norms, _SMALL_LAYER * norms[:, :1]) * longer, _TINY)
        return expected
