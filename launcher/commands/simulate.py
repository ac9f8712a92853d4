"""`ngsgd simulate`: a run on N logical workers of this one machine, with a virtual clock, stragglers and failures.

The training is real and so is the coordinator; seconds, deaths and hangs are not.
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
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.console import Parser
from ngsgd.launcher.reports.progress import ProgressTracker, duration, iteration_line
from ngsgd.pipeline.performance_model.formulas import Link, Spread
from ngsgd.pipeline.performance_model.simulated_cluster import TOPOLOGIES, Expected, SimulatedCluster, expected
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord, SubsetScore

# these bring torch, and --help shall answer at once
if TYPE_CHECKING:
    from ngsgd.data.reader import EgsReader
    from ngsgd.pipeline.performance_model.simulator import SimulatedPool
    from ngsgd.pipeline.runs.run_folder import RunFolder
    from ngsgd.pipeline.services import PoolRequest

# bytes of parameters added into a mean per second: a typical memory
_ADD_SPEED = 8e9


def command(arguments: Sequence[str]) -> int:
    """Simulates, prints, and keeps the event log and the summary in a run folder."""
    options = argument_parser().parse_intermixed_args(list(arguments))
    _check(options)
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    num_workers = config.schedule.num_jobs_final
    config = replace(config, cluster=replace(config.cluster, num_workers=num_workers))
    progress = VirtualProgress(quiet=options.quiet, stream=sys.stderr if options.json else sys.stdout)
    summary = _simulate(config, options, progress)
    print(json.dumps(asdict(summary), indent=1) if options.json else "\n".join(text(summary)))
    return EXIT_OK


# Arguments ----------------------------------------------------------------------------------------


def argument_parser() -> Parser:
    parser = Parser("simulate", epilog=(
        "Settings (KEY=VALUE) are those of ngsgd train; schedule.num_jobs_final is the number of workers. The same settings and "
        "the same seed give the same events. docs/simulate.md explains what is real and what is not."))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for ngsgd train")
    parser.add_argument("--rate", type=float, default=20000.0, help="frames per second of a worker (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=0.05,
                        help="spread of a job's time from one job to the next, log-normal (default: %(default)s)")
    parser.add_argument("--host-sigma", type=float, default=0.0,
                        help="spread between machines: a slow one stays slow (default: %(default)s)")
    parser.add_argument("--overhead-s", type=float, default=0.0, help="of a job before its first minibatch (default: %(default)s)")
    parser.add_argument("--failures-per-worker-hour", type=float, default=0.0, help="default: %(default)s; spot machines: 0.05")
    parser.add_argument("--hang-share", type=float, default=0.0,
                        help="of the failures: the worker hangs, where others die (default: %(default)s)")
    parser.add_argument("--replace-s", type=float, default=20.0, help="to replace a lost worker (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="of a link, bytes/s (default: 1.25e8, 1 Gb/s)")
    parser.add_argument("--latency", type=float, default=2e-4, help="of a link, in seconds (default: %(default)s)")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="central", help="of averaging (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON; the lines before it go to stderr")
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the summary")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own YAML files")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raises one ConfigError that lists everything wrong."""
    problems = []
    for name in ("rate", "bandwidth"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0.0):
            problems.append(f"--{name} is {value}; it must be greater than 0.")
    for name in ("sigma", "host_sigma", "overhead_s", "failures_per_worker_hour", "hang_share", "replace_s", "latency"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0.0):
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 0.")
    if options.hang_share > 1.0:
        problems.append(f"--hang-share is {options.hang_share}; it must be at most 1.")
    if problems:
        raise ConfigError(problems)


def cluster_of(options: argparse.Namespace, *, num_minibatches: float, seed: int) -> SimulatedCluster:
    """The cluster asked for; `num_minibatches` are those of a job."""
    # --sigma is that of a whole job: shorter ones spread more, longer ones less
    spread = Spread(options.host_sigma, options.sigma * math.sqrt(num_minibatches))
    return SimulatedCluster(options.rate, spread, options.overhead_s, options.failures_per_worker_hour, options.hang_share,
                            options.replace_s, Link(options.bandwidth, options.latency, _ADD_SPEED), options.topology, seed)


# The simulation -----------------------------------------------------------------------------------


