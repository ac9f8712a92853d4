"""`ngsgd simulate`: a run on N simulated workers, with a virtual clock, stragglers and failures.

Training and coordinator are real; times, worker deaths and hangs are simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.counting import counted, duration
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.arguments import CONFIG, JSON, Parser, out_of_range
from ngsgd.launcher.reports.progress import ProgressTracker, iteration_line
from ngsgd.planning.planner import Link, Spread, num_arrays_of
from ngsgd.planning.simulated_cluster import SimulatedCluster, expected
from ngsgd.training.records import OuterIterationRecord, SubsetScore
from ngsgd.training.storage.event_log import events_of

# these import torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.data.reader import EgsReader
    from ngsgd.pipeline.services import PoolRequest
    from ngsgd.planning.simulator import SimulatedPool

# bytes per second of adding parameters to a mean, limited by the memory
_ADD_SPEED = 8e9


def command(arguments: Sequence[str]) -> int:
    """Simulate, print the summary, and keep it with the event log in a run folder."""
    options = argument_parser().parse_with_settings(arguments)
    least = dict.fromkeys(("sigma", "host_sigma", "overhead_s", "failures_per_worker_hour",
                           "hang_fraction", "replace_s", "latency"), 0)
    problems = out_of_range(options, least, ("frames_per_s", "bandwidth"))
    if options.hang_fraction > 1.0:
        problems.append(f"--hang-fraction is {options.hang_fraction}; it must be at most 1.")
    if problems:
        raise ConfigError(problems)
    from ngsgd.launcher.config import compose
    from ngsgd.launcher.config.sources import Sources
    config = compose.compose(options.overrides, Sources.of(options))
    config.sites.require_none("ngsgd simulate")
    config = replace(config, cluster=replace(config.cluster, num_workers=config.schedule.num_jobs_final))
    progress = VirtualProgress(quiet=options.quiet, stream=sys.stderr if options.json else sys.stdout)
    summary = _simulate(config, options, progress)
    print(json.dumps(asdict(summary), indent=1) if options.json else "\n".join(text(summary)))
    return EXIT_OK


def argument_parser() -> Parser:
    parser = Parser("simulate", epilog=(
        "schedule.num_jobs_final is the number of workers. Equal settings and seeds give equal "
        "events. docs/simulate.md lists the real and the simulated parts."))
    parser.declare({"--json": f"{JSON}; progress goes to stderr", "--quiet -q": "print incidents and the summary only", **CONFIG})
    parser.declare({
        "--frames-per-s X": (20000.0, "frames per second of a worker"),
        "--sigma X": (0.05, "relative spread of the times of a worker's jobs, log-normal"),
        "--host-sigma X": (0.0, "relative spread of the speeds of the machines"),
        "--overhead-s S": (0.0, "time of a job before its first minibatch, in seconds"),
        "--failures-per-worker-hour X": (0.0, "failures of a worker per hour; spot machines: 0.05"),
        "--hang-fraction X": (0.0, "fraction of failures that hang instead of crash, 0 to 1"),
        "--replace-s S": (20.0, "time to replace a lost worker, in seconds"),
        "--bandwidth B/S": (1.25e8, "bandwidth of a link in bytes/s (default: 1.25e8, 1 Gb/s)"),
        "--latency S": (2e-4, "latency of a link in seconds")}, "simulated cluster")
    return parser


def cluster_of(options: argparse.Namespace, config: RunConfig, *, num_minibatches: float) -> SimulatedCluster:
    # --sigma is that of a complete job; the spread of a minibatch is larger
    spread = Spread(options.host_sigma, options.sigma * math.sqrt(num_minibatches))
    link = Link(options.bandwidth, options.latency, _ADD_SPEED)
    return SimulatedCluster(
        options.frames_per_s, spread, options.overhead_s, options.failures_per_worker_hour,
        options.hang_fraction, options.replace_s, link, config.seed, num_arrays_of(config))


class VirtualProgress(ProgressTracker):
    """The usual lines, with the virtual time instead of the remaining time."""

    def iteration_line(self, record: OuterIterationRecord) -> str:
        return iteration_line(record, width=self.screen.width, ending=f"at {duration(record.elapsed_s)}")


@dataclass(frozen=True)
class Summary:
    """Result of a simulation: virtual times except `real_s`, fractions of the workers' time."""

    num_workers: int
    num_outer_iters: int
    virtual_s: float
    # by the planner's formulas
    predicted_s: float
    predicted_efficiency: float
    # efficiency, and the losses to failures, stragglers, averaging and overhead
    shares: dict[str, float]
    num_deaths: int
    num_hangs: int
    frames_processed: int
    train: SubsetScore
    valid: SubsetScore
    real_s: float
    folder: str


