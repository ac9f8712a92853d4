"""The mean of the newest n models, with n chosen on held-out frames (nnet3-combine in Kaldi).

Letters: K models, P entries of a parameter vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ngsgd.pipeline.combination.records import Candidate, Combined, best, require_some
from ngsgd.training.parameter_vector import Vector

Array = npt.NDArray[np.float64]
# parameters -> (objf, the parameters as scored); see HeldOut
Objective = Callable[[Vector], tuple[float, Vector]]


def running_mean(models: Sequence[Candidate], objective: Objective,
                 max_evaluations: int = 30) -> Combined:
    """Return the best mean of the newest n of `models`, with n in `evaluated_counts`.

    At equal objf the smaller n is chosen. One model is in memory at a time, in addition to the
    float64 sum, the current mean and the best mean. This is about five times a float32 model for
    any number of models, plus the memory of `objective`.

    Args:
        models: newest first.
        objective: scores parameters.
        max_evaluations: maximum number of means, besides the newest model alone.

    Returns:
        The combined model.
    """
    require_some(models)
    counts = evaluated_counts(len(models), max_evaluations)
    # in float64
    total_P: Array = np.zeros(0)
    mean_objf: dict[int, float] = {}
    winner: Combined | None = None
    for n, model in enumerate(models, start=1):
        if n == 1:
            total_P = model.parameters().astype(np.float64)
        else:
            total_P += model.parameters(len(total_P))
        if n in counts:
            # rounded once, so that the mean of n equal models is bitwise identical to them
            mean_P = np.divide(total_P, n, out=np.empty(len(total_P), np.float32), dtype=np.float64,
                               casting="same_kind")
            objf, parameters_P = objective(mean_P)
            mean_objf[n] = objf
            if winner is None or objf > winner.objf:
                winner = Combined(parameters_P, "newest" if n == 1 else "mean", n, objf, mean_objf)
    assert winner is not None
    return best([winner])


def evaluated_counts(num_models: int, max_evaluations: int) -> frozenset[int]:
    """Return the values of n to try: 1, then every ceil(num_models / max_evaluations)-th, and all.

    There are at most `max_evaluations` in addition to the newest model alone.

    >>> sorted(evaluated_counts(10, 4))
    [1, 4, 7, 10]
    """
    step = -(-num_models // max_evaluations)
    return frozenset({*range(1, num_models + 1, step), num_models})


