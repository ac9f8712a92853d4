"""Steady cost of fault tolerance: `ngsgd train` compared with a bare training loop.

    python benchmarks/steady_cost.py [--jobs 6] [--frames 300000] [--folder FOLDER]
    python benchmarks/steady_cost.py --pairs 8 [--jobs 2] [--frames 60000]

`ngsgd train` runs with checkpoints, ledger, checksums, heartbeats and MLflow, and one worker.

The first command measures four parts of the cost in one run, each relative to a job of 20 s:

- loop: time of a minibatch of the worker, compared with a bare loop of forward, backward,
  optimizer step, and sums of loss and accuracy. The worker process trains both in turn, 7
  minibatches at a time, with the same model. Both call the same forward pass, backward pass and
  optimizer step, whose times vary by several percent. The cost is therefore the difference of the
  time outside of these three calls. Their difference within them is printed too: it is a
  measurement error, unless its interval excludes 0.
- other processes: time within these calls while the coordinator and its services run, compared with
  the time while they are stopped (SIGSTOP), 0.2 s at a time. Each stop is compared with the time
  before and after it. Their CPU time, on another core, is printed too.
- between jobs: time of an outer iteration outside of the minibatches of its job.
- snapshots: time of the snapshots of a job, which the loop omits.

Two processes with the same code and data differ by several percent, because of the addresses of
their memory. A comparison of processes therefore cannot show the cost. The second command shows
this: pairs of `ngsgd train` and a bare process, and pairs of two bare processes. Both processes of
a pair run in turn, 0.4 s at a time, from the end of the first job. After each pair the program
compares the parameters: those of the run and of the bare process are bitwise identical.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.cluster.worker_process import MakeWorker
from ngsgd.config import FailureConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.files import read_json_lines
from ngsgd.launcher.commands.train import services_of
from ngsgd.launcher.config.compose import compose
from ngsgd.optim import SGD
from ngsgd.pipeline.base_run import BaseRun, Training
from ngsgd.pipeline.runs.config_file import to_yaml
from ngsgd.pipeline.runs.fingerprint_check import FingerprintCheck
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.pipeline.services import PoolRequest
from ngsgd.schedules import Schedule
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.task import Batch, Task, TaskSpec, seeded_model
from ngsgd.training.worker import Worker, make_optimizer, never
from ngsgd.training.worker_pool import WorkerPool

DIM, NUM_CLASSES, UTTERANCE = 40, 100, 500
TURN_S, POLL_S = 0.4, 0.01
# length of a stop of the other processes
_STOP_S = 0.2
# seconds after a stop or a start of other processes that are not measured
_SETTLING_S = 0.02
# length of the job of which the costs are a part
_JOB_S = 20.0
# minibatches; the first of a block finds other code in the caches of the processor, and is omitted
WORKER, BARE, FIRST = 0, 1, 2
# columns of `_of_kind`
COMPLETE, OUTSIDE, INSIDE = 1, 3, 4
# minibatches of a block
_BLOCK = 7
# first minibatches of a job, whose estimates are updated in each
_WARM_UP, _DRAWS = 48, 200
# environment variable with the folder of the times
_FOLDER = "STEADY_COST_FOLDER"


def prepared(folder: Path, config: RunConfig, num_archives: int, num_frames: int) -> Path:
    """Write archives of random frames; a job is one position of the examples of an archive."""
    random = np.random.default_rng(0)

    def frames(number: int) -> FrameSet:
        offsets = np.append(np.arange(0, number, UTTERANCE), number)
        return FrameSet(random.standard_normal((number, DIM), np.float32), random.integers(0, NUM_CLASSES, number).astype(np.int32),
                        offsets, tuple(f"utt{u}" for u in range(len(offsets) - 1)))
    return prepare_archives(frames(num_archives * num_frames), frames(20 * UTTERANCE), config.egs, num_classes=NUM_CLASSES,
                            digest="synthetic", cache_root=folder)


def configured(options: argparse.Namespace, folder: Path) -> RunConfig:
    """The default recipe, with one worker and jobs of `--frames` frames."""
    return compose(["cluster.num_workers=1", "cluster=local", "cluster.threads_per_worker=1", "outer=average",
                    "schedule.num_jobs_initial=1", "schedule.num_jobs_final=1",
                    f"egs.samples_per_iter={options.frames}", "egs.frames_per_eg=1", "schedule.num_epochs=1000",
                    f"output_dir={folder / 'runs'}", "name=steady"])


class ArchiveRun(BaseRun):
    """A run on given archives: all that `ngsgd train` does from the first job to the last.

    It is killed before its last job. It therefore has no model, metrics or end.
    """

    egs: Path

    @property
    def model(self) -> torch.nn.Module:
        raise NotImplementedError

    @property
    def metrics(self) -> dict[str, Any]:
        raise NotImplementedError

    def _spec(self) -> TaskSpec:
        return SpeechTaskSpec(self.config, str(self.egs))

    def _kept_models(self, task: Task, schedule: Schedule) -> Sequence[int]:
        return ()

    def _finish(self, training: Training, end: Checkpoint) -> FinalReport:
        raise NotImplementedError


def train_run(config: RunConfig, egs: Path, make_worker: MakeWorker | None = None) -> None:
    """Train until the process is killed, with the services of the command line."""
    folder = RunFolder.create(config, to_yaml(config))
    check = FingerprintCheck.of_new_run(config, folder, allow_other_bits=False)
    services = services_of(config, quiet=True)

    def make_pool(request: PoolRequest) -> WorkerPool:
        pool = services.make_pool(request)
        assert isinstance(pool, ProcessPool)
        if make_worker is not None:
            pool.make_worker = make_worker
        return pool
    run = ArchiveRun(config, folder, replace(services, make_pool=make_pool), check, is_new=True)
    run.egs = egs
    run.train_only()


class Calls:
    """Seconds within the calls that the worker and the bare loop have in common."""

    seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which then adds its time."""
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = function(*args, **options)
            self.seconds += time.perf_counter() - began
            return found
        return call


