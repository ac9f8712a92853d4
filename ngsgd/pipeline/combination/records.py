"""The models of a run that go into a combination, and what comes out.

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
    """The outer iterations whose models are to be kept until the end of the run, newest first, 0-based.

    As Kaldi has it (get_model_combine_iters of steps/libs/nnet3/train/common.py): the last `max_models`, or all of the last
    half epoch if that is more, subsampled to at least `max_models` and fewer than twice as many, and the last; never from the
    first half of the run.  Kaldi numbers models from 1, and of a run of one outer iteration it takes none; here it is taken.

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
    """A model that may enter the combination, read when its turn comes."""

    outer_iter: int               # 0-based
    # its flat float32 parameters
    load: Callable[[], Vector]

    def parameters(self, size: int | None = None) -> Vector:
        """The parameters.

        Raises DivergenceError if some are not finite, CheckpointError if there are not `size` of them.
        """
        loaded_P = self.load()
        who = f"the model of outer iteration {self.outer_iter + 1}"
        if size is not None and len(loaded_P) != size:
            raise CheckpointError(f"{who} has {len(loaded_P)} parameters and not {size} like the others of the final combination; "
                                  "combine models of one run.")
        num_bad = int(np.count_nonzero(~np.isfinite(loaded_P)))
        if num_bad:
            raise DivergenceError(f"{who} cannot enter the final combination, because {num_bad} of its parameters are not finite; "
                                  "leave it out, or lower schedule.lr_initial and train again.")
        return loaded_P


@dataclass(frozen=True)
class Combined:
    """A combination, chosen by its objf on the held-out frames."""

    # flat float32; batch-norm statistics are those of the held-out frames
    parameters: Vector
    chosen: str                       # newest | mean | generalized
    # how many of the newest models are in it
    num_models: int
    # nats per frame, on the held-out frames it was chosen on: optimistic by the choice
    objf: float
    # n -> objf of the mean of the newest n models; 1 is the newest alone
    mean_objf: dict[int, float]
    # generalized: layer -> weight of each model, newest first
    weights: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def objf_newest(self) -> float:
        """What not combining would have given."""
        return self.mean_objf[1]


def best(tried: Sequence[Combined]) -> Combined:
    """The one of highest objf, the first of equals.  Raises DivergenceError if none has a finite objf."""
    winner = max(tried, key=lambda combined: combined.objf)
    if not math.isfinite(winner.objf):
        raise DivergenceError("neither the newest model nor a combination has a finite objf on the held-out frames; lower "
                              "schedule.lr_initial and train again.")
    return winner


def require_some(models: Sequence[Candidate]) -> None:
    """Raises CheckpointError if there is no model."""
    if not models:
        raise CheckpointError("there is no model to combine; keep at least the newest checkpoint.")
