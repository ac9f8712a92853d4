"""The table of `ngsgd plan`: time, efficiency and cost on 1 to 1000 workers, and a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

from ngsgd.config import RunConfig
from ngsgd.planning import planner
from ngsgd.planning.formulas import (
    Link,
    SampleAdvice,
    SampleBounds,
    Spread,
    recommend_samples,
    retry_wait_s,
)
from ngsgd.planning.planner import Machine, Prediction, Site, Workload

Codec = Literal["int8", "sparse"]
# fraction of an outer iteration without training above which a change is recommended
MAX_OVERHEAD = 0.1
# of the time of an outer iteration; a compression that gains less is not chosen
_MIN_GAIN = 0.01
# cost of the choice without deadline and budget over the lowest cost
_COST_FACTOR = 1.25
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
    samples: SampleAdvice
    # of a run with these jobs in every outer iteration
    num_outer_iters: int
    # all outer iterations on the machines of `there`, failures included
    total_s: float
    # of all workers for `total_s`; 0 without a price
    cost: float = 0.0


def _site_here(machine: Machine, config: RunConfig, num_workers: int) -> Site:
    """Location of the workers of a run if they are all on the measured machine."""
    return planner.this_machine(machine, num_workers, threads_per_worker=config.cluster.threads_per_worker,
                                one_by_one=config.cluster.kind == "in_process")


def rows(machine: Machine, workload: Workload, config: RunConfig, workers: Sequence[int], assumed: Assumptions) -> list[Row]:
    """One row per number of workers, each with as many jobs."""
    workload = _packed(workload, config.cluster.codec)
    base = _here(machine, workload, config, 1)
    found = []
    for count in workers:
        site, there, wait_s = _on_cluster(machine, workload, config, count, assumed)
        here = _here(machine, workload, config, count) if count <= _SHARED_CORES * machine.slots(1) else None
        advice = _samples(there, workload, config, count)
        # archives contain about the configured number of samples
        if advice.samples == round(workload.samples):
            advice = replace(advice, samples=config.egs.samples_per_iter)
        num_outer_iters = _num_outer_iters(workload, count)
        total_s = num_outer_iters * (there.outer_iter_s + wait_s)
        found.append(Row(
            count, here, there, site.num_machines, there.frames_per_s / base.frames_per_s,
            here.frames_per_s / base.frames_per_s if here else None, wait_s / (there.outer_iter_s + wait_s), advice,
            num_outer_iters, total_s, total_s / 3600 * count * config.cluster.price_per_hour))
    return found


# The choice of settings ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Settings of a run, with its predicted time and cost."""

    workers: int
    samples_per_iter: int
    compression: str
    total_s: float
    # 0 without a price
    cost: float
    efficiency: float


def choices(machine: Machine, workload: Workload, config: RunConfig, workers: Sequence[int], assumed: Assumptions) -> list[Choice]:
    """The settings to choose from: each number of workers with its best samples_per_iter and
    compression. Numbers of workers with too little data are omitted.
    """
    codecs: tuple[Codec | None, ...] = (None,) if config.outer.kind == "streaming" else (None, "int8", "sparse")
    found = []
    for count in workers:
        # of equal jobs: longer jobs hide a slow exchange too, but may need more data
        plain, *packed = ((_on_cluster(machine, _packed(workload, codec), config, count, assumed)[1].outer_iter_s, codec)
                          for codec in codecs)
        best = min([plain, *packed], key=itemgetter(0))
        best = best if best[0] < (1.0 - _MIN_GAIN) * plain[0] else plain
        one = _choice(machine, _packed(workload, best[1]), config, count, best[1], assumed)
        found += [one] if one else []
    return found


