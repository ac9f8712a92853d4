"""Base class of runs: a folder, a lock, checkpoints, trackers, and training on injected workers.

`train` is the only place that constructs a `Coordinator`.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import CheckpointError, ConfigError, NoCheckpointError, RunInterrupted
from ngsgd.files import digest_of_json, require_room
from ngsgd.optim.outer import make_rule
from ngsgd.phase import Phase
from ngsgd.pipeline.services import PoolRequest, Services
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder, resume_command
from ngsgd.runs.verification import Request, verify_run
from ngsgd.schedules import Schedule
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord, Tracker, Trackers
from ngsgd.training.sites.rounds import Rounds, open_exchange
from ngsgd.training.sites.site_average import SiteAverage, SiteClock
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.storage.lock import RunLock
from ngsgd.training.task import Task, TaskSpec, seeded_model
from ngsgd.training.verification.repetition import Verification
from ngsgd.training.worker_pool import WorkerPool

# the report's red limit; good recipes begin with shares up to 0.65
_TOO_MANY_CLIPPED = 0.9
_IN_A_ROW = 2


@dataclass(frozen=True)
class _StopOf:
    """The stop signal of this process, and requests from other machines (`ngsgd stop URL`)."""

    signal: StopSignal
    lock: RunLock | None

    def requested(self) -> bool:
        return self.signal.requested() or (self.lock is not None and self.lock.stop_requested())

    def expired(self) -> bool:
        return self.signal.expired()


@dataclass(frozen=True)
class Training:
    """A run that holds its lock and is ready to train."""

    spec: TaskSpec
    task: Task
    checkpoints: CheckpointStore
    latest: Checkpoint | None
    trackers: Trackers
    events: EventLog
    skipped: Sequence[Incident]  # damaged checkpoints that are newer than `latest`


class BaseRun(ABC):
    """A training run; subclasses define the task and the final model."""

    def __init__(self, config: RunConfig, folder: RunFolder, services: Services | None = None,
                 fingerprint: FingerprintCheck | None = None, *, is_new: bool = False) -> None:
        self.config = config
        self.folder = folder
        self.services = services or Services()
        self._fingerprint = fingerprint
        self._purpose = "train" if is_new else "resume"

    def train(self) -> FinalReport:
        """Train from the last checkpoint to the end, and write the final model.

        Raises RunInterrupted if a stop was requested, and NgsgdError if the run cannot continue.
        """
        with self._training() as training:
            end = self._iterate(training)
            report = self._finish(training, end)
            training.trackers.finished(report)
            self.folder.mark_finished()
        return report

    def train_only(self) -> Checkpoint:
        """Run the remaining outer iterations, without final model and decoding."""
        with self._training() as training:
            return self._iterate(training)

    def verify(self, request: Request) -> Verification:
        """Repeat jobs of the run, which must not be training, and compare them with its ledger.

        Raises CheckpointError if no job can be repeated.
        """
        with self.folder.locked("verify", self.services.warn), self._checked().in_effect():
            spec = self._spec()
            task = spec.task(torch.device("cpu"))
            return verify_run(self.config, self.folder, spec, task, self._initial_parameters(task), request, self.services.report)

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The final model in evaluation mode."""

    @property
    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Scores of the final model, by name."""

    @abstractmethod
    def _spec(self) -> TaskSpec:
        """Prepare the data, and describe the task to the workers."""

    @abstractmethod
    def _kept_models(self, task: Task, schedule: Schedule) -> Sequence[int]:
        """Outer iterations whose models the final combination needs."""

    @abstractmethod
    def _finish(self, training: Training, end: Checkpoint) -> FinalReport:
        """Build the final model from the last checkpoint, and score it."""

    def _read_by_workers(self, spec: TaskSpec) -> Sequence[Path]:
        """Folders of data that every worker must see."""
        return ()

    def _initial_parameters(self, task: Task) -> Vector:
        model = seeded_model(task, self.config.seed)
        return FlatLayout.of(model).flatten(model.state_dict())

    @contextlib.contextmanager
    def _training(self) -> Iterator[Training]:
        """Lock the folder, open checkpoints and trackers, and report how the run ended."""
        with self.folder.locked(self._purpose, self.services.warn) as lock, contextlib.ExitStack() as kernels:
            with self._errors():
                fingerprint = self._checked()
                kernels.enter_context(fingerprint.in_effect())
                if fingerprint.no_kernels:
                    self.services.warn("all processes of this run use torch operations instead of C++ kernels: "
                                       f"{fingerprint.no_kernels}. To use them, install a C++ compiler, such as g++, or name one "
                                       "in CXX, and start a new run.")
                training = self._open(lock)
                lock.committed()
            status = "FAILED"
            try:
                # recorded before the trackers are closed, so that MLflow receives it as well
                with self._errors(training.events), self.folder.marked_as_running():
                    training.events.opened(self._purpose)
                    for incident in training.skipped:
                        training.trackers.incident(incident)
                    yield training
                status = "FINISHED"
            except RunInterrupted:
                status = "KILLED"
                raise
            finally:
                training.trackers.close(status)

    @contextlib.contextmanager
    def _errors(self, events: EventLog | None = None) -> Iterator[None]:
        """Record an error in the run folder; name the next step after interrupts and full disks."""
        resume = resume_command(self.config.task, self.folder.path)
        signal_name = partial(getattr, self.services.stop, "signal_name", "")
        with self.folder.error_recorded(signal_name, events.failed if events else lambda _about: None):
            try:
                yield
            except (RunInterrupted, KeyboardInterrupt) as interrupt:
                raise RunInterrupted(f"{str(interrupt) or 'interrupted'}; continue with: {resume}") from interrupt
            except OSError as error:
                raise CheckpointError(f"{error.filename or self.folder.path} could not be written ({error.strerror}); free "
                                      f"disk space or fix the permissions, then continue with: {resume}") from error

    def _open(self, lock: RunLock) -> Training:
        config, folder = self.config, self.folder
        spec = self._spec()
        task = spec.task(torch.device("cpu"))
        if config.failure.on_bad_batch == "quarantine" and not task.names_examples:
            raise ConfigError("failure.on_bad_batch is quarantine, but this task does not name its examples; choose skip or stop.")
        if config.failure.audit_every and (config.cluster.kind == "in_process" or config.cluster.num_workers < 2):
            self.services.warn("failure.audit_every has no effect: an audit needs at least two worker processes, and cluster.kind "
                               f"is {config.cluster.kind} with cluster.num_workers={config.cluster.num_workers}")
        if config.failure.snapshots == "on" and not task.can_continue_jobs:
            raise ConfigError("failure.snapshots is on, but this task does not support it (`can_continue_jobs` of "
                              "ngsgd.training.task.Task); leave it auto.")
        schedule = task.shards().schedule(config.schedule)
        if config.task._target_:
            # examples of each shard, as minibatches of one; prepared speech has digests
            sizes = [task.num_batches(schedule.shard(number), 1) for number in range(schedule.num_archives)]
            folder.remember_data(digest_of_json(sizes))
        model = seeded_model(task, config.seed)
        for line in summary(model):
            self.services.report(line)
        layout = FlatLayout.of(model)
        checkpoints = CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep,
                                      self._kept_models(task, schedule), lock, jobs_interval=config.job_states_interval)
        latest, problems = checkpoints.latest()
        if latest is None and (problems or folder.final.exists()):
            # a start from iteration 1 would overwrite the checkpoints and the final model
            reason = problems[0] if problems else f"{folder.checkpoints} has no checkpoint."
            raise NoCheckpointError(f"{folder.path} was trained before, and no checkpoint of it can be used. {reason} Nothing was "
                                  "changed; to train from the beginning, start a new run.")
        events = EventLog(folder.events, latest.progress.outer_iter if latest else -1, is_speech=not config.task._target_,
                          lock=lock)
        if latest and events.has(latest.progress.outer_iter):
            latest = replace(latest, record=None)
        num_jobs = sum(schedule.num_jobs(number) for number in range(schedule.num_outer_iters))
        # an outer iteration has no fewer jobs because the data is small
        if num_jobs >= 2 * schedule.num_passes:
            num_epochs = num_jobs / (schedule.num_archives * schedule.frames_per_eg)
            self.services.warn(f"{counted(num_jobs, 'job')} train for {num_epochs:.3g} epochs, and schedule.num_epochs is "
                               f"{schedule.num_epochs:g}: the data is too small for so many jobs; lower cluster.num_workers or "
                               "egs.samples_per_iter")
        try:
            others = self.services.make_trackers(config, folder)
        except BaseException:
            events.close("FAILED")
            raise
        here, elapsed_s = (latest.progress.outer_iter, latest.progress.elapsed_s) if latest else (-1, 0.0)
        skipped = [Incident("checkpoint_skipped", problem, here, elapsed_s=elapsed_s) for problem in problems]
        return Training(spec, task, checkpoints, latest, Trackers([events, ClippedUpdates(self.services.warn), *others]), events,
                        skipped)

    def _iterate(self, training: Training) -> Checkpoint:
        config, folder, services, spec = self.config, self.folder, self.services, training.spec
        fingerprint = self._checked()
        torch.set_num_threads(fingerprint.num_threads)
        size = training.checkpoints.layout.size
        if training.latest is None:
            start = first_checkpoint(self._initial_parameters(training.task))
        else:
            start = training.latest
            services.report(f"continuing after outer iteration {start.progress.outer_iter + 1}")
        # the model, at most two buffers of the outer optimizer, and a moving average
        num_vectors = 1 + len(make_rule(config.outer).buffers) + (config.outer.ema_decay > 0)
        if spec.settings.jobs_keep_state:
            num_vectors += 1 + config.schedule.num_jobs_final
            if training.latest and not start.has_jobs:
                services.warn("the checkpoint has no state of the jobs, which start from the model again; results are not bitwise "
                              "identical to those of an uninterrupted run")
        # the newest checkpoint, the one being written, and a damaged one
        require_room(folder.path, 3 * 4 * size * num_vectors, "three checkpoints", "output_dir", CheckpointError)
        pool = services.make_pool(PoolRequest(spec, fingerprint.num_threads, size, folder.workers,
                                              fingerprint.agreement, services.stop.expired, services.report,
                                              self._read_by_workers(spec)))
        num_workers, num_threads = config.cluster.num_workers, fingerprint.num_threads
        services.report(Phase(f"starting {counted(num_workers, 'worker')} ({services.workers or config.cluster.kind}, "
                              f"{counted(num_threads, 'thread')} each)"))

        def on_start() -> None:
            services.report(Phase(f"training: outer iteration {start.progress.outer_iter + 2}"))
            fingerprint.keep(start.progress.outer_iter + 1)
            for line in fingerprint.differences:
                message = f"results are not bitwise identical from here on, as was allowed: {line}"
                training.trackers.incident(Incident(
                    "other_bits", message, start.progress.outer_iter + 1, elapsed_s=start.progress.elapsed_s))

        return train(spec, pool, training.checkpoints, start, folder.ledger,
                     tracker=training.trackers, stop=_StopOf(services.stop, training.checkpoints.lock),
                     clock=services.clock, report=services.report, on_start=on_start, catch_signals=services.catch_signals)

    def _checked(self) -> FingerprintCheck:
        """The requirements on all processes of the run, compared with its earlier ones."""
        self._fingerprint = self._fingerprint or FingerprintCheck.of_resumed_run(self.config, self.folder, self.services.report,
                                                                                 allow_other_bits=False)
        return self._fingerprint


def train(spec: TaskSpec, pool: WorkerPool, checkpoints: CheckpointStore, start: Checkpoint,
          ledger: Path, *, tracker: Tracker | None = None, stop: StopSignal | None = None,
          clock: Callable[[], float] = time.monotonic, report: Callable[[str], object] = lambda _line: None,
          on_start: Callable[[], None] = lambda: None,
          catch_signals: Callable[[], AbstractContextManager[None]] = nullcontext) -> Checkpoint:
    """Run the remaining outer iterations and return the last checkpoint.

    Args:
        spec: settings and task.
        pool: workers; started here and closed at the end.
        checkpoints: store for the model of every outer iteration.
        start: the checkpoint to continue from.
        ledger: path of the write-ahead record of shards.
        tracker: receives the records of outer iterations.
        stop: request to stop after the current outer iteration, or immediately.
        clock: seconds; simulated time in a simulation.
        report: takes lines of progress.
        on_start: called when the workers are ready.
        catch_signals: context that is active while outer iterations run.
    """
    settings = replace(spec.settings, num_averaging_threads=os.cpu_count() or 1)
    task = spec.task(torch.device("cpu"))
    written = Ledger(ledger, checkpoints.lock.fence if checkpoints.lock else 0)
    try:
        pool.start()
        on_start()
        schedule, control = task.shards().schedule(settings.schedule), RunControl(stop or NeverStop(), clock, report)
        model = seeded_model(task, settings.seed)
        sites = None
        if settings.sites.jobs:
            layout, run = checkpoints.layout, checkpoints.directory.parent.name
            rounds = Rounds(open_exchange(settings.sites.exchange, layout.size))
            sites = SiteAverage(rounds, settings, layout, schedule.num_outer_iters, run, SiteClock(control.stop, control.clock))
        coordinator = Coordinator(task, model, schedule, pool, RunStorage(checkpoints, written, tracker or Trackers([])),
                                  settings, control, sites)
        with catch_signals():
            return coordinator.train(start)
    finally:
        written.close()
        pool.close()


# longer tables list the top-level modules only
_MAX_ROWS = 20


def summary(model: nn.Module) -> list[str]:
    """List the modules that own parameters: name, type, shape of the largest parameter, number of
    parameters.

    The first line has the totals. Parameters shared by several modules count once. Models with more
    than 20 such modules have one line per top-level module.

    Example:
        >>> summary(nn.Sequential(nn.Linear(3, 2)))
        ['model: 8 parameters', '  0  Linear  2 x 3  8']
    """
    def count(parameters: Iterable[nn.Parameter]) -> str:
        return f"{sum(one.numel() for one in parameters):,}"

    seen: set[nn.Parameter] = set()
    rows = []
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one not in seen]
        seen.update(own)
        if own:
            largest = max(own, key=nn.Parameter.numel)
            rows.append((name or "(model)", _public_name(type(module)), " x ".join(map(str, largest.shape)), count(own)))
    if len(rows) > _MAX_ROWS:
        rows = [(name, _public_name(type(module)), "", count(module.parameters()))
                for name, module in model.named_children() if any(True for _ in module.parameters())][:_MAX_ROWS]
    fixed = [one for one in seen if not one.requires_grad]
    total = f"model: {count(seen)} parameters{f', {count(fixed)} of them fixed' if fixed else ''}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [total, *("  " + "  ".join([*map(str.ljust, row[:3], widths), row[3].rjust(widths[3])]) for row in rows)]


def _public_name(kind: type[nn.Module]) -> str:
    """The name of a class; a private class of torch has that of the layer that it derives from."""
    if kind.__module__.partition(".")[0] != "torch":
        return kind.__name__
    return next((base.__name__ for base in kind.__mro__ if hasattr(nn, base.__name__)), kind.__name__)


class ClippedUpdates(Tracker):
    """A tracker that warns once after two outer iterations with nearly all updates shortened."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._num_in_a_row = 0
        self._has_warned = False

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        share = max(record.max_change_share, record.max_param_change_share)
        self._num_in_a_row = self._num_in_a_row + 1 if share > _TOO_MANY_CLIPPED else 0
        if self._num_in_a_row == _IN_A_ROW and not self._has_warned:
            self._has_warned = True
            self._warn(f"optimizer.max_change shortened {share:.0%} of the updates of outer iteration {record.outer_iter + 1}, so "
                       "the learning rate has no effect; lower lr (schedule.lr_initial and lr_final), or raise "
                       "optimizer.max_change (0: no limit)")