class BareLoop:
    """Minibatches of a bare loop, which also adds its loss and the number of correct frames."""

    loss_sum, num_correct = 0.0, 0.0

    def minibatch(self, task: Task, model: torch.nn.Module, optimizer: SGD, batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model, batch.data)
        loss.total.backward()
        optimizer.step(num_samples=batch.num_examples)
        self.loss_sum += loss.total.item()
        self.num_correct += float(loss.num_correct)


def train_bare(config: RunConfig, egs: Path, log: Path, num_jobs: int) -> None:
    """The bare loop; writes a line after each job, and the parameters at the end."""
    torch.set_num_threads(1)
    task = SpeechTaskSpec(config, str(egs)).task(torch.device("cpu"))
    schedule = task.shards().schedule(config.schedule)
    model = seeded_model(task, config.seed)
    layout = FlatLayout.of(model)
    loop = BareLoop()
    with log.open("w") as file:
        for outer_iteration in schedule.outer_iterations():
            optimizer = make_optimizer(model, config.optimizer, outer_iteration.lr, outer_iteration.lr_factor)
            for batch in task.batches(outer_iteration.shards[0], config.schedule.minibatch_size,
                                      seed=(config.seed, outer_iteration.outer_iter, 0)):
                loop.minibatch(task, model, optimizer, batch)
            if outer_iteration.outer_iter + 1 == num_jobs:
                np.save(log.with_suffix(".npy"), layout.flatten(model.state_dict()))
            file.write(f"{outer_iteration.outer_iter}\n")
            file.flush()


# The parts of the cost in one run ----------------------------------------------------------------