def choose(found: Sequence[Choice], *, deadline_s: float = math.inf, budget: float = math.inf) -> Choice | None:
    """The cheapest choice that ends by a deadline, or the fastest within a budget.

    With both it is the cheapest of those that satisfy both. Without either it is the fastest whose
    cost is at most 1.25 times the lowest.

    Returns:
        None if no choice is possible.
    """
    limit = budget
    if found and math.isinf(deadline_s) and math.isinf(budget):
        limit = _COST_FACTOR * min(one.cost for one in found)
    possible = [one for one in found if one.total_s <= deadline_s and one.cost <= limit]
    if math.isfinite(deadline_s):
        return min(possible, key=lambda one: (one.cost, one.workers * one.total_s), default=None)
    return min(possible, key=lambda one: one.total_s, default=None)


def _choice(machine: Machine, workload: Workload, config: RunConfig, count: int, codec: Codec | None,
            assumed: Assumptions) -> Choice | None:
    """Settings with the samples_per_iter that the table recommends; None with too little data."""
    _, there, _ = _on_cluster(machine, workload, config, count, assumed)
    advice = _samples(there, workload, config, count)
    if not advice.enough_data:
        return None
    chosen = replace(workload, samples=float(advice.samples))
    _, there, wait_s = _on_cluster(machine, chosen, config, count, assumed)
    total_s = _num_outer_iters(chosen, count) * (there.outer_iter_s + wait_s)
    samples = config.egs.samples_per_iter if advice.samples == round(workload.samples) else advice.samples
    cost = total_s / 3600 * count * config.cluster.price_per_hour
    return Choice(count, samples, codec or "none", total_s, cost, there.efficiency)


def _packed(workload: Workload, codec: Codec | None) -> Workload:
    return replace(workload, compression=compression_of(codec, workload))


def compression_of(codec: Codec | None, workload: Workload) -> float:
    """Bytes of a parameter delta over those of its compressed form."""
    if codec is None:
        return 1.0
    from ngsgd.ops.compression import num_bytes

    return workload.model_bytes / sum(num_bytes(workload.model_bytes // 4, codec))


def _on_cluster(machine: Machine, workload: Workload, config: RunConfig, count: int, assumed: Assumptions
                ) -> tuple[Site, Prediction, float]:
    """The site, an outer iteration there, and the seconds that it waits for failures on average."""
    machine = machine if assumed.sigma is None else replace(machine, spread=Spread(assumed.sigma, 0.0))
    link = Link(assumed.bandwidth, assumed.latency_s, machine.link.add_speed)
    site = _site(machine, config, count, assumed, link)
    there = planner.predict(machine, workload, site, count)
    return site, there, retry_wait_s(assumed.failures_per_worker_hour / 3600, count, there.compute_s, assumed.replace_s)


def _samples(there: Prediction, workload: Workload, config: RunConfig, count: int) -> SampleAdvice:
    # bmuf adapts its momentum to the number of outer iterations
    momentum = config.outer.momentum if config.outer.kind in ("diloco", "streaming") else 0.0
    bounds = SampleBounds.of(minibatch_size=workload.minibatch_size, total_samples=workload.total_samples, num_jobs=count,
                             outer_momentum=momentum)
    return recommend_samples(now=workload.samples, rate=there.effective_rate, overhead_s=there.overhead_s, bounds=bounds,
                             max_overhead=MAX_OVERHEAD)


def _num_outer_iters(workload: Workload, count: int) -> int:
    return max(1, int(workload.total_samples / (count * workload.samples)))


def _here(machine: Machine, workload: Workload, config: RunConfig, num_workers: int) -> Prediction:
    site = _site_here(machine, config, num_workers)
    return planner.predict(machine, workload, site, num_workers)


def _site(machine: Machine, config: RunConfig, num_workers: int, assumed: Assumptions, link: Link) -> Site:
    """A cluster; workers on a single machine have no network between them."""
    if num_workers <= assumed.slots_per_machine:
        return replace(_site_here(machine, config, num_workers), one_by_one=False,
                       slots_per_machine=max(num_workers, machine.slots(config.cluster.threads_per_worker or 1)))
    return planner.machines_like(num_workers, slots_per_machine=assumed.slots_per_machine, link=link)
