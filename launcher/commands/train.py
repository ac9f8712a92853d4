"""Services of `ngsgd train`, `resume` and `decode`: progress lines, MLflow, Ray and signals."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.config.rules import of_other_nodes
from ngsgd.errors import EXIT_OK, ConfigError, RunInterrupted
from ngsgd.launcher.mlflow.metrics import run_metrics
from ngsgd.launcher.mlflow.store import resolved, tracking_uri
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.launcher.ray.probe import require_cluster
from ngsgd.launcher.reports.figures import draw
from ngsgd.launcher.reports.progress import ProgressTracker
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.signals import SignalStop, signals_to, sigterm_interrupts
from ngsgd.launcher.trackers import of_kind, require_package
from ngsgd.masking import masked
from ngsgd.phase import Phase
from ngsgd.pipeline.services import PoolRequest, Services, local_pool
from ngsgd.runs import trust as permission
from ngsgd.runs.config_file import read_config
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import SIMULATION, Place, RunFolder, require_unchanged, resume_command
from ngsgd.training.records import FinalReport, Tracker
from ngsgd.training.storage.event_log import events_of
from ngsgd.training.worker_pool import WorkerPool

if TYPE_CHECKING:
    from ngsgd.pipeline.run import Run


def train(config: RunConfig, quiet: bool, trust: bool = False, *, place: Place | None = None,
          allow_other_bits: bool = False) -> FinalReport:
    """Train a new run, from data to WER; `trust` imports a module that only init_model names."""
    kind = config.cluster.kind
    if kind in ("slurm", "kubernetes"):
        raise ConfigError(f"cluster={kind} trains by submission only: ngsgd submit "
                          f"cluster={kind} ...")
    if (kind == "ray" and not config.cluster.address and (problems := [one.message for one in of_other_nodes(config)])):
        raise ConfigError(problems)
    _require_cluster(config, quiet)
    config = resolved(config, _progress(config, quiet).warn)
    # imports speech recognition, which a custom task does not need
    from ngsgd.pipeline.run import build_run
    with _services_with_ray(config, quiet) as services:
        return build_run(config, replace(services, place=place or Place()), trust=trust, allow_other_bits=allow_other_bits).train()


def resume(run_dir: Path, quiet: bool, address: str | None = None, num_workers: int | None = None, *,
           accept_changed_config: bool = False, trust: bool = False, given: RunConfig | None = None,
           allow_other_bits: bool = False) -> int:
    """Continue a run after its last outer iteration, with its own configuration.

    A run that finished stays as it is.

    Cluster and number of workers may differ, without effect on the result; None: those of the run.
    The threads per worker stay the same. `given` are the settings of the command line of
    --continue; a module named there needs no `trust`.
    """
    folder = RunFolder.open(run_dir)
    config = read_config(folder.config)
    # a process that was killed at the very end left no last event, and is resumed
    if state_of(folder.path)["state"] == "SUCCEEDED" and folder.is_finished():
        print(f"{folder.address} is finished; next: ngsgd report {shlex.quote(folder.address)}")
        return EXIT_OK
    if config.task.from_python:
        # an error of the fingerprint contains the call that accepts it
        FingerprintCheck.of_resumed_run(config, folder, lambda _line: None, allow_other_bits=allow_other_bits)
        call = resume_command(config.task, folder.path, allow_other_bits=allow_other_bits, trust=trust)
        raise ConfigError(f"the task of this run came from a Python program, so that no command can continue it; call {call}.")
    if (folder.path / SIMULATION).exists():
        raise ConfigError(f"{folder.path} is a simulation, which has no real workers and cannot be resumed; repeat it with "
                          "ngsgd simulate.")
    require_unchanged(folder.config, accept=accept_changed_config)
    fingerprint = FingerprintCheck.of_resumed_run(config, folder, _progress(config, quiet).report,
                                                  allow_other_bits=allow_other_bits)
    cluster = config.cluster
    # a run that began without Ray joins the cluster too
    config = replace(config, cluster=replace(cluster, kind="ray" if address else cluster.kind,
                                             address=cluster.address if address is None else address,
                                             num_workers=num_workers or cluster.num_workers))
    config = _as_given(config, given)
    if config.tracking.kind == "mlflow":
        # first: it fails if the password was given only on the first command line
        tracking_uri(config)
    # before a connection to the cluster, which takes seconds
    permission.require_run(folder, config, trust=trust)
    _require_cluster(config, quiet)
    from ngsgd.pipeline.run import build_run
    with _services_with_ray(config, quiet) as services:
        build_run(config, services, folder=folder, fingerprint=fingerprint, trust=trust).train()
    return EXIT_OK


def _require_cluster(config: RunConfig, quiet: bool) -> None:
    """Raise ClusterError if the workers of a run cannot start, before its data is prepared."""
    require_cluster(config.cluster)
    if config.cluster.kind == "ray" and config.cluster.address:
        from ngsgd.launcher.ray.cluster import require_workers
        require_workers(config.cluster, _progress(config, quiet).report)


def open_run(run_dir: Path, quiet: bool, *, is_unchanged: bool = True) -> Run:
    """Open a run for commands that do not train; `is_unchanged` rejects an edited config.yaml."""
    folder = RunFolder.open(run_dir)
    config = read_config(folder.config)
    if is_unchanged:
        require_unchanged(folder.config)
    from ngsgd.pipeline.run import Run
    progress = _progress(config, quiet)
    if config.task._target_:
        raise ConfigError(f"{run_dir} trains {config.task._target_}, and this command is for "
                          f"speech; read the scores in {folder.metrics}, or use "
                          f"ngsgd.load({str(run_dir)!r}, task) in Python.")
    return Run(config, folder, Services(progress.report, progress.warn))


def services_of(config: RunConfig, quiet: bool) -> Services:
    """Progress lines on the terminal, MLflow, Ray, stop signals and plots."""
    require_package(config.tracking.kind)
    progress = _progress(config, quiet)
    stop = SignalStop(config.failure.grace_period_s, progress.report)

    def trackers(config: RunConfig, folder: RunFolder) -> list[Tracker]:
        found: list[Tracker] = []
        # nobody reads the metrics of a Ray of this run alone
        if config.cluster.kind == "ray" and config.cluster.address:
            from ngsgd.launcher.ray.metrics import RayMetrics
            found.append(RayMetrics(folder.path.name, lambda record, before_s: run_metrics(
                record, is_speech=not config.task._target_, before_s=before_s)))
        if config.tracking.kind == "mlflow":
            found.append(MlflowTracker(config, folder.path, progress.warn, progress.report))
        elif config.tracking.kind != "none":
            found.append(of_kind(config, folder, progress.warn))
        # the progress last, so that the wait for MLflow is shown
        return [*found, progress]

    return Services(progress.report, progress.warn, make_pool=_pool, make_trackers=trackers,
                    stop=stop, catch_signals=partial(signals_to, stop),
                    plot=lambda events, picture: draw(events_of(events), picture,
                                                      is_speech=not config.task._target_))


def _progress(config: RunConfig, quiet: bool) -> ProgressTracker:
    has_dashboard = config.tracking.kind == "mlflow" and not config.tracking.uri
    return ProgressTracker(quiet=quiet, output_dir=config.output_dir if has_dashboard else None,
                           is_speech=not config.task._target_)


@contextlib.contextmanager
def _services_with_ray(config: RunConfig, quiet: bool) -> Iterator[Services]:
    """Services whose Ray instance starts before data preparation, and ends if that fails."""
    services = services_of(config, quiet)
    with contextlib.ExitStack() as ends:
        def begin(config: RunConfig) -> None:
            if config.cluster.kind == "ray":
                from ngsgd.launcher.ray import cluster
                ends.callback(cluster.end_unused)
                if not config.cluster.address:
                    services.report(Phase("starting Ray"))
                cluster.begin(config.cluster)
                # Ray's C++ code has replaced the handler
                handle_sigterm()

        try:
            with sigterm_interrupts() as handle_sigterm:
                yield replace(services, begin=begin)
        except KeyboardInterrupt as interrupt:
            raise RunInterrupted("stopped before training; run the same command "
                                 "again.") from interrupt


def _pool(request: PoolRequest) -> WorkerPool:
    if request.spec.settings.cluster.kind != "ray":
        return local_pool(request)
    from ngsgd.launcher.ray.metrics import MeteredRayPool
    from ngsgd.launcher.ray.session import RAY_LOG
    run = request.log_directory.parent
    RAY_LOG.write_to(run / "ray.log")
    pool = MeteredRayPool(request.spec, request.num_threads, request.num_parameters, request.agreement, request.report,
                          [str(folder) for folder in request.folders])
    pool.run = run.name
    return pool


def _as_given(config: RunConfig, given: RunConfig | None) -> RunConfig:
    """Add data that config.yaml does not hold: the login of tracking.uri, permission to import.

    The module is imported from the folder of the command line, and its arguments must be equal.
    """
    if given is not None and masked(given.tracking.uri, known=False) == config.tracking.uri:
        config = replace(config, tracking=replace(config.tracking, uri=given.tracking.uri))
    for name, module in permission.modules_of(permission.absolute(given)).items() if given is not None else ():
        own = getattr(config, name)
        if (module._target_, module.args) == (own._target_, own.args):
            permission.allow(module)
            config = replace(config, **{name: replace(own, search_path=module.search_path)})
    return config
