"""Jobs of a proxy run on Ray workers, which keep the state for the reverse pass.

Job j runs on worker j modulo the number of workers, forward and backward. Sums follow the order of
the jobs, so results do not depend on the number or the speed of the workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.launcher.ray.cluster import connect, shutdown
from ngsgd.pipeline.tuning.proxy import Proxy

if TYPE_CHECKING:
    from torch import Tensor

    from ngsgd.hypergrad import HyperparameterPlan
    from ngsgd.hypergrad.job_replay import SegmentGrad


class _Worker:
    """An actor that runs some of the jobs."""

    def __init__(self, config: RunConfig, egs_directory: str, steps: int) -> None:
        self._proxy = Proxy.of(config, Path(egs_directory), steps=steps)
        self._local: Any = None

    def begin(self, plan: HyperparameterPlan, engine: str) -> None:
        """Start a new run, and drop the state of the last one."""
        from ngsgd.hypergrad.gradient import LocalJobs
        from ngsgd.hypergrad.job_replay import PlainGradients
        from ngsgd.hypergrad.training_task import Flat

        task = self._proxy.task
        self._local = LocalJobs(task, plan, engine, self._proxy.gradients() or PlainGradients(task, Flat.of(task)))

    def forward(self, outer_iter: int, job: int, start_P: Tensor) -> Tensor:
        end_P: Tensor = self._local.run(outer_iter, job, start_P)
        return end_P

    def reverse(self, outer_iter: int, job: int, dw_P: Tensor) -> tuple[Tensor, SegmentGrad]:
        back: tuple[Tensor, SegmentGrad] = self._local.segments.pop((outer_iter, job)).reverse(dw_P)
        return back

    def kept(self) -> tuple[int, int]:
        kept: tuple[int, int] = self._local.kept()
        return kept


class RayJobs:
    """The workers of one `ngsgd tune`."""

    def __init__(self, actors: Sequence[Any], engine: str, *, own_cluster: bool) -> None:
        self._actors, self.engine, self._own_cluster = actors, engine, own_cluster

    @classmethod
    def start(cls, config: RunConfig, proxy: Proxy, report: Callable[[str], None]) -> RayJobs:
        own_cluster = connect(config.cluster)
        count = min(config.cluster.num_workers, proxy.space.num_jobs)
        actor = ray.remote(num_cpus=config.cluster.threads_per_worker or 1)(_Worker)
        steps = proxy.space.num_steps
        actors = [actor.remote(config, str(proxy.task.reader.directory.absolute()), steps) for _ in range(count)]
        report(f"workers    {count} of Ray, {counted(config.cluster.threads_per_worker or 1, 'thread')} each")
        return cls(actors, _engine(config, proxy), own_cluster=own_cluster)

    def jobs(self, plan: HyperparameterPlan) -> _Jobs:
        """Return the jobs of one run."""
        plan = plan.detached()
        _got([actor.begin.remote(plan, self.engine) for actor in self._actors])
        return _Jobs(self._actors, plan.num_jobs)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._own_cluster:
            shutdown()


class _Jobs:
    """`ngsgd.hypergrad.gradient.Jobs` over actors."""

    def __init__(self, actors: Sequence[Any], num_jobs: int) -> None:
        self._actors, self._num_jobs = actors, num_jobs

    def forward(self, outer_iter: int, start_P: Tensor) -> list[Tensor]:
        start = ray.put(start_P)
        ends: list[Tensor] = _got([self._of(job).forward.remote(outer_iter, job, start) for job in range(self._num_jobs)])
        return ends

    def reverse(self, outer_iter: int, dw_NP: Sequence[Tensor]) -> list[tuple[Tensor, SegmentGrad]]:
        found: list[tuple[Tensor, SegmentGrad]] = _got(
            [self._of(job).reverse.remote(outer_iter, job, dw_P) for job, dw_P in enumerate(dw_NP)])
        return found

    def kept(self) -> tuple[int, int]:
        found = _got([actor.kept.remote() for actor in self._actors])
        return sum(spills for spills, _ in found), sum(state for _, state in found)

    def _of(self, job: int) -> Any:
        return self._actors[job % len(self._actors)]


def _engine(config: RunConfig, proxy: Proxy) -> str:
    """The engine, chosen as in one process with the memory of a worker for its jobs."""
    from ngsgd.hypergrad.gradient import choose_engine

    if config.tune.engine != "auto":
        return config.tune.engine
    parameters = sum(p.numel() for p in proxy.task.start.values())
    plan = proxy.space.build(proxy.space.center())
    return choose_engine(plan, parameters, 4, can_reverse=config.optimizer.kind == "sgd").engine


def _got(refs: Sequence[Any]) -> Any:
    """All results in order; typed errors of ngsgd are raised unchanged."""
    try:
        return ray.get(list(refs))
    except RayTaskError as error:
        if isinstance(error.cause, NgsgdError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise ClusterError(f"a worker of ngsgd tune was lost ({str(error).splitlines()[0]}); run "
                           "it again, with fewer workers if memory was short on its "
                           f"{os.cpu_count()} cores.") from None
