"""Injected parts of a run: output lines, trackers, worker pools, stop signals, plots, the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from ngsgd.cluster.fingerprint import Agreement
from ngsgd.cluster.in_process import InProcessPool
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.runs.run_folder import Place, RunFolder
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.records import Tracker
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker_pool import WorkerPool

Report = Callable[[str], None]


@dataclass(frozen=True)
class PoolRequest:
    """The workers that a run needs."""

    spec: TaskSpec
    num_threads: int                       # per worker
    num_parameters: int
    log_directory: Path  # for the output of worker processes
    agreement: Agreement  # numeric fingerprint required of every worker
    should_stop: Callable[[], bool]
    report: Report  # receives progress lines
    folders: Sequence[Path] = ()  # that every worker reads


def local_pool(request: PoolRequest) -> WorkerPool:
    """Workers in this process (cluster.kind=in_process) or in local processes (local)."""
    spec, cluster = request.spec, request.spec.settings.cluster
    if cluster.kind == "in_process":
        return InProcessPool(spec, cluster.num_workers, request.num_threads, request.should_stop, request.agreement)
    if cluster.kind == "local":
        # spinning threads of one worker would starve another
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        return ProcessPool(spec, cluster.num_workers, request.num_threads, request.num_parameters,
                           log_directory=request.log_directory, agreement=request.agreement, report=request.report)
    raise ConfigError(f"cluster.kind is {cluster.kind}, which needs the command line; from Python, "
                      "choose local or in_process.")


@dataclass(frozen=True)
class Services:
    """Injected parts of a run; with the defaults a run is silent and stays on this machine."""

    report: Report = lambda _line: None  # receives progress of the preparation, line by line
    warn: Report = lambda _line: None
    # called after the settings are checked and before data are prepared: workers may start
    # meanwhile
    begin: Callable[[RunConfig], None] = lambda _config: None
    make_pool: Callable[[PoolRequest], WorkerPool] = local_pool
    workers: str = ""  # type of the workers for a line of progress; empty: cluster.kind
    make_trackers: Callable[[RunConfig, RunFolder], Sequence[Tracker]] = lambda _config, _folder: ()
    stop: StopSignal = field(default_factory=NeverStop)
    # active while outer iterations run; Ctrl-C raises KeyboardInterrupt outside of it
    catch_signals: Callable[[], AbstractContextManager[None]] = nullcontext
    # plots the learning curve from events.jsonl
    plot: Callable[[Path, Path], None] = lambda _events, _picture: None
    # folder and further files of a new run
    place: Place = field(default_factory=Place)
    clock: Callable[[], float] = time.monotonic
