"""Inputs and result of a final combination.

Letters: K models, P entries of a parameter vector, L updatable layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ngsgd.errors import CheckpointError, DivergenceError
from ngsgd.schedules import Schedule
from ngsgd.training.parameter_vector import Vector


def candidates(schedule: Schedule, max_models: int = 20) -> tuple[int, ...]:
    """Outer iterations whose models are kept until the end of the run, newest first, 0-based.

    As get_model_combine_iters of steps/libs/nnet3/train/common.py in Kaldi: the last `max_models`,
    or all of the last half epoch if that is more. They are subsampled to at least `max_models` and
    fewer than twice as many, include the last one, and exclude the first half of the run. Kaldi
    numbers models from 1 and selects none for a run of one outer iteration; here that one is
    selected.

    >>> candidates(Schedule(num_archives=6, frames_per_eg=4, num_epochs=3, lr_initial=0.01, lr_final=0.001,
    ...                     num_jobs_initial=6, num_jobs_final=6), max_models=5)
    (11, 10, 9, 8, 7)
    """
    num_iters = schedule.num_outer_iters
    passes_per_epoch = schedule.num_archives * schedule.frames_per_eg
    half_epoch = passes_per_epoch // (2 * schedule.num_jobs_final) + 1
    span = max(1, min(num_iters // 2, max(half_epoch, max_models)))
    kept = {*range(num_iters - span, num_iters, max(1, span // max_models)), num_iters - 1}
    return tuple(sorted(kept, reverse=True))


@dataclass(frozen=True)
class Candidate:
    """A model that may be part of the combination, read when needed."""

    outer_iter: int               # 0-based
    # returns its flat float32 parameters
    load: Callable[[], Vector]

    def parameters(self, size: int | None = None) -> Vector:
        """Return the parameters.

        Raises:
            DivergenceError: some are not finite.
            CheckpointError: there are not `size` of them.
        """
        loaded_P = self.load()
        who = f"the model of outer iteration {self.outer_iter + 1}"
        if size is not None and len(loaded_P) != size:
            raise CheckpointError(f"{who} has {len(loaded_P)} parameters, but the others of the "
                                  f"final combination have {size}; combine models of one run.")
        num_bad = int(np.count_nonzero(~np.isfinite(loaded_P)))
        if num_bad:
            raise DivergenceError(f"{who} cannot be part of the final combination, because "
                                  f"{num_bad} of its parameters are not finite; exclude it, or "
                                  "lower schedule.lr_initial and train again.")
        return loaded_P


@dataclass(frozen=True)
class Combined:
    """A combination, chosen by its objf on the held-out frames."""

    # flat float32; batch-norm statistics are those of the held-out frames
    parameters: Vector
    chosen: str                       # newest | mean | generalized
    # number of newest models in it
    num_models: int
    # nats per frame on the held-out frames used for the choice, so it is optimistic
    objf: float
    # n -> objf of the mean of the newest n models; 1 is the newest alone
    mean_objf: dict[int, float]
    # generalized: layer -> weight of each model, newest first
    weights: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def objf_newest(self) -> float:
        """Objf of the newest model alone."""
        return self.mean_objf[1]


def best(tried: Sequence[Combined]) -> Combined:
    """Return the one of highest objf, the first of equals.

    Raises:
        DivergenceError: none has a finite objf.
    """
    winner = max(tried, key=lambda combined: combined.objf)
    if not math.isfinite(winner.objf):
        raise DivergenceError("neither the newest model nor a combination has a finite objf on the held-out frames; lower "
                              "schedule.lr_initial and train again.")
    return winner


def require_some(models: Sequence[Candidate]) -> None:
    """Raise CheckpointError if there is no model."""
    if not models:
        raise CheckpointError("there is no model to combine; keep at least the newest checkpoint.")
