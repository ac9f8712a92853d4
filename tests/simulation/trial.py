"""One trial: a run on the simulated world, its deaths and resumptions, until it ends."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ngsgd.cluster.fingerprint import Agreement, Fingerprint, FingerprintFile
from ngsgd.config import RunConfig
from ngsgd.errors import NgsgdError, QuarantineError, RunInterrupted, RunLockedError
from ngsgd.files import parse_json_lines, read_log
from ngsgd.pipeline.services import PoolRequest, Services
from ngsgd.pipeline.task_run import TaskRun, new_task_run
from ngsgd.runs.config_file import read_config
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.job import Job
from ngsgd.training.parameter_vector import FlatLayout
from tests.simulation import exchange, sites
from tests.simulation.disk import SimulatedDisk
from tests.simulation.pool import FaultyPool, History
from tests.simulation.scenario import Scenario
from tests.simulation.task import SimulatedTask
from tests.simulation.world import Fault, Killed, NoProgressError, World

# simulated seconds until every run must have ended
_LIMIT_S = 48 * 3600.0
_GRACE_S = 5.0
# an operator restarts the run after so long
_RESTART_S = 30.0
_ENDINGS = {Killed: "killed", RunInterrupted: "stopped", RunLockedError: "locked",
            QuarantineError: "no data"}


@dataclass
class Life:
    """One coordinator process."""

    number: int
    ending: str = ""
    error: BaseException | None = None
    first_job: Job | None = None
    # newest checkpoint that was durable when the process started
    acknowledged: int = -1


@dataclass
class Trial:
    """The state of one trial."""

    disk: SimulatedDisk
    scenario: Scenario
    faults: tuple[Fault, ...]
    lines: list[str] | None = None
    lives: list[Life] = field(default_factory=list)
    # newest outer iteration whose commit was acknowledged
    acknowledged: int = -1
    final: str = ""
    history: History = field(default_factory=History)
    # (size of the ledger, process that writes to it from there on)
    writers: list[tuple[int, int]] = field(default_factory=list)
    # a second process trained while the first one was stopped
    was_taken_over: bool = False
    # time of a request to stop the present process
    stops_at: float | None = None
    # those of the program that runs the trial
    older_threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))

    def __post_init__(self) -> None:
        self.world = World(self.faults, _LIMIT_S)
        self.world.lines = self.lines
        self.task = SimulatedTask(self.scenario.num_archives, self.scenario.shards_per_archive, self.scenario.num_minibatches,
                                  self.scenario.seed)
        self.folder = self.runs / "trial-20260101-000000"
        self.sites: sites.SiteStore | None = None
        if self.scenario.has_sites:
            num_outer_iters = self.task.grid.schedule(self.config.schedule).num_outer_iters
            self.sites = sites.SiteStore(self.world, self.config, FlatLayout.of(self.task.model()), num_outer_iters)
        self._configs: dict[str, RunConfig] = {}
        self._renamed: set[str] = set()
        self._pools: list[FaultyPool] = []
        # number of the process that took the run lock last
        self._holder = -1
        # of processes, in the order of time
        self._endings: list[str] = []
        self._is_nested = False
        # largest number of jobs of an outer iteration
        self._most_jobs = 0
        self._was_cut = False

    @property
    def runs(self) -> Path:
        return Path(self.disk.root) / "runs"

    @property
    def config(self) -> RunConfig:
        return self.scenario.config(str(self.runs))

    def run(self) -> None:
        """Train until the run is finished, with a new process after each end."""
        records = any(fault.what.startswith("power cut") for fault in self.faults)
        self.disk.begin(self.world, records=records, has_locks=self.scenario.has_locks)
        self.disk.on_rename, self.disk.on_sync = self._see_rename, self._see_sync
        limit = 3 + 2 * len(self.faults)
        try:
            with patch.object(RunConfig, "job_states_interval", self.scenario.job_states_interval), self._network():
                while len(self.lives) < limit and not self._live(f"host-{len(self.lives)}"):
                    self.world.advance(_RESTART_S)
        except NoProgressError as error:
            self.world.report(str(error))
            self.disk.end_process({})
        if not self.is_finished and not self.has_no_data:
            endings = ", ".join(life.ending for life in self.lives[-3:])
            self.world.report(f"the run did not finish in {len(self.lives)} processes ({endings})")
        # checks are no part of the run
        self.disk.world = World()
        final = self.folder / "final" / "model.safetensors"
        if final.exists():
            self.final = hashlib.sha256(final.read_bytes()).hexdigest()

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Replace the networks among workers and among sites."""
        has_codec = self.config.cluster.codec is not None
        with exchange.simulated(self.world, has_codec=has_codec) if self.scenario.has_exchange else nullcontext(), \
                sites.simulated(self.sites) if self.sites else nullcontext():
            yield

    @property
    def is_finished(self) -> bool:
        return bool(self.lives) and any(life.ending == "finished" for life in self.lives)

    @property
    def has_no_data(self) -> bool:
        """Whether the run ended because all its data are in quarantine."""
        # a second coordinator may be rejected after it
        return next((ending for ending in reversed(self._endings) if ending != "locked"), "") == "no data"

    def _live(self, host: str, keep: dict[int, str] | None = None) -> bool:
        """Run one coordinator process; return whether the run is finished."""
        life = Life(len(self.lives), acknowledged=self.acknowledged)
        self.lives.append(life)
        self.world.is_dead, self.world.cut = False, ""
        self.stops_at = None
        self._current = life
        self._note_writer()
        self.disk.new_process(host)
        self.world.note("process", life.number)
        self.world.phase = "takes over" if self._is_nested else "resumes" if life.number else "begins"
        try:
            self._train(life)
        except NoProgressError:
            raise
        except BaseException as error:
            # the traceback holds the objects of the process
            life.error = error.with_traceback(None)
            self._judge_error(life, error)
        self.world.note("ended", life.ending)
        self._endings.append(life.ending)
        left = self.disk.end_process(keep or {})
        if left and life.ending in ("finished", "error", "no data"):
            self.world.report(f"the process left files open: {', '.join(sorted(Path(path).name for path in left))}")
        self._was_cut = bool(self.world.cut)
        if self.world.cut:
            self.disk.cut_power(self.world.cut)
        return life.ending in ("finished", "no data")

    def _note_writer(self) -> None:
        """Note which process writes the next lines of the ledger."""
        path = self.folder / "ledger.jsonl"
        # without an incomplete line, which the next process removes
        size = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        # a power cut may have removed lines
        self.writers = [*(one for one in self.writers if one[0] < size), (size, self._current.number)]

    def ledger_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (process, line) of the ledger."""
        offset = 0
        for text in (self.folder / "ledger.jsonl").read_bytes().splitlines(keepends=True):
            writer = max((one for one in self.writers if one[0] <= offset), key=lambda one: one[0])[1]
            yield from ((writer, line) for line in parse_json_lines(text.decode()))
            offset += len(text)

    def _train(self, life: Life) -> None:
        services = Services(make_pool=self._make_pool, clock=self.world.clock, stop=self)
        config = self.folder / "config.yaml"
        if config.exists():
            folder = RunFolder.open(self.folder)
            run = TaskRun(self._read_config(folder), folder, services, self._fingerprint(folder), given=self.task)
        else:
            if self.acknowledged >= 0:
                self.world.report(f"config.yaml was lost after the commit of outer iteration {self.acknowledged}")
            run = new_task_run(self.config, services, self.task)
            self.folder = run.folder.path
            run = TaskRun(self.config, run.folder, services, self._fingerprint(run.folder), given=self.task, is_new=True)
        run.train()
        life.ending = "finished"
        # jobs that keep state have one vector each until the pool is closed
        allowed = self._most_jobs if self.scenario.jobs_keep_state else 0
        if self._pools[-1].num_unreleased() > allowed:
            self.world.report(f"{self._pools[-1].num_unreleased()} vectors were never released")

    def _read_config(self, folder: RunFolder) -> RunConfig:
        """Read config.yaml; parsing the same text again takes a third of the time of a trial."""
        text = read_log(folder.config)
        if text not in self._configs:
            self._configs[text] = read_config(folder.config)
        return self._configs[text]

    def _judge_error(self, life: Life, error: BaseException) -> None:
        """Name the end of a process, and report an end that a user could not act on."""
        endings = (ending for kind, ending in _ENDINGS.items() if isinstance(error, kind))
        life.ending = next(endings, "")
        if not life.ending and isinstance(error, (NgsgdError, OSError)):
            life.ending = "error"
            self.world.note("error", type(error).__name__, str(error).replace(self.disk.root, "")[:300])
        elif not life.ending:
            life.ending = "crash"
            self.world.report(f"a process ended with {type(error).__name__}: {error}")

    def _fingerprint(self, folder: RunFolder) -> FingerprintCheck:
        # measuring this process takes longer than a trial
        return FingerprintCheck(1, Agreement(Fingerprint()), FingerprintFile(folder.fingerprint))

    def _make_pool(self, request: PoolRequest) -> FaultyPool:
        self._holder = self._current.number
        pool = FaultyPool(self.world, self.scenario, self.task, request, self._on_wait, self._on_submit, self.history)
        self._pools.append(pool)
        return pool

    def _on_submit(self, job: Job) -> None:
        if self._current.first_job is None:
            self._current.first_job = job
        self._most_jobs = max(self._most_jobs, job.job + 1)

    def _see_rename(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder.endswith("checkpoints") and name.startswith("iter-"):
            self._renamed.add(name)
            if self._current.number != self._holder:
                self.world.report(f"{name} was committed by a process that another one had replaced")

    def _see_sync(self, path: str) -> None:
        if path.endswith("checkpoints"):
            # a power cut may have removed a name that was not synced
            for name in [name for name in self._renamed if (Path(path) / name).is_dir()]:
                self.acknowledged = max(self.acknowledged, int(name.removeprefix("iter-")))
            self._renamed.clear()

    def _on_wait(self, fault: Fault) -> None:
        if fault.what == "kill":
            self.world.kill()
        elif fault.what == "stop":
            self.stops_at = self.world.now
        elif fault.what == "second coordinator" and not self._is_nested:
            self._second_coordinator()

    def _second_coordinator(self) -> None:
        """Stop this process, and let another one on another machine try to continue the run."""
        number = len(self.lives)
        life, stops_at, self._is_nested = self._current, self.stops_at, True
        try:
            with self.world.paused():
                self._live(f"other-{len(self.lives)}", dict(self.disk.open_files))
        finally:
            self._current, self.stops_at, self._is_nested = life, stops_at, False
            self._note_writer()
        other = self.lives[number]
        self.was_taken_over |= other.first_job is not None
        if self.scenario.has_locks and self.was_taken_over:
            self.world.report("two coordinators trained the run at the same time")
        if self._was_cut:
            # both machines lost power
            self.world.kill()

    def requested(self) -> bool:
        return self.stops_at is not None

    def expired(self) -> bool:
        return self.stops_at is not None and self.world.now > self.stops_at + _GRACE_S
