"""Models that may be part of the final combination, their scores on held-out frames, and the mean
of the newest n of them, as in nnet3-combine of Kaldi.

Letters: P entries of a parameter vector, N rows (frames), D inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ngsgd.config import RunConfig
from ngsgd.data.reader import Minibatch
from ngsgd.errors import CheckpointError, DataError, DivergenceError
from ngsgd.schedules import Schedule
from ngsgd.tasks.frame_scores import score_subset
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore

Array = npt.NDArray[np.float64]
# parameters -> (objf, the parameters as scored), such as HeldOut
Objective = Callable[[Vector], tuple[float, Vector]]


def kept_outer_iters(config: RunConfig, schedule: Schedule) -> tuple[int, ...]:
    """Outer iterations whose models a run keeps; none where it ships a single model."""
    ships_one = config.combination.kind == "none" or config.outer.ema_decay > 0
    return () if ships_one else candidates(schedule)


def kept_models(config: RunConfig, store: CheckpointStore, end: Checkpoint) -> list[Candidate]:
    """The models to combine, newest first; none where a run ships a single model."""
    if "ema" in end.buffers or config.combination.kind == "none":
        return []
    return [Candidate(outer_iter, partial(store.load_model, outer_iter)) for outer_iter in store.kept()]


def candidates(schedule: Schedule, max_models: int = 20) -> tuple[int, ...]:
    """Outer iterations whose models are kept until the end of the run, newest first, 0-based.

    As get_model_combine_iters of steps/libs/nnet3/train/common.py in Kaldi: the last `max_models`,
    or all of the last half epoch if that is more. They are subsampled to at least `max_models` and
    fewer than twice as many. They include the last one (also of a run of one outer iteration,
    unlike in Kaldi) and exclude the first half of the run.

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
    load: Callable[[], Vector]  # returns its flat float32 parameters

    def parameters(self, size: int | None = None) -> Vector:
        """Return the parameters, which must be finite, and `size` of them if that is given."""
        loaded_P = self.load()
        who = f"the model of outer iteration {self.outer_iter + 1}"
        if size is not None and len(loaded_P) != size:
            raise CheckpointError(f"{who} has {len(loaded_P)} parameters, but the others of the "
                                  f"final combination have {size}; combine models of one run.")
        if num_bad := int(np.count_nonzero(~np.isfinite(loaded_P))):
            raise DivergenceError(f"{who} cannot be part of the final combination, because "
                                  f"{num_bad} of its parameters are not finite; exclude it, or "
                                  "lower schedule.lr_initial and train again.")
        return loaded_P


@dataclass(frozen=True)
class Combined:
    """A combination, chosen by its objf on the held-out frames."""

    parameters: Vector  # flat float32; batch-norm statistics are those of the held-out frames
    chosen: str                       # newest | mean | generalized
    num_models: int  # number of newest models in it
    objf: float  # nats per frame on the held-out frames used for the choice, so it is optimistic
    # n -> objf of the mean of the newest n models; 1 is the newest alone
    mean_objf: dict[int, float]
    # generalized: layer -> weight of each model, newest first
    weights: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def objf_newest(self) -> float:
        """Objf of the newest model alone."""
        return self.mean_objf[1]


def best(tried: Sequence[Combined]) -> Combined:
    """Return the first of highest objf; raise DivergenceError if none has a finite one."""
    winner = max(tried, key=lambda combined: combined.objf)
    if not math.isfinite(winner.objf):
        raise DivergenceError("neither the newest model nor a combination has a finite objf on the held-out frames; lower "
                              "schedule.lr_initial and train again.")
    return winner


def require_some(models: Sequence[Candidate]) -> None:
    """Raise CheckpointError if there is no model."""
    if not models:
        raise CheckpointError("there is no model to combine; keep at least the newest checkpoint.")


