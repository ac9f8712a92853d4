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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.reports.progress import ProgressTracker, iteration_line
from ngsgd.launcher.text import duration
from ngsgd.planning.formulas import Link, Spread
from ngsgd.planning.simulated_cluster import Expected, SimulatedCluster, expected
from ngsgd.training.records import OuterIterationRecord, SubsetScore, Tracker

# these import torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.data.reader import EgsReader
    from ngsgd.pipeline.services import PoolRequest
    from ngsgd.planning.simulator import SimulatedPool
    from ngsgd.runs.run_folder import RunFolder

# bytes per second of adding parameters to a mean, limited by the memory
_ADD_SPEED = 8e9


def command(arguments: Sequence[str]) -> int:
    """Simulate, print the summary, and keep it with the event log in a run folder."""
    options = argument_parser().parse_with_settings(arguments)
    _check(options)
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    config.sites.require_none("ngsgd simulate")
    num_workers = config.schedule.num_jobs_final
    config = replace(config, cluster=replace(config.cluster, num_workers=num_workers))
    progress = VirtualProgress(quiet=options.quiet, stream=sys.stderr if options.json else sys.stdout)
    summary = _simulate(config, options, progress)
    print(json.dumps(asdict(summary), indent=1) if options.json else "\n".join(text(summary)))
    return EXIT_OK


# Arguments ----------------------------------------------------------------------------------------


