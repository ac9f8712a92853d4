"""The short run for tuning hyperparameters: model, examples and optimizer of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError

# these import torch, and --help must answer immediately
if TYPE_CHECKING:
    from ngsgd.hypergrad import HypergradientRun, HyperparameterPlan, HyperSpace
    from ngsgd.hypergrad.egs_task import EgsTask


@dataclass
class Proxy:
    """A short run of the configuration, and the space around its hyperparameters."""

    config: RunConfig
    task: EgsTask
    space: HyperSpace
    # of Ray workers, if there are any
    cluster: Any = None

    @classmethod
    def of(cls, config: RunConfig, egs_directory: Path, *, steps: int = 0) -> Proxy:
        import torch

        from ngsgd.data.reader import EgsReader
        from ngsgd.hypergrad import BaseHyperparameters, HyperSpace
        from ngsgd.hypergrad.egs_task import EgsTask

        if config.schedule.lr_schedule != "exponential" or config.schedule.warm_up:
            raise ConfigError("ngsgd tune starts from the exponential schedule without warm-up; set "
                              "schedule.lr_schedule=exponential schedule.warm_up=0.")
        # fixed: another number changes the results bitwise
        torch.set_num_threads(config.cluster.threads_per_worker or 1)
        tune, optimizer = config.tune, config.optimizer
        num_jobs = config.schedule.num_jobs_final
        outer_iters = tune.proxy.outer_iters * max(1, steps // tune.proxy.steps)
        steps_per_iter = max(1, (steps or tune.proxy.steps) // outer_iters)
        task = EgsTask(config, EgsReader(egs_directory), steps_per_iter=steps_per_iter, num_jobs=num_jobs,
                       num_outer_iters=outer_iters)
        l2 = 2.0 * config.schedule.minibatch_size * optimizer.weight_decay / num_jobs
        settings = BaseHyperparameters(config.schedule.lr_initial * num_jobs,
                                       config.schedule.lr_final * num_jobs, optimizer.momentum, l2,
                            optimizer.max_change, optimizer.max_param_change)
        space = HyperSpace(settings, tuple(task.layers), steps_per_iter * outer_iters, num_jobs, outer_iters, tune.space,
                           tune.knots)
        return cls(config, task, space)

    def evaluate(self, plan: HyperparameterPlan) -> HypergradientRun:
        """Run the proxy once."""
        from ngsgd.hypergrad import evaluate_hyperparameters

        tune = self.config.tune
        jobs = self.cluster.jobs(plan) if self.cluster is not None else None
        engine = self.cluster.engine if self.cluster is not None else tune.engine
        return evaluate_hyperparameters(self.task, plan, engine, jobs=jobs, gradients=self.gradients())

    def gradients(self) -> Any:
        """Gradients of the configured optimizer: None for plain SGD, or natural gradients."""
        if self.config.optimizer.kind == "sgd":
            return None
        from ngsgd.hypergrad.natural import natural_gradients

        return natural_gradients(self.task, self.config.optimizer)
