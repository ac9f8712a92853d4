"""`ngsgd plan`: how long an outer iteration takes on 1 to 1000 workers, measured here and computed from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.console import Parser
from ngsgd.launcher.reports.plan_text import MAX_OVERHEAD, Assumptions, Row, as_json, text
from ngsgd.launcher.reports.predictions import keep, kept_in, saved, site_of
from ngsgd.pipeline.performance_model import planner
from ngsgd.pipeline.performance_model.formulas import (
    Link,
    SampleBounds,
    Spread,
    averaging_times,
    recommend_samples,
    restart_all_s,
    retry_wait_s,
)
from ngsgd.pipeline.performance_model.planner import Machine, Prediction, Site, Workload

_WORKERS = "1,2,4,8,16,32,64,256,1000"
_MAX_WORKERS = 100_000
# more workers than this on each core are not worth a number
_SHARED_CORES = 16


def command(arguments: Sequence[str]) -> int:
    """Measures, computes, prints; keeps what was measured in <output_dir>/plan.json."""
    options = _parser().parse_intermixed_args(list(arguments))
    workers = _checked(options)
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    machine, workload = _saved(config) if options.saved else measure_machine(config, options.seconds, to_stderr=options.json)
    assumed = _assumptions(options, config, machine)
    table = rows(machine, workload, config, workers, assumed)
    if options.json:
        print(json.dumps(as_json(machine, workload, assumed, table), indent=1))
    else:
        print("\n".join(text(machine, workload, assumed, table)))
    return EXIT_OK


# Arguments ----------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("plan", epilog=(
        "Settings (KEY=VALUE) are those of ngsgd train. 'here' is all workers on this machine; the other columns give each "
        "worker a core, or a GPU, on machines like this one. docs/planner.md explains every column."))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for ngsgd train")
    parser.add_argument("--workers", default=_WORKERS, help="numbers of workers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring (default: %(default)s)")
    parser.add_argument("--saved", action="store_true", help="use the last measurement of these settings, measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own YAML files")
    parser.add_argument("--cores-per-node", type=int, metavar="N", help="cores (or GPUs) of a machine (default: as this one)")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="of a machine's link, bytes/s (default: 1.25e8, 1 Gb/s)")
    parser.add_argument("--latency", type=float, default=2e-4, help="of a link, in seconds (default: %(default)s)")
    parser.add_argument("--failures-per-worker-hour", type=float, default=1.2e-4,
                        help="default: %(default)s, one in 8 hours on 1000 GPUs; spot machines: 0.05 and more")
    parser.add_argument("--replace-s", type=float, default=20.0, help="to replace a lost worker (default: %(default)s)")
    parser.add_argument("--sigma", type=float, help="spread of a job's time over the machines (default: as measured here)")
    parser.add_argument("--gamma", type=float, help="growth of the data needed per sample of a job (default: not known)")
    parser.add_argument("--outer-momentum", type=float, help="eta of the outer optimiser (default: that of the settings)")
    return parser


def _checked(options: argparse.Namespace) -> list[int]:
    """The numbers of workers; raises one ConfigError that lists everything wrong."""
    problems = []
    words = options.workers.split(",")
    workers = [int(word) for word in words if word.strip().isdecimal() and 1 <= int(word) <= _MAX_WORKERS]
    if len(workers) != len(words):
        problems.append(f"--workers is {options.workers!r}; give whole numbers from 1 to {_MAX_WORKERS} with commas between them, "
                        "such as 1,2,8.")
    for name in ("seconds", "bandwidth", "gamma"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0.0):
            problems.append(f"--{name} is {value}; it must be greater than 0.")
    for name in ("latency", "failures_per_worker_hour", "replace_s", "sigma"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 0.")
    if options.outer_momentum is not None and not 0.0 <= options.outer_momentum < 1.0:
        problems.append(f"--outer-momentum is {options.outer_momentum}; it must be at least 0 and less than 1.")
    if options.cores_per_node is not None and options.cores_per_node < 1:
        problems.append(f"--cores-per-node is {options.cores_per_node}; it must be at least 1.")
    if problems:
        raise ConfigError(problems)
    return sorted(set(workers))


def _assumptions(options: argparse.Namespace, config: RunConfig, machine: Machine) -> Assumptions:
    momentum = momentum_of(config) if options.outer_momentum is None else options.outer_momentum
    return Assumptions(options.cores_per_node or machine.slots(1), options.bandwidth, options.latency,
                       options.failures_per_worker_hour, options.replace_s, options.sigma, options.gamma, momentum)


def momentum_of(config: RunConfig) -> float:
    """eta of the outer optimiser; bmuf chooses its own so that the outer iterations suffice."""
    outer = config.outer
    momenta = {"diloco": outer.momentum, "streaming": outer.momentum}
    return momenta.get(outer.kind, 0.0)


# Measuring, and keeping what was measured ---------------------------------------------------------


def measure_machine(config: RunConfig, seconds: float, *, to_stderr: bool) -> tuple[Machine, Workload]:
    # before torch comes in; the service's own workers wait so too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import tempfile

    import torch

    from ngsgd.pipeline.performance_model import probe
    from ngsgd.pipeline.prepare import prepare
    from ngsgd.pipeline.runs.run_folder import check_output_dir
    from ngsgd.tasks.speech import SpeechTaskSpec

    def report(line: str) -> None:
        print(line, file=sys.stderr if to_stderr else sys.stdout, flush=True)

    check_output_dir(config)
    data = prepare(config, report)
    report(f"measuring for about {seconds:g} s")
    num_gpus = torch.cuda.device_count() if config.cluster.device != "cpu" else 0
    # the run's own disk
    with tempfile.TemporaryDirectory(dir=config.output_dir, prefix=".plan-") as scratch:
        machine, workload = probe.measure(SpeechTaskSpec(config, str(data.egs_directory)), num_cores=os.cpu_count() or 1,
                                          num_gpus=num_gpus, seconds=seconds, scratch=Path(scratch))
    keep(config, machine, workload)
    return machine, workload


def _saved(config: RunConfig) -> tuple[Machine, Workload]:
    found = saved(config)
    if found is None:
        raise ConfigError(f"{kept_in(config)} has no measurement of these settings; leave out --saved to measure.")
    return found


# Computing ----------------------------------------------------------------------------------------


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
        # archives hold about as many samples as are asked for
        if advice.samples == round(workload.samples):
            advice = replace(advice, samples=config.egs.samples_per_iter)
        found.append(Row(
            count, here, there, site.num_machines, there.frames_per_s / base.frames_per_s,
            here.frames_per_s / base.frames_per_s if here else None, wait_s / (there.outer_iter_s + wait_s),
            1.0 - there.outer_iter_s / restarting_s, average, average_s, advice))
    return found


def _best_average(num_workers: int, workload: Workload, link: Link, outer_iter_s: float) -> tuple[str, float]:
    """The quickest way and its seconds; in one place where nothing else gains a hundredth of the outer iteration."""
    times = averaging_times(num_workers, workload.model_bytes, link)
    quickest = min(times, key=lambda name: times[name])
    best = quickest if times["central"] - times[quickest] > 0.01 * outer_iter_s else "central"
    return best, times[best]


def _here(machine: Machine, workload: Workload, config: RunConfig, num_workers: int) -> Prediction:
    return planner.predict(machine, workload, site_of(machine, config, num_workers), num_jobs=num_workers, num_workers=num_workers)


def _site(machine: Machine, config: RunConfig, num_workers: int, assumed: Assumptions, link: Link) -> Site:
    """A cluster; workers that fit on one machine have no network between them."""
    if num_workers <= assumed.slots_per_machine:
        return replace(site_of(machine, config, num_workers), one_by_one=False,
                       slots_per_machine=max(num_workers, machine.slots(config.cluster.threads_per_worker or 1)))
    return planner.machines_like(num_workers, slots_per_machine=assumed.slots_per_machine, link=link)