class _VirtualCluster:
    def __init__(self, options: argparse.Namespace, config: RunConfig) -> None:
        self._options, self._config = options, config
        self.num_parameters = 0

    def make_pool(self, request: PoolRequest) -> SimulatedPool:
        from ngsgd.planning.simulator import SimulatedPool
        from ngsgd.tasks.speech import SpeechTaskSpec
        if not isinstance(request.spec, SpeechTaskSpec):
            raise ConfigError("ngsgd simulate supports speech recipes only; remove task.")
        if self._config.cluster.ranks_per_worker > 1:
            raise ConfigError("ngsgd simulate has workers of one process; remove cluster.ranks_per_worker.")
        num_minibatches = mean_frames(request.spec.frames()) / self._config.schedule.minibatch_size
        self.cluster = cluster_of(self._options, self._config, num_minibatches=num_minibatches)
        self.num_parameters = request.num_parameters
        self.pool = SimulatedPool(request.spec, self.cluster, self._config.cluster.num_workers,
                                  request.num_threads, should_stop=request.should_stop)
        return self.pool

    def clock(self) -> float:
        return self.pool.clock()


def _simulate(config: RunConfig, options: argparse.Namespace, progress: ProgressTracker) -> Summary:
    from ngsgd.data.reader import EgsReader
    from ngsgd.launcher.commands.train import services_of
    from ngsgd.pipeline.run import Run, build_run
    from ngsgd.runs.run_folder import SIMULATION, run_name
    from ngsgd.tasks.speech import schedule_of
    config = replace(config, name=f"{run_name(config)}-simulated")
    virtual = _VirtualCluster(options, config)
    services = replace(
        services_of(config, options.quiet), report=progress.report, warn=progress.warn,
        clock=virtual.clock, make_pool=virtual.make_pool, workers="simulated", make_trackers=lambda *_: [progress])
    run = build_run(config, services)
    assert isinstance(run, Run)
    about = run.folder.path / SIMULATION
    # from the beginning, so that no command resumes the run with real workers
    write_text(about, json.dumps({"options": vars(options)}, indent=1, default=str))
    began = time.monotonic()
    run.train_only()
    reader = EgsReader(run.data.egs_directory)
    schedule, samples = schedule_of(config, reader), mean_frames(reader)
    num_jobs = [*map(schedule.num_jobs, range(schedule.num_outer_iters))]
    times = [expected(virtual.cluster, config, num_jobs=number, samples=samples,
                      model_bytes=4 * virtual.num_parameters) for number in num_jobs]
    worked_s = sum(number * one.work_s for number, one in zip(num_jobs, times, strict=True))
    paid_s = sum(number * one.outer_iter_s for number, one in zip(num_jobs, times, strict=True))
    records = [OuterIterationRecord.from_json(one) for one in events_of(run.folder.events) if one["event"] == "outer_iteration"]
    last, pool = records[-1], virtual.pool
    summary = Summary(
        num_workers=pool.num_workers, num_outer_iters=len(records), virtual_s=pool.clock(),
        predicted_s=sum(one.outer_iter_s for one in times), predicted_efficiency=worked_s / paid_s,
        shares=pool.books.shares(), num_deaths=pool.books.num_deaths,
        num_hangs=pool.books.num_hangs, frames_processed=last.frames_processed, train=last.train,
        valid=last.valid, real_s=time.monotonic() - began, folder=str(run.folder.path))
    write_text(about, json.dumps({"cluster": asdict(virtual.cluster), "summary": asdict(summary)}, indent=1))
    return summary


def mean_frames(reader: EgsReader) -> float:
    """Return the frames of a job, the mean over all shards."""
    from ngsgd.schedules import Shard
    shards = itertools.product(range(reader.info.num_archives), range(reader.info.frames_per_eg))
    return statistics.fmean(reader.num_frames(Shard(archive, frame)) for archive, frame in shards)


def text(summary: Summary) -> list[str]:
    def percent(share: float) -> str:
        return f"{100 * share:.1f}%"

    def seconds(value: float) -> str:
        return f"{value:.1f}s" if value < 100 else duration(value)

    lost = ", ".join(f"{name} {percent(share)}" for name, share in summary.shares.items() if name != "efficiency")
    off = summary.virtual_s / summary.predicted_s - 1.0
    return [
        f"simulated  {counted(summary.num_outer_iters, 'outer iteration')} on "
        f"{counted(summary.num_workers, 'worker')}: {seconds(summary.virtual_s)} "
        f"({seconds(summary.real_s)} on this machine); {counted(summary.num_deaths, 'lost worker')}, "
        f"{summary.num_hangs} of them hung",
        f"predicted  {seconds(summary.predicted_s)} by the planner's formulas (simulated: {100 * off:+.1f}%)",
        f"efficiency {percent(summary.shares['efficiency'])} (predicted "
        f"{percent(summary.predicted_efficiency)}); lost to {lost}",
        f"objf       {summary.train.objf:.3f} valid {summary.valid.objf:.3f} acc "
        f"{100 * summary.valid.accuracy:.1f}% after {summary.frames_processed:,} frames", f"run folder {summary.folder}"]