def running_mean(models: Sequence[Candidate], objective: Objective, max_evaluations: int = 30) -> Combined:
    """Return the best mean of the newest n of `models`, with n in `evaluated_counts`.

    At equal objf the smaller n is chosen. One model is in memory at a time, in addition to the
    float64 sum, the current mean and the best mean, plus the memory of `objective`.

    Args:
        models: newest first.
        objective: scores parameters.
        max_evaluations: maximum number of means, besides the newest model alone.
    """
    require_some(models)
    counts = evaluated_counts(len(models), max_evaluations)
    total_P: Array = np.zeros(0)    # float64
    mean_objf: dict[int, float] = {}
    winner: Combined | None = None
    for n, model in enumerate(models, start=1):
        if n == 1:
            total_P = model.parameters().astype(np.float64)
        else:
            total_P += model.parameters(len(total_P))
        if n in counts:
            # rounded once, so that the mean of n equal models is bitwise identical to them
            mean_P = np.divide(total_P, n, out=np.empty(len(total_P), np.float32), dtype=np.float64, casting="same_kind")
            mean_objf[n], parameters_P = objective(mean_P)
            if winner is None or mean_objf[n] > winner.objf:
                winner = Combined(parameters_P, "newest" if n == 1 else "mean", n, mean_objf[n], mean_objf)
    assert winner is not None
    return best([winner])


def evaluated_counts(num_models: int, max_evaluations: int) -> frozenset[int]:
    """Return the values of n to try: 1, then every ceil(num_models / max_evaluations)-th, and all.

    >>> sorted(evaluated_counts(10, 4))
    [1, 4, 7, 10]
    """
    step = -(-num_models // max_evaluations)
    return frozenset({*range(1, num_models + 1, step), num_models})


class HeldOut:
    """Scores parameter vectors on one fixed set of frames.

    It uses `model` as workspace, which is left in evaluation mode with the parameters of the last
    call.
    """

    def __init__(self, model: nn.Module, minibatch: Minibatch) -> None:
        if not len(minibatch.pdf_N):
            raise DataError("there are no held-out frames to choose the final combination; check data.valid_minutes.")
        device = next(model.parameters()).device
        self.model = model.eval()
        self.layout = FlatLayout.of(model)
        weight_N = None if minibatch.weight_N is None else minibatch.weight_N.to(device)
        self.minibatch = Minibatch(minibatch.x_ND.to(device), minibatch.pdf_N.to(device), weight_N)
        self.total_weight = float(len(minibatch.pdf_N) if weight_N is None else weight_N.sum())

    def parts(self, num_frames: int) -> Iterator[Minibatch]:
        """Yield the frames in order, in parts of `num_frames`."""
        for begin in range(0, len(self.minibatch.pdf_N), num_frames):
            part = slice(begin, begin + num_frames)
            weight_N = None if self.minibatch.weight_N is None else self.minibatch.weight_N[part]
            yield Minibatch(self.minibatch.x_ND[part], self.minibatch.pdf_N[part], weight_N)

    def __call__(self, parameters: Vector) -> tuple[float, Vector]:
        """Return (objf per frame or -Inf, the parameters with recomputed batch-norm statistics)."""
        self.layout.load(self.model, parameters)
        if recompute_batchnorm(self.model, self.minibatch.x_ND):
            parameters = self.layout.flatten(self.model.state_dict())
        objf = score_subset(self.model, self.minibatch).objf
        return (objf if math.isfinite(objf) else -math.inf), parameters


@torch.no_grad()
def recompute_batchnorm(model: nn.Module, x_ND: Tensor) -> int:
    """Recompute the batch-norm statistics on these frames; return the number of layers.

    The statistics of averaged models differ from the average of their statistics, so Kaldi
    recomputes them too (RecomputeStats in nnet3/nnet-diagnostics.cc). Dropout is off meanwhile. All
    frames are processed at once: the input of a layer depends on the statistics of the layers below
    it, so parts would not give the pooled mean and (unbiased) variance.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    if len(x_ND) == 1:
        raise DataError("batch-norm statistics cannot be recomputed on a single frame; raise egs.num_diagnostic_frames.")
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.train()
        layer.reset_running_stats()
        # a cumulative average, here of one minibatch
        layer.momentum = None
    try:
        model(x_ND)
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return len(layers)
