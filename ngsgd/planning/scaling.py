"""The table of `ngsgd plan`: time, efficiency and cost on 1 to 1000 workers, and a choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ngsgd.config import RunConfig
from ngsgd.planning import planner
from ngsgd.planning.planner import Link, Machine, Prediction, SampleAdvice, Site, Spread, Workload

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

    slots_per_machine: int  # cores (or GPUs) of a machine of the cluster
    bandwidth: float  # bytes per second and direction of the link of a machine
    latency_s: float
    failures_per_worker_hour: float
    replace_s: float  # seconds until a lost worker is replaced
    sigma: float | None  # spread of the job time over the machines; None: as measured here


@dataclass(frozen=True)
class Row:
    """Predictions for one number of workers, each with as many jobs."""

    workers: int
    here: Prediction | None  # all workers on this machine; None if that is not useful
    there: Prediction  # one core or GPU per worker
    num_machines: int
    speed_up: float  # of `there`, relative to one worker on this machine
    speed_up_here: float | None
    lost: float  # fraction of the time lost to failures, with the recovery of the coordinator
    samples: SampleAdvice
    num_outer_iters: int  # of a run with these jobs in every outer iteration
    total_s: float  # all outer iterations on the machines of `there`, failures included
    cost: float = 0.0  # of all workers for `total_s`; 0 without a price


def rows(machine: Machine, workload: Workload, config: RunConfig, workers: Sequence[int], assumed: Assumptions) -> list[Row]:
    """One row per number of workers."""
    workload = packed(workload, config.cluster.codec)
    base = planner.predict(machine, workload, _site_here(machine, config, 1), 1)
    found = []
    for count in workers:
        row = _row(machine, workload, config, count, assumed)
        row = replace(row, speed_up=row.there.frames_per_s / base.frames_per_s)
        if count <= _SHARED_CORES * machine.slots(1):
            here = planner.predict(machine, workload, _site_here(machine, config, count), count)
            row = replace(row, here=here, speed_up_here=here.frames_per_s / base.frames_per_s)
        # archives contain about the configured number of samples
        if row.samples.samples == round(workload.samples):
            row = replace(row, samples=replace(row.samples, samples=config.egs.samples_per_iter))
        found.append(row)
    return found


def _row(machine: Machine, workload: Workload, config: RunConfig, count: int, assumed: Assumptions) -> Row:
    """A run on a cluster with one worker per job, not compared with this machine."""
    if assumed.sigma is not None:
        machine = replace(machine, spread=Spread(assumed.sigma, 0.0))
    if count <= assumed.slots_per_machine:
        # workers on a single machine have no network between them
        slots = max(count, machine.slots(config.cluster.threads_per_worker or 1))
        site = replace(_site_here(machine, config, count), one_by_one=False, slots_per_machine=slots)
    else:
        link = Link(assumed.bandwidth, assumed.latency_s, machine.link.add_speed)
        site = planner.machines_like(count, slots_per_machine=assumed.slots_per_machine, link=link,
                                     num_arrays=planner.num_arrays_of(config))
    there = planner.predict(machine, workload, site, count)
    wait_s = planner.retry_wait_s(assumed.failures_per_worker_hour / 3600, count, there.compute_s, assumed.replace_s)
    num_outer_iters = max(1, int(workload.total_samples / (count * workload.samples)))
    total_s = num_outer_iters * (there.outer_iter_s + wait_s)
    # bmuf adapts its momentum to the number of outer iterations
    momentum = config.outer.momentum if config.outer.kind in ("diloco", "streaming") else 0.0
    bounds = planner.SampleBounds.of(minibatch_size=workload.minibatch_size, num_jobs=count,
                             total_samples=workload.total_samples, outer_momentum=momentum)
    advice = planner.recommend_samples(now=workload.samples, rate=there.effective_rate,
                               overhead_s=there.overhead_s, bounds=bounds, max_overhead=MAX_OVERHEAD)
    return Row(count, None, there, site.num_machines, 1.0, None, wait_s / (there.outer_iter_s + wait_s), advice,
               num_outer_iters, total_s, total_s / 3600 * count * config.cluster.price_per_hour)


def _site_here(machine: Machine, config: RunConfig, num_workers: int) -> Site:
    return planner.this_machine(machine, num_workers, threads_per_worker=config.cluster.threads_per_worker,
                                one_by_one=config.cluster.kind == "in_process")


@dataclass(frozen=True)
class Choice:
    """Settings of a run, with its predicted time and cost."""

    workers: int
    samples_per_iter: int
    compression: str
    total_s: float
    cost: float  # 0 without a price
    efficiency: float


def choices(machine: Machine, workload: Workload, config: RunConfig, workers: Sequence[int], assumed: Assumptions) -> list[Choice]:
    """The settings to choose from: numbers of workers that have enough data, each with its best."""
    codecs: tuple[Codec | None, ...] = (None,) if config.outer.kind == "streaming" else (None, "int8", "sparse")
    found = []
    for count in workers:
        # of equal jobs: longer jobs hide a slow exchange too, but may need more data
        tried = {codec: _row(machine, packed(workload, codec), config, count, assumed) for codec in codecs}
        codec = min(tried, key=lambda one: tried[one].there.outer_iter_s)
        if tried[codec].there.outer_iter_s >= (1.0 - _MIN_GAIN) * tried[None].there.outer_iter_s:
            codec = None
        advice = tried[codec].samples
        if advice.enough_data:
            chosen = replace(packed(workload, codec), samples=float(advice.samples))
            one = _row(machine, chosen, config, count, assumed)
            samples = config.egs.samples_per_iter if advice.samples == round(workload.samples) else advice.samples
            found.append(Choice(count, samples, codec or "none", one.total_s, one.cost, one.there.efficiency))
    return found


def choose(found: Sequence[Choice], *, deadline_s: float = math.inf, budget: float = math.inf) -> Choice | None:
    """The cheapest choice that ends by a deadline, or the fastest within a budget.

    With both it is the cheapest of those that satisfy both. Without either it is the fastest whose
    cost is at most 1.25 times the lowest. None if no choice is possible.
    """
    limit = budget
    if found and math.isinf(deadline_s) and math.isinf(budget):
        limit = _COST_FACTOR * min(one.cost for one in found)
    possible = [one for one in found if one.total_s <= deadline_s and one.cost <= limit]
    if math.isfinite(deadline_s):
        return min(possible, key=lambda one: (one.cost, one.workers * one.total_s), default=None)
    return min(possible, key=lambda one: one.total_s, default=None)


def packed(workload: Workload, codec: Codec | None) -> Workload:
    """Return the workload with the compression of a codec."""
    if codec is None:
        return replace(workload, compression=1.0)
    from ngsgd.ops.compression import num_bytes
    return replace(workload, compression=workload.model_bytes / sum(num_bytes(workload.model_bytes // 4, codec)))
