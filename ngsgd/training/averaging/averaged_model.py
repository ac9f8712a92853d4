"""The averaged model: state of the outer optimizer and the active stage of the model."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from torch import nn

from ngsgd.ops.averaging import pool_variances
from ngsgd.optim.outer import Average, OuterInfo, OuterOptimizer, make_rule
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import FlatLayout, Mean, Vector
from ngsgd.training.planning import Plan
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.task import Task


class AveragedModel:
    """The model between outer iterations."""

    def __init__(self, task: Task, model: nn.Module, settings: EngineSettings, checkpoints: CheckpointStore,
                 num_outer_iters: int) -> None:
        self.task = task
        # workspace for evaluation; the outer optimizer holds the parameters
        self.model = model
        self.layout = FlatLayout.of(model)
        self.settings = settings
        self.checkpoints = checkpoints
        self.num_outer_iters = num_outer_iters
        self.stage: Hashable = task.growth.stage(-1)

    def begin(self, start: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.optimizer = self._new_optimizer(start)
        if start.model_sha256:
            self.optimizer.load_state_dict(start.outer_state())
        self.stage = self.task.growth.stage(start.progress.outer_iter)

    def parameters(self) -> Vector:
        """Return a view of the parameters that are evaluated."""
        return self.optimizer.eval_model()

    def load(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        """Load the stage and the parameters of a checkpoint into a model."""
        self.task.growth.select(model, self.task.growth.stage(checkpoint.progress.outer_iter))
        self.layout.load(model, checkpoint.parameters)

    def enter(self, outer_iter: int) -> bool:
        """Create the parts of the model that an outer iteration adds; return whether there are any.

        The new parts are a function of the last checkpoint, so a resumed run creates the same
        parts. A rolled-back outer iteration is repeated with the parts that were created for it.
        """
        stage = self.task.growth.stage(outer_iter)
        if stage == self.stage:
            return False
        self._create_parts(stage)
        return True

    def step(self, plan: Plan, job_init: JobInitializer, vectors: Sequence[Vector | Mean], weights: Sequence[float],
             num_accepted: int) -> None:
        """Step the outer optimizer with the accepted results."""
        info = OuterInfo(plan.outer_iter, self.num_outer_iters, num_accepted, plan.iteration.lr)
        index, count = job_init.fragment(plan.outer_iter)
        statistics = self.layout.statistics()
        self.optimizer.step(vectors, weights, info, pieces=None if count == 1 else self.layout.fragment(index, count),
                            statistics=statistics, returns=job_init.returns)
        if count == 1 and job_init.returns == "parameters":
            # a single vector is already the mean of several, or the only result
            if len(vectors) > 1:
                pool_variances(self.optimizer.eval_model(), vectors, weights, self.layout.mean_and_variance())
            # a moving average of statistics would not match any data
            for part in statistics:
                self.optimizer.final_model()[part] = self.optimizer.eval_model()[part]

    def restore(self, before: Checkpoint) -> None:
        """Undo an outer step.

        The step has changed the arrays of `before` in place, so the checkpoint is read again.
        """
        if before.model_sha256:
            path = self.checkpoints.directory / f"iter-{before.progress.outer_iter:06d}"
            self.optimizer.load_state_dict(self.checkpoints.load(path).outer_state())
        else:
            self.optimizer = self._new_optimizer(before)
        current, self.stage = self.stage, self.task.growth.stage(before.progress.outer_iter)
        if current != self.stage:
            self._create_parts(current)

    def _new_optimizer(self, start: Checkpoint) -> OuterOptimizer:
        # the outer rule of a site steps the model of all sites
        rule = Average() if self.settings.sites.jobs else make_rule(self.settings.outer)
        return OuterOptimizer(rule, start.parameters, ema_decay=self.settings.outer.ema_decay,
                              num_threads=self.settings.num_averaging_threads)

    def _create_parts(self, stage: Hashable) -> None:
        state = self.layout.unflatten(self.optimizer.eval_model())
        found = self.task.growth.new_parts(self.model, state, self.stage, stage, self.settings.seed)
        for name, values in found.items():
            self.optimizer.put(self.layout.part(name), values.numpy().reshape(-1))
        self.stage = stage


# largest factor of change per outer iteration, so that a layer with one tiny update does not
# diverge
_MAX_STEP = 4.0


def equalized_rates(layout: FlatLayout, before: Vector, after: Vector, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the factors on the rates of the layers for the next outer iteration.

    Each factor is multiplied by the geometric mean of the relative changes over the relative change
    of its layer. A layer that changed twice as much as the others is slowed down by 2. Factors of
    unchanged layers stay. The geometric mean of the factors is 1.
    """
    change = {layer: value for layer, value in _relative_changes(layout, before, after).items() if value > 0.0}
    if not change:
        return dict(rates)
    mean = _geometric_mean(change)
    found = {layer: rates.get(layer, 1.0) * min(_MAX_STEP, max(1.0 / _MAX_STEP, mean / value)) for layer, value in change.items()}
    norm = _geometric_mean(found)
    return {**rates, **{layer: rate / norm for layer, rate in found.items()}}


def _relative_changes(layout: FlatLayout, before: Vector, after: Vector) -> dict[str, float]:
    changes: dict[str, list[float]] = {}
    statistics = layout.statistics()
    for name in layout.names:
        part = layout.part(name)
        if part not in statistics:
            totals = changes.setdefault(name.rpartition(".")[0], [0.0, 0.0])
            totals[0] += float(np.square(after[part] - before[part]).sum())
            totals[1] += float(np.square(before[part]).sum())
    return {layer: math.sqrt(moved / size) if size > 0.0 else 0.0 for layer, (moved, size) in changes.items()}


def _geometric_mean(values: Mapping[str, float]) -> float:
    return math.exp(sum(map(math.log, values.values())) / len(values))
