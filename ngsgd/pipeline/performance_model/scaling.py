"""The table of `ngsgd plan`: time and efficiency of an outer iteration on 1 to 1000 workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ngsgd.config import RunConfig
from ngsgd.pipeline.performance_model import planner
from ngsgd.pipeline.performance_model.formulas import (
    Link,
    SampleAdvice,
    SampleBounds,
    Spread,
    averaging_times,
    recommend_samples,
    restart_all_s,
    retry_wait_s,
)
from ngsgd.pipeline.performance_model.planner import Machine, Prediction, Site, Workload

# fraction of an outer iteration without training above which a change is recommended
MAX_OVERHEAD = 0.1
# more workers per core are not predicted
_SHARED_CORES = 16


@dataclass(frozen=True)
class Assumptions:
    """Values that cannot be measured on one machine."""

    # cores (or GPUs) of a machine of the cluster
    slots_per_machine: int
    # bytes per second and direction of the link of a machine
    bandwidth: float
    latency_s: float
    failures_per_worker_hour: float
    # seconds until a lost worker is replaced
    replace_s: float
    # spread of the job time over the machines; None: as measured here
    sigma: float | None
    # growth of the data needed with samples_per_iter; None: unknown
    gamma: float | None
    outer_momentum: float        # eta; 0: plain averaging


@dataclass(frozen=True)
class Row:
    """Predictions for one number of workers."""

    workers: int
    # all workers on this machine; None if that is not useful
    here: Prediction | None
    # one core or GPU per worker
    there: Prediction
    num_machines: int
    # of `there`, relative to one worker on this machine
    speed_up: float
    speed_up_here: float | None
    # fraction of the time lost to failures, with the recovery of the coordinator
    lost: float
    # the same if any failure restarted the outer iteration on all workers
    lost_restarting: float
    # fastest averaging method
    averaging: str
    averaging_s: float
    samples: SampleAdvice
    # of a run with these jobs in every outer iteration
    num_outer_iters: int
    # all outer iterations on the machines of `there`, failures included
    total_s: float


def momentum_of(config: RunConfig) -> float:
    """eta of the outer optimizer; bmuf adapts eta to the number of outer iterations."""
    outer = config.outer
    momenta = {"diloco": outer.momentum, "streaming": outer.momentum}
    return momenta.get(outer.kind, 0.0)


def site_of(machine: Machine, config: RunConfig, num_workers: int) -> Site:
    """Location of the workers of a run if they are all on the measured machine."""
    return planner.this_machine(machine, num_workers, threads_per_worker=config.cluster.threads_per_worker,
                                one_by_one=config.cluster.kind == "in_process")


def rows(machine: Machine, workload: Workload, config: RunConfig, workers: Sequence[int], assumed: Assumptions) -> list[Row]:
    """One row per number of workers, each with as many jobs."""
    base = _here(machine, workload, config, 1)
    over_machines = machine if assumed.sigma is None else replace(machine, spread=Spread(assumed.sigma, 0.0))
    found = []
    for count in workers:
        link = Link(assumed.bandwidth, assumed.latency_s, machine.link.add_speed)
        site = _site(machine, config, count, assumed, link)
        there = planner.predict(over_machines, workload, site, num_jobs=count, num_workers=count)
        here = _here(machine, workload, config, count) if count <= _SHARED_CORES * machine.slots(1) else None
        average, average_s = _best_average(count, workload, site.link, there.outer_iter_s)
        rate = assumed.failures_per_worker_hour / 3600
        wait_s = retry_wait_s(rate, count, there.compute_s, assumed.replace_s)
        restarting_s = restart_all_s(rate, count, there.outer_iter_s, assumed.replace_s)
        bounds = SampleBounds.of(minibatch_size=workload.minibatch_size, total_samples=workload.total_samples, num_jobs=count,
                                 outer_momentum=assumed.outer_momentum)
        advice = recommend_samples(now=workload.samples, rate=there.effective_rate, overhead_s=there.overhead_s, bounds=bounds,
                                   gamma=assumed.gamma, max_overhead=MAX_OVERHEAD)
        # archives contain about the configured number of samples
        if advice.samples == round(workload.samples):
            advice = replace(advice, samples=config.egs.samples_per_iter)
        num_outer_iters = max(1, int(workload.total_samples / (count * workload.samples)))
        found.append(Row(
            count, here, there, site.num_machines, there.frames_per_s / base.frames_per_s,
            here.frames_per_s / base.frames_per_s if here else None, wait_s / (there.outer_iter_s + wait_s),
            1.0 - there.outer_iter_s / restarting_s, average, average_s, advice,
            num_outer_iters, num_outer_iters * (there.outer_iter_s + wait_s)))
    return found


def _best_average(num_workers: int, workload: Workload, link: Link, outer_iter_s: float) -> tuple[str, float]:
    """Return the fastest method and its seconds.

    The central method is preferred if no other method saves 1 % of the outer iteration.
    """
    times = averaging_times(num_workers, workload.model_bytes, link)
    quickest = min(times, key=lambda name: times[name])
    best = quickest if times["central"] - times[quickest] > 0.01 * outer_iter_s else "central"
    return best, times[best]


def _here(machine: Machine, workload: Workload, config: RunConfig, num_workers: int) -> Prediction:
    return planner.predict(machine, workload, site_of(machine, config, num_workers), num_jobs=num_workers, num_workers=num_workers)


def _site(machine: Machine, config: RunConfig, num_workers: int, assumed: Assumptions, link: Link) -> Site:
    """A cluster; workers on a single machine have no network between them."""
    if num_workers <= assumed.slots_per_machine:
        return replace(site_of(machine, config, num_workers), one_by_one=False,
                       slots_per_machine=max(num_workers, machine.slots(config.cluster.threads_per_worker or 1)))
    return planner.machines_like(num_workers, slots_per_machine=assumed.slots_per_machine, link=link)
