"""The averaged model: state of the outer optimizer and the active stage of the model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn

from ngsgd.ops.averaging import pool_variances
from ngsgd.optim.outer import Average, OuterInfo, OuterOptimizer, make_rule
from ngsgd.training.job import JobResult
from ngsgd.training.job_init import JobInitializer
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.planning import Plan
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.task import Task
from ngsgd.training.worker_pool import WorkerPool


class AveragedModel:
    """The model between outer iterations."""

    def __init__(self, task: Task, model: nn.Module, settings: EngineSettings,
                 checkpoints: CheckpointStore, num_outer_iters: int) -> None:
        self.task, self.settings, self.checkpoints = task, settings, checkpoints
        # workspace for evaluation; the outer optimizer holds the parameters
        self.model, self.layout = model, FlatLayout.of(model)
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

        They are a function of the last checkpoint, and a roll-back keeps them.
        """
        stage = self.task.growth.stage(outer_iter)
        if stage == self.stage:
            return False
        self._create_parts(stage)
        return True

    def step(self, plan: Plan, job_init: JobInitializer, results: Sequence[JobResult], weights: Sequence[float],
             pool: WorkerPool) -> None:
        """Step the outer optimizer with the accepted results; ResultsLost if some are gone."""
        info = OuterInfo(plan.outer_iter, self.num_outer_iters, len(results), plan.iteration.lr)
        index, count = job_init.fragment(plan.outer_iter)
        statistics = self.layout.statistics()
        is_whole = count == 1 and job_init.returns == "parameters"
        if not pool.step(self.optimizer, results, weights, info):
            vectors = [result.sent.read() for result in results]
            self.optimizer.step(vectors, weights, info, pieces=None if count == 1 else self.layout.fragment(index, count),
                                statistics=statistics, returns=job_init.returns)
            if is_whole and len(vectors) > 1:
                pool_variances(self.optimizer.eval_model(), vectors, weights, self.layout.mean_and_variance())
        if is_whole:
            # a moving average of statistics would not match any data
            for part in statistics:
                self.optimizer.final_model()[part] = self.optimizer.eval_model()[part]

    def read_again(self, before: Checkpoint) -> OuterOptimizer:
        """Return the state after a commit, whose arrays an outer step has changed since."""
        optimizer = self._new_optimizer(before)
        if before.model_sha256:
            # the holder that replaced this process may have removed the checkpoint
            if self.checkpoints.lock:
                self.checkpoints.lock.require_held()
            path = self.checkpoints.directory / f"iter-{before.progress.outer_iter:06d}"
            optimizer.load_state_dict(self.checkpoints.load(path).outer_state())
        return optimizer

    def restore(self, before: Checkpoint) -> None:
        """Undo an outer step."""
        self.optimizer = self.read_again(before)
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