class VirtualProgress(ProgressTracker):
    """The usual lines, ending with the virtual time; how long is left of that is nobody's waiting time."""

    def iteration_line(self, record: OuterIterationRecord) -> str:
        return iteration_line(record, width=self._screen.width, ending=f"at {duration(record.elapsed_s)}")


@dataclass
class Scores:
    """A tracker that keeps what the summary needs."""

    records: list[OuterIterationRecord] = field(default_factory=list)

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.records.append(record)

    def incident(self, incident: Incident) -> None:
        pass

    def finished(self, report: FinalReport) -> None:
        pass

    def close(self, status: str) -> None:
        pass


@dataclass(frozen=True)
class Summary:
    """What a simulation came to.  Seconds are virtual but for `real_s`; shares are of the workers' time, 0 to 1."""

    num_workers: int
    num_outer_iters: int
    virtual_s: float
    # by the planner's formulas
    predicted_s: float
    predicted_efficiency: float
    # efficiency, and what was lost to failures, stragglers, averaging and overhead
    shares: dict[str, float]
    num_deaths: int
    num_hangs: int
    frames_processed: int
    train: SubsetScore
    valid: SubsetScore
    real_s: float
    folder: str


class _VirtualCluster:
    """Makes the simulated pool of a run, and reads its clock."""

    def __init__(self, options: argparse.Namespace, config: RunConfig) -> None:
        self._options, self._config = options, config
        self.pool: SimulatedPool | None = None
        self.num_parameters = 0

    def make_pool(self, request: PoolRequest) -> SimulatedPool:
        from ngsgd.pipeline.performance_model.simulator import SimulatedPool
        from ngsgd.tasks.speech import SpeechTaskSpec

        if not isinstance(request.spec, SpeechTaskSpec):
            raise ConfigError("ngsgd simulate needs a speech recipe; it cannot simulate a task of your own.")
        if self._config.cluster.ranks_per_worker > 1:
            raise ConfigError("ngsgd simulate has workers of one process; leave out cluster.ranks_per_worker.")
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
    from ngsgd.pipeline.runs.run_folder import run_name
    from ngsgd.tasks.frames import schedule_of

    config = replace(config, name=f"{run_name(config)}-simulated")
    virtual, scores = _VirtualCluster(options, config), Scores()
    services = replace(services_of(config, options.quiet), report=progress.report, warn=progress.warn, clock=virtual.clock,
                       make_pool=virtual.make_pool, make_trackers=lambda *_: [progress, scores])
    run = build_run(config, services)
    assert isinstance(run, Run)
    began = time.monotonic()
    run.train_only()
    assert virtual.pool is not None
    reader = EgsReader(run.data.egs_directory)
    schedule, samples = schedule_of(config, reader), mean_frames(reader)
    times = [(num_jobs, expected(virtual.cluster, config, num_jobs=num_jobs, samples=samples,
                                 model_bytes=4 * virtual.num_parameters))
             for num_jobs in map(schedule.num_jobs, range(schedule.num_outer_iters))]
    summary = _summary(virtual.pool, scores.records, times, run.folder, time.monotonic() - began)
    write_text(run.folder.path / "simulation.json",
               json.dumps({"cluster": asdict(virtual.cluster), "summary": asdict(summary)}, indent=1))
    return summary


def mean_frames(reader: EgsReader) -> float:
    """Of a job: the mean over all shards."""
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
    """What a person reads."""
    shares = summary.shares
    lost = ", ".join(f"{name} {_percent(share)}" for name, share in shares.items() if name != "efficiency")
    off = summary.virtual_s / summary.predicted_s - 1.0
    ends = f"{summary.num_deaths} ends of workers, {summary.num_hangs} of them hung"
    return [
        f"simulated  {summary.num_outer_iters} outer iterations on {summary.num_workers} workers: "
        f"{_seconds(summary.virtual_s)} ({_seconds(summary.real_s)} on this machine); {ends}",
        f"predicted  {_seconds(summary.predicted_s)} by the planner's formulas (simulated: {100 * off:+.1f}%)",
        f"efficiency {_percent(shares['efficiency'])} (predicted {_percent(summary.predicted_efficiency)}); lost to {lost}",
        f"objf       {summary.train.objf:.3f} valid {summary.valid.objf:.3f} acc {100 * summary.valid.accuracy:.1f}% "
        f"after {summary.frames_processed:,} frames",
        f"run folder {summary.folder}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 100 else duration(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