class PairedWorker(Worker):
    """A worker that also trains minibatches of a bare loop, with the same model."""

    def __init__(self, spec: TaskSpec, index: int) -> None:
        super().__init__(spec, index)
        self.folder = Path(os.environ[_FOLDER])
        (self.folder / f"worker-{os.getpid()}").touch()
        self._snapshots_s: list[float] = []
        taken = self.snapshots.timer.taken

        def note(num_bytes: int, seconds: float) -> None:
            self._snapshots_s.append(seconds)
            np.save(self.folder / "snapshots.npy", np.array(self._snapshots_s))
            taken(num_bytes, seconds)
        # mypy rejects the assignment of a method
        setattr(self.snapshots.timer, "taken", note)  # noqa: B010
        self._calls = Calls()
        setattr(self.task, "loss", self._calls.timed(self.task.loss))  # noqa: B010
        setattr(self, "_loss", self.task.loss)  # noqa: B010
        setattr(torch.Tensor, "backward", self._calls.timed(torch.Tensor.backward))  # noqa: B010
        self._timed: SGD | None = None

    def train(self, job: Job, should_stop: Callable[[], bool] = never) -> Any:
        piece = job.pieces[0]
        read = itertools.chain.from_iterable(
            self.task.batches(piece.shard, self.settings.schedule.minibatch_size, seed=(self.settings.seed, 10_000 + number, 0))
            for number in itertools.count())
        times: list[tuple[float, float, int, float]] = []
        loop, calls = BareLoop(), self._calls
        began = time.perf_counter()

        def note(kind: int) -> None:
            nonlocal began
            now = time.perf_counter()
            times.append((began, now - began, kind, now - began - calls.seconds))
            calls.seconds = 0.0
            began = time.perf_counter()

        def bare(optimizer: SGD) -> None:
            position = len(times) % (2 * _BLOCK)
            note(WORKER if position else FIRST)
            if position == _BLOCK - 1:
                for number in range(_BLOCK):
                    loop.minibatch(self.task, self.model, optimizer, next(read))
                    note(BARE if number else FIRST)
        self._bare = bare
        trained = super().train(job, should_stop)
        np.save(self.folder / f"times-{job.outer_iter}.npy", np.array(times))
        return trained

    def _train(self, network: torch.nn.Module, batch: Batch | None, optimizer: SGD, *others: Any) -> None:
        # from the end of a minibatch to the end of the next one, with all that is between them
        if optimizer is not self._timed:
            self._timed = optimizer
            setattr(optimizer, "step", self._calls.timed(optimizer.step))  # noqa: B010
        super()._train(network, batch, optimizer, *others)
        self._bare(optimizer)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure the parts of the cost, and print them."""
    config = configured(options, folder)
    egs = prepared(folder, config, 2, options.frames)
    side = Side("ngsgd", own_command(options, folder, egs, "parts"))
    side.start(folder)
    stopped: list[tuple[float, float]] = []
    # (time, CPU time of the other processes) from the second job on
    cpu: list[tuple[float, float]] = []
    try:
        # in the second half of the jobs the coordinator is stopped for half of the time
        while (done := num_done(side, folder)) < options.jobs:
            time.sleep(_STOP_S)
            side.check(folder)
            workers = {int(path.name[7:]) for path in folder.glob("worker-*")}
            if done >= options.jobs // 2:
                began = time.perf_counter()
                side.signal(signal.SIGSTOP, without=workers)
                time.sleep(_STOP_S)
                stopped.append((began, time.perf_counter()))
                side.signal(signal.SIGCONT)
            elif done:
                cpu.append((time.perf_counter(), side.cpu_s(without=workers)))
    finally:
        side.end()
    (began, before), (ended, after) = cpu[0], cpu[-1]
    show_parts(folder, options, config, stopped, 100 * (after - before) / (ended - began))


def show_parts(folder: Path, options: argparse.Namespace, config: RunConfig, stopped: Sequence[tuple[float, float]],
               cpu_percent: float) -> None:
    half, period = options.jobs // 2, config.optimizer.update_period
    times = [np.load(folder / f"times-{job}.npy")[_WARM_UP:] for job in range(options.jobs)]
    # the first job starts with cold caches
    worker, bare = (np.concatenate([_of_kind(one, kind, period) for one in times[1:half]]) for kind in (WORKER, BARE))
    bare_ms = 1e3 * float(bare[:, COMPLETE].mean())
    loop = _difference(worker, bare, OUTSIDE)
    within_calls = _difference(worker, bare, INSIDE)
    later = np.concatenate([_of_kind(one, kind, period) for one in times[half:] for kind in (WORKER, BARE)])
    others = _while_running(later, stopped)
    events = [line for path in folder.glob("runs/*/events.jsonl") for line in read_json_lines(path)]
    gaps = [between(line) for line in events if line["event"] == "outer_iteration"][1:half]
    gap = 100 * statistics.median(gaps) / _JOB_S
    print(f"a bare minibatch takes {bare_ms:.2f} ms; load {os.getloadavg()[0]:.1f}")
    print(f"loop            {loop[0]:+.2f} % ({loop[1]:+.2f} to {loop[2]:+.2f}), {len(worker)} and {len(bare)} minibatches")
    print(f"  within calls  {within_calls[0]:+.2f} % ({within_calls[1]:+.2f} to {within_calls[2]:+.2f}), not part of the sum")
    print(f"other processes {others[0]:+.2f} % ({others[1]:+.2f} to {others[2]:+.2f}), {len(stopped)} stops")
    print(f"  CPU time      {cpu_percent:.2f} % of another core")
    print(f"between jobs    {gap:+.2f} % of a job of {_JOB_S:.0f} s: {1e3 * statistics.median(gaps):.0f} ms")
    snapshots = 100 * snapshots_s(folder, config.failure) / _JOB_S
    print(f"snapshots       {snapshots:+.2f} %")
    print(f"sum             {loop[0] + others[0] + gap + snapshots:+.2f} %")


def snapshots_s(folder: Path, failure: FailureConfig) -> float:
    """Seconds of the snapshots of a job of `_JOB_S`."""
    path = folder / "snapshots.npy"
    if not path.exists():
        return 0.0
    # the first one is slower, because its memory is new to the process
    seconds = float(np.median(np.load(path)[1:]))
    return seconds * (_JOB_S // max(failure.snapshot_interval_s, seconds / failure.snapshot_cost))


def _of_kind(times: NDArray[np.float64], kind: int, period: int) -> NDArray[np.float64]:
    """Rows of minibatches: start, seconds, class, seconds outside and inside of the common calls.

    Fisher estimates are updated in one class of `period` minibatches, whose minibatches take
    longer.
    """
    classes = (np.arange(len(times)) + _WARM_UP) % period
    rows: NDArray[np.float64] = np.column_stack([times[:, :2], classes, times[:, 3], times[:, 1] - times[:, 3]])
    chosen: NDArray[np.float64] = rows[times[:, 2] == kind]
    return chosen


def _difference(ones: NDArray[np.float64], others: NDArray[np.float64], column: int) -> tuple[float, float, float]:
    """Percent of a minibatch by which `ones` have more time in a column, and the interval of 95 %
    (bootstrap).

    Means of each class without the slowest percent, averaged over the classes: other programs and
    snapshots interrupt a few minibatches.
    """
    random = np.random.default_rng(0)

    def mean(rows: NDArray[np.float64], column: int) -> float:
        return float(np.mean([_without_slowest(rows[rows[:, 2] == one, column]) for one in classes]))
    classes = np.unique(others[:, 2])
    whole = mean(others, COMPLETE)
    found = [100 * (mean(a, column) - mean(b, column)) / whole
             for a, b in [(ones, others), *((_drawn(ones, random), _drawn(others, random)) for _ in range(_DRAWS))]]
    low, high = np.percentile(found[1:], [2.5, 97.5])
    return found[0], float(low), float(high)


def _without_slowest(values: NDArray[np.float64]) -> float:
    return float(values[values <= np.percentile(values, 99)].mean())


def _while_running(rows: NDArray[np.float64], stopped: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Percent by which the common calls take longer while the other processes run, and the interval
    of 95 %: medians over the stops, drawn with replacement.
    """
    ends = rows[:, 0] + rows[:, 1]
    medians = {one: float(np.median(rows[rows[:, 2] == one, INSIDE])) for one in np.unique(rows[:, 2])}
    relative = rows[:, INSIDE] / np.array([medians[one] for one in rows[:, 2]])

    def median(began: float, ended: float) -> float:
        inside = relative[(rows[:, 0] >= began) & (ends <= ended)]
        return float(np.median(inside)) if len(inside) else np.nan
    changes = []
    for (_, before), (began, ended), (after, _) in zip(stopped, stopped[1:], stopped[2:], strict=False):
        running = [median(before + _SETTLING_S, began), median(ended + _SETTLING_S, after)]
        changes.append(100 * (np.mean(running) / median(began + _SETTLING_S, ended) - 1))
    found = np.array(changes)[np.isfinite(changes)]
    draws = np.random.default_rng(0).choice(found, (_DRAWS, len(found)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(found)), float(low), float(high)


def _drawn(rows: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    return rows[random.integers(0, len(rows), len(rows))]


def between(event: dict[str, Any]) -> float:
    """Seconds of an outer iteration outside of the minibatches of its slowest job."""
    steps = sum(event[name] for name in ("compute_s", "average_s", "checkpoint_s", "diagnostics_s"))
    return float(steps - max(job["seconds"] for job in event["jobs"]))


# Pairs of processes -------------------------------------------------------------------------------


def measure_pairs(options: argparse.Namespace, folder: Path) -> None:
    """Compare `ngsgd train` with a bare process, and two bare processes with each other."""
    config = configured(options, folder)
    egs = prepared(folder, config, 2, options.frames)
    found: dict[str, list[float]] = {"ngsgd": [], "bare": []}
    for number in range(2 * options.pairs):
        name = "ngsgd" if number % 2 == 0 else "bare"
        here = folder / str(number)
        sides = [Side(name, own_command(options, here / "one", egs, "run" if name == "ngsgd" else "bare")),
                 Side("bare", own_command(options, here / "other", egs, "bare"))]
        try:
            for side, part in zip(sides, ("one", "other"), strict=True):
                (here / part).mkdir(parents=True)
                side.start(here / part)
            take_turns(sides, (here / "one", here / "other"), options)
        finally:
            for side in sides:
                side.end()
        one_s, other_s = (side.at[-1] - side.at[0] for side in sides)
        found[name].append(100 * (one_s / other_s - 1))
        same = ""
        if name == "ngsgd":
            same = ", bitwise identical" if is_equal(here, options, egs) else ", OTHER BITS"
        print(f"{name} and bare process: {found[name][-1]:+.2f} % wall time{same}", flush=True)
    for name, percent in found.items():
        print(f"{name} and bare process: median {statistics.median(percent):+.2f} %, {min(percent):+.2f} to {max(percent):+.2f}")


def take_turns(sides: Sequence[Side], folders: Sequence[Path], options: argparse.Namespace) -> None:
    """Let each side run alone for a turn, until both have ended all jobs."""
    # both start at once, and then wait for the other
    while not all(num_done(side, folder) for side, folder in zip(sides, folders, strict=True)):
        time.sleep(POLL_S)
        for side, folder in zip(sides, folders, strict=True):
            side.signal(signal.SIGSTOP if num_done(side, folder) else signal.SIGCONT)
            side.check(folder)
    for turn in itertools.count():
        if all(len(side.at) > options.jobs for side in sides):
            return
        side, folder = sides[turn % 2], folders[turn % 2]
        side.signal(signal.SIGCONT)
        began = time.perf_counter()
        before = side.active_s
        while (passed := time.perf_counter() - began) < TURN_S:
            time.sleep(POLL_S)
            side.active_s = before + passed
            while len(side.at) < num_done(side, folder):
                side.at.append(side.active_s)
        side.signal(signal.SIGSTOP)
        side.active_s = before + time.perf_counter() - began


def is_equal(folder: Path, options: argparse.Namespace, egs: Path) -> bool:
    """Compare the parameters of the bare process with those of the checkpoint."""
    from ngsgd.training.storage.checkpoint import CheckpointStore

    config = configured(options, folder / "one")
    task = SpeechTaskSpec(config, str(egs)).task(torch.device("cpu"))
    run = next((folder / "one").glob("runs/steady*"))
    found = CheckpointStore(run / "checkpoints", FlatLayout.of(seeded_model(task, config.seed)), 3).model_after(options.jobs - 1)
    expected = np.load(folder / "other" / "job.npy")
    return bool(found.tobytes() == expected.tobytes())


# Processes ----------------------------------------------------------------------------------------


@dataclass
class Side:
    """The processes of one variant, and the time of their turns at the end of each job."""

    name: str
    command: list[str]
    active_s: float = 0.0
    at: list[float] = field(default_factory=list)

    def start(self, folder: Path) -> None:
        with (folder / "output.log").open("w") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env={**os.environ, _FOLDER: str(folder)})

    def check(self, folder: Path) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended: {(folder / 'output.log').read_text()[-2000:]}")

    def _processes(self) -> list[int]:
        found = [self.process.pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(child) for child in path.read_text().split()]
        return found

    def signal(self, number: signal.Signals, without: Collection[int] = ()) -> None:
        for pid in set(self._processes()) - set(without):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cpu_s(self, without: Collection[int] = ()) -> float:
        """CPU time of the process and its children so far."""
        times = [psutil.Process(pid).cpu_times() for pid in set(self._processes()) - set(without)]
        return float(sum(one.user + one.system for one in times))

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


def own_command(options: argparse.Namespace, folder: Path, egs: Path, part: str) -> list[str]:
    return [sys.executable, __file__, "--frames", str(options.frames), "--jobs", str(options.jobs), "--folder", str(folder),
            "--egs", str(egs), "--part", part]


def num_done(side: Side, folder: Path) -> int:
    """Jobs that have ended."""
    if side.name == "bare":
        log = folder / "job.txt"
        return log.read_text().count("\n") if log.exists() else 0
    return sum(line["event"] == "committed" for path in folder.glob("runs/*/ledger.jsonl") for line in read_json_lines(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="measured jobs")
    parser.add_argument("--frames", type=int, default=300_000, help="frames of a job")
    parser.add_argument("--pairs", type=int, default=0, help="compare pairs of processes")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary files")
    parser.add_argument("--egs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        config = configured(options, options.folder)
        if options.part == "bare":
            train_bare(config, options.egs, options.folder / "job.txt", options.jobs)
        else:
            train_run(config, options.egs, PairedWorker if options.part == "parts" else None)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (measure_pairs if options.pairs else measure)(options, Path(folder))


if __name__ == "__main__":
    main()