def argument_parser() -> Parser:
    parser = Parser("simulate", epilog=(
        "schedule.num_jobs_final is the number of workers. Equal settings and seeds give equal "
        "events. docs/simulate.md lists the real and the simulated parts."))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of ngsgd train")
    parser.add_argument("--json", action="store_true", help=f"{JSON}; progress goes to stderr")
    parser.add_argument("--quiet", "-q", action="store_true",
                        help="print incidents and the summary only")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="folder of custom YAML files")
    group = parser.add_argument_group("simulated cluster")
    group.add_argument("--frames-per-s", type=float, default=20000.0, metavar="X",
                       help="frames per second of a worker (default: %(default)s)")
    group.add_argument("--sigma", type=float, default=0.05, metavar="X",
                       help="relative spread of the times of a worker's jobs, log-normal "
                            "(default: %(default)s)")
    group.add_argument("--host-sigma", type=float, default=0.0, metavar="X",
                       help="relative spread of the speeds of the machines (default: %(default)s)")
    group.add_argument("--overhead-s", type=float, default=0.0, metavar="S",
                       help="time of a job before its first minibatch, in seconds (default: "
                            "%(default)s)")
    group.add_argument("--failures-per-worker-hour", type=float, default=0.0, metavar="X",
                       help="failures of a worker per hour; spot machines: 0.05 (default: "
                            "%(default)s)")
    group.add_argument("--hang-fraction", type=float, default=0.0, metavar="X",
                       help="fraction of failures that hang instead of crash, 0 to 1 (default: "
                            "%(default)s)")
    group.add_argument("--replace-s", type=float, default=20.0, metavar="S",
                       help="time to replace a lost worker, in seconds (default: %(default)s)")
    group.add_argument("--bandwidth", type=float, default=1.25e8, metavar="B/S",
                       help="bandwidth of a link in bytes/s (default: 1.25e8, 1 Gb/s)")
    group.add_argument("--latency", type=float, default=2e-4, metavar="S",
                       help="latency of a link in seconds (default: %(default)s)")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise one ConfigError with all mistakes."""
    problems = []
    for name in ("frames_per_s", "bandwidth"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0.0):
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be greater than 0.")
    for name in ("sigma", "host_sigma", "overhead_s", "failures_per_worker_hour", "hang_fraction", "replace_s", "latency"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0.0):
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 0.")
    if options.hang_fraction > 1.0:
        problems.append(f"--hang-fraction is {options.hang_fraction}; it must be at most 1.")
    if problems:
        raise ConfigError(problems)


def cluster_of(options: argparse.Namespace, *, num_minibatches: float, seed: int) -> SimulatedCluster:
    """Return the simulated cluster for jobs of so many minibatches."""
    # --sigma is that of a complete job; the spread of a minibatch is larger
    spread = Spread(options.host_sigma, options.sigma * math.sqrt(num_minibatches))
    link = Link(options.bandwidth, options.latency, _ADD_SPEED)
    return SimulatedCluster(options.frames_per_s, spread, options.overhead_s,
                            options.failures_per_worker_hour, options.hang_fraction,
                            options.replace_s, link, seed)


# The simulation -----------------------------------------------------------------------------------


class VirtualProgress(ProgressTracker):
    """The usual lines, with the virtual time instead of the remaining time."""

    def iteration_line(self, record: OuterIterationRecord) -> str:
        return iteration_line(record, width=self.screen.width, ending=f"at {duration(record.elapsed_s)}")


@dataclass
class Scores(Tracker):
    """A tracker that keeps the records for the summary."""

    records: list[OuterIterationRecord] = field(default_factory=list)

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.records.append(record)


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
    """The simulated pool of a run, and its clock."""

    def __init__(self, options: argparse.Namespace, config: RunConfig) -> None:
        self._options, self._config = options, config
        self.pool: SimulatedPool | None = None
        self.num_parameters = 0

    def make_pool(self, request: PoolRequest) -> SimulatedPool:
        from ngsgd.planning.simulator import SimulatedPool
        from ngsgd.tasks.speech import SpeechTaskSpec

        if not isinstance(request.spec, SpeechTaskSpec):
            raise ConfigError("ngsgd simulate supports speech recipes only; remove task.")
        if self._config.cluster.ranks_per_worker > 1:
            raise ConfigError("ngsgd simulate has workers of one process; remove "
                              "cluster.ranks_per_worker.")
        reader = request.spec.frames()
        self.cluster = cluster_of(self._options, num_minibatches=mean_frames(reader) / self._config.schedule.minibatch_size,
                                  seed=self._config.seed)
        self.num_parameters = request.num_parameters
        self.pool = SimulatedPool(request.spec, self.cluster, self._config.cluster.num_workers, request.num_threads,
                                  should_stop=request.should_stop)
        return self.pool

    def clock(self) -> float:
        assert self.pool is not None
        return self.pool.clock()


def _simulate(config: RunConfig, options: argparse.Namespace, progress: ProgressTracker) -> Summary:
    from ngsgd.data.reader import EgsReader
    from ngsgd.launcher.commands.train import services_of
    from ngsgd.pipeline.run import Run, build_run
    from ngsgd.runs.run_folder import SIMULATION, run_name
    from ngsgd.tasks.frames import schedule_of

    config = replace(config, name=f"{run_name(config)}-simulated")
    virtual, scores = _VirtualCluster(options, config), Scores()
    services = replace(services_of(config, options.quiet), report=progress.report, warn=progress.warn, clock=virtual.clock,
                       make_pool=virtual.make_pool, workers="simulated", make_trackers=lambda *_: [progress, scores])
    run = build_run(config, services)
    assert isinstance(run, Run)
    # from the beginning, so that no command resumes the run with real workers
    write_text(run.folder.path / SIMULATION, json.dumps({"options": vars(options)}, indent=1))
    began = time.monotonic()
    run.train_only()
    assert virtual.pool is not None
    reader = EgsReader(run.data.egs_directory)
    schedule, samples = schedule_of(config, reader), mean_frames(reader)
    times = [(num_jobs, expected(virtual.cluster, config, num_jobs=num_jobs, samples=samples,
                                 model_bytes=4 * virtual.num_parameters))
             for num_jobs in map(schedule.num_jobs, range(schedule.num_outer_iters))]
    summary = _summary(virtual.pool, scores.records, times, run.folder, time.monotonic() - began)
    write_text(run.folder.path / SIMULATION,
               json.dumps({"cluster": asdict(virtual.cluster), "summary": asdict(summary)}, indent=1))
    return summary


def mean_frames(reader: EgsReader) -> float:
    """Return the frames of a job, the mean over all shards."""
    from ngsgd.schedules import Shard

    shards = itertools.product(range(reader.info.num_archives), range(reader.info.frames_per_eg))
    return statistics.fmean(reader.num_frames(Shard(archive, frame)) for archive, frame in shards)


# The summary --------------------------------------------------------------------------------------


def _summary(pool: SimulatedPool, records: Sequence[OuterIterationRecord], times: Sequence[tuple[int, Expected]],
             folder: RunFolder, real_s: float) -> Summary:
    last, predicted_s = records[-1], sum(one.outer_iter_s for _, one in times)
    efficiency = sum(num_jobs * one.work_s for num_jobs, one in times) / sum(num_jobs * one.outer_iter_s for num_jobs, one in times)
    return Summary(
        num_workers=pool.num_workers, num_outer_iters=len(records), virtual_s=pool.clock(), predicted_s=predicted_s,
        predicted_efficiency=efficiency, shares=pool.books.shares(), num_deaths=pool.books.num_deaths,
        num_hangs=pool.books.num_hangs, frames_processed=last.frames_processed, train=last.train, valid=last.valid,
        real_s=real_s, folder=str(folder.path))


def text(summary: Summary) -> list[str]:
    """Return the summary as lines of text."""
    shares = summary.shares
    lost = ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if name != "efficiency")
    off = summary.virtual_s / summary.predicted_s - 1.0
    ends = f"{counted(summary.num_deaths, 'lost worker')}, {summary.num_hangs} of them hung"
    return [
        f"simulated  {counted(summary.num_outer_iters, 'outer iteration')} on {counted(summary.num_workers, 'worker')}: "
        f"{_seconds(summary.virtual_s)} ({_seconds(summary.real_s)} on this machine); {ends}",
        f"predicted  {_seconds(summary.predicted_s)} by the planner's formulas (simulated: "
        f"{100 * off:+.1f}%)",
        f"efficiency {_percent(shares['efficiency'])} (predicted "
        f"{_percent(summary.predicted_efficiency)}); lost to {lost}",
        f"objf       {summary.train.objf:.3f} valid {summary.valid.objf:.3f} acc "
        f"{100 * summary.valid.accuracy:.1f}% after {summary.frames_processed:,} frames",
        f"run folder {summary.folder}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 100 else duration(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
