"""Measurements of this machine for the planner: small outer iterations with the jobs of the run.

Worker processes run real jobs, shortened if necessary, with the work of the coordinator between
them. Settings are interleaved, so that temporary load affects all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.cluster.fork_server import ForkedProcess, fork_server, modules_of
from ngsgd.cluster.process import configure_process
from ngsgd.config import RunConfig
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.optim.outer import OuterInfo, OuterOptimizer, make_rule
from ngsgd.planning.planner import Link, Machine, Speed, Workload, slots_of, split_spread, threads_of
from ngsgd.schedules import Shard
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.planning import Progress
from ngsgd.training.storage.checkpoint import CheckpointStore
from ngsgd.training.task import Task, TaskSpec, seeded_model
from ngsgd.training.worker import Worker

# maximum number of processes of the probe; machines with more cores are extrapolated
_MAX_PROCESSES = 64
# with up to half as many cores, two workers per core are measured as well
_MAX_SHARED = 16
_MIN_LIMIT_S = 0.5
# minimum repetitions of every setting, regardless of time
_MIN_CYCLES = 3
# intended repetitions
_CYCLES = 4
_ECHOES = 5
# shards whose mean length is used for all
_MAX_SHARDS = 1000
# minibatches at the start of a job with a Fisher update each
_WARM = 11
# seconds for a killed process to end
_END_S = 5.0
# minibatches between two readings of the clock: a multiple of the default update period, 4
_MARK = 8


@dataclass(frozen=True)
class ProcessLayout:
    """Concurrent worker processes, and the threads of each."""

    num_processes: int
    num_threads: int


@dataclass(frozen=True)
class _Round:
    jobs: tuple[JobTiming, ...]
    average_s: float
    checkpoint_s: float
    diagnostics_s: float


def measure(spec: TaskSpec, config: RunConfig, *, num_cores: int, seconds: float, scratch: Path) -> tuple[Machine, Workload]:
    """Measure the machine in about `seconds`, including the start of the processes.

    `scratch` is a folder for test checkpoints. Raises ClusterError if a worker died or did not
    start, and the NgsgdError of a worker.
    """
    deadline = time.monotonic() + seconds
    coordinator = ProbeCoordinator(config, spec.task(torch.device("cpu")), scratch, num_cores)
    num_gpus = torch.cuda.device_count() if config.cluster.device != "cpu" else 0
    settings = settings_to_measure(config, num_cores=num_cores, num_gpus=num_gpus)
    most = settings[-1]
    with workers(spec, most.num_processes, num_gpus) as processes:
        limit_s = max(_MIN_LIMIT_S, (deadline - time.monotonic()) / (len(settings) * (_CYCLES + 1)))
        # the first jobs of the workers differ from later ones
        coordinator.round(processes, most, limit_s)
        link = _link(processes[0], coordinator.start)
        rounds: dict[ProcessLayout, list[_Round]] = defaultdict(list)
        while time.monotonic() < deadline or len(rounds[most]) < _MIN_CYCLES:
            for setting in settings:
                rounds[setting].append(coordinator.round(processes, setting, limit_s))
    grid = coordinator.task.shards()
    shards = itertools.product(range(grid.num_archives), range(grid.shards_per_archive))
    # minibatches of one example are examples
    samples = statistics.fmean(coordinator.task.num_batches(Shard(*one), 1)
                               for one in itertools.islice(shards, _MAX_SHARDS))
    total = samples * grid.num_archives * grid.shards_per_archive * config.schedule.num_epochs
    workload = Workload(samples, config.schedule.minibatch_size, 4 * coordinator.layout.size, total)
    return _summary(num_cores, num_gpus, rounds, link, workload), workload


def settings_to_measure(config: RunConfig, *, num_cores: int, num_gpus: int) -> list[ProcessLayout]:
    """1, 2, 4 ... workers up to one per core (or GPU), with default threads, and a single worker.

    With few cores, also two workers per core: the loss by sharing cannot be extrapolated.
    """
    fixed = config.cluster.threads_per_worker
    most = min(slots_of(fixed or 1, num_cores=num_cores, num_gpus=num_gpus), _MAX_PROCESSES)
    counts = sorted({*(2 ** power for power in range(most.bit_length())), most, *([2 * most] if 2 * most <= _MAX_SHARED else [])})
    settings = [ProcessLayout(count, fixed or threads_of(num_cores, count)) for count in counts]
    return list(dict.fromkeys([ProcessLayout(1, fixed or 1), *settings]))


def fullest(settings: Sequence[ProcessLayout], *, num_cores: int, num_gpus: int) -> ProcessLayout:
    """The largest number of workers that do not share cores."""
    return max((s for s in settings if s.num_processes <= slots_of(s.num_threads, num_cores=num_cores, num_gpus=num_gpus)),
               key=lambda s: s.num_processes)


class ProbeCoordinator:
    """Assigns jobs and processes their results like the coordinator of a run."""

    def __init__(self, config: RunConfig, task: Task, scratch: Path, num_cores: int) -> None:
        self.config, self.task = config, task
        self.model = seeded_model(task, config.seed).eval()
        self.layout = FlatLayout.of(self.model)
        self.start = self.layout.flatten(self.model.state_dict())
        self.outer = OuterOptimizer(make_rule(config.outer), self.start, ema_decay=config.outer.ema_decay, num_threads=num_cores)
        self.store = CheckpointStore(scratch, self.layout, config.checkpoint.num_to_keep)
        self.num_rounds = 0
        # a growing model is complete by then
        self.first_outer_iter = task.shards().schedule(config.schedule).num_outer_iters

    def round(self, processes: Sequence[Process], setting: ProcessLayout, limit_s: float) -> _Round:
        active = processes[:setting.num_processes]
        for index, worker in enumerate(active):
            worker.send(TimedJob(self.make_job(index, len(active)), setting.num_threads, limit_s))
        jobs: tuple[JobTiming, ...] = tuple(worker.receive() for worker in active)
        torch.set_num_threads(setting.num_threads)
        last = time.perf_counter()

        def lap() -> float:
            nonlocal last
            before, last = last, time.perf_counter()
            return last - before
        self.outer.step([job.parameters for job in jobs], [1.0] * len(jobs),
                        OuterInfo(self.num_rounds, self.num_rounds + 1, len(jobs), self.config.schedule.lr_initial))
        average_s = lap()
        self.store.save(Progress(self.num_rounds), self.outer.state_dict())
        checkpoint_s = lap()
        self.layout.load(self.model, self.outer.eval_model())
        with torch.no_grad():
            self.task.evaluate(self.model)
        self.layout.relative_change(self.start, self.outer.eval_model())
        self.num_rounds += 1
        return _Round(jobs, average_s, checkpoint_s, lap())

    def make_job(self, index: int, num_jobs: int) -> Job:
        """The next shard, trained from the initial model: the result is not used."""
        grid = self.task.shards()
        passes = self.num_rounds * num_jobs + index
        shard = Shard(passes % grid.num_archives, passes % grid.shards_per_archive)
        outer_iter = self.first_outer_iter + self.num_rounds
        return Job(outer_iter=outer_iter, job=index, attempt=1, pieces=(WorkItem(shard, outer_iter, index),),
                   start=JobInit(LocalRef(self.start)), lr=self.config.schedule.lr_initial, lr_factor=1.0)


def _link(worker: Process, vector: Vector) -> Link:
    """Latency and bandwidth between this process and a worker; the speed of adding is set later."""
    def echo_s(what: Vector) -> float:
        times = []
        for _ in range(_ECHOES):
            began = time.perf_counter()
            worker.send(what)
            worker.receive()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    latency_s = echo_s(vector[:1]) / 2
    return Link(bandwidth=vector.nbytes / max(echo_s(vector) / 2 - latency_s, 1e-9), latency_s=latency_s, add_speed=1.0)


def _summary(num_cores: int, num_gpus: int, rounds: dict[ProcessLayout, list[_Round]], link: Link, workload: Workload) -> Machine:
    speeds = {setting: _speed(setting, found, workload, slots_of(setting.num_threads, num_cores=num_cores, num_gpus=num_gpus))
              for setting, found in rounds.items()}
    full = fullest(list(speeds), num_cores=num_cores, num_gpus=num_gpus)
    fewest = min(setting.num_threads for setting in speeds)
    # parallel only if a run of one worker would use that number of threads
    alone = max((s for s in speeds if s.num_processes == 1), key=lambda setting: setting.num_threads)
    parallel = [s for s in speeds if s.num_processes > 1 or s == alone]
    serial = [s for s in speeds if s == alone or (s.num_processes == 1 and s.num_threads == fewest)]
    average_s = statistics.median(one.average_s for one in rounds[full])
    minibatches = statistics.fmean(job.num_minibatches for one in rounds[full] for job in one.jobs)
    return Machine(
        num_cores=num_cores, num_gpus=num_gpus,
        parallel=tuple(speeds[s] for s in sorted(parallel, key=lambda s: s.num_processes)),
        serial=tuple(speeds[s] for s in sorted(serial, key=lambda s: s.num_threads)),
        spread=split_spread([[job.step_s for job in one.jobs] for one in rounds[full]], minibatches),
        link=Link(link.bandwidth, link.latency_s, full.num_processes * workload.model_bytes / max(average_s, 1e-9)),
        checkpoint_s=statistics.median(one.checkpoint_s for found in rounds.values() for one in found))


def _speed(setting: ProcessLayout, rounds: Sequence[_Round], workload: Workload, num_slots: int) -> Speed:
    """Medians over rounds of means over workers; of workers that share cores, of the last one."""
    turns = max(1.0, setting.num_processes / num_slots)
    over_workers = statistics.fmean if turns == 1.0 else max
    step_s = statistics.median(over_workers([job.step_s for job in one.jobs]) for one in rounds) / turns
    fixed_s = statistics.median(over_workers([job.fixed_s for job in one.jobs]) for one in rounds) / turns
    return Speed(setting.num_processes, setting.num_threads, rate=workload.minibatch_size / step_s, fixed_s=fixed_s,
                 diagnostics_s=statistics.median(one.diagnostics_s for one in rounds))


@dataclass(frozen=True)
class TimedJob:
    job: Job
    num_threads: int
    limit_s: float


@dataclass(frozen=True)
class JobTiming:
    """Timing of a job."""

    seconds: float           # total
    step_s: float  # per minibatch after the first eleven
    fixed_s: float  # time of a job besides its steps
    num_minibatches: int
    parameters: Vector


class Process:
    """Handle of a worker process."""

    def __init__(self, process: ForkedProcess, connection: Connection, timeout_s: float) -> None:
        self.process, self.connection, self.timeout_s = process, connection, timeout_s

    def send(self, message: object) -> None:
        # it is gone, which `receive` reports
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the answer of the process; raise its exception."""
        try:
            if not self.connection.poll(self.timeout_s):
                raise ClusterError("a worker of the probe did not answer within "
                                   f"cluster.wait_for_workers_s = {self.timeout_s:g}; raise the timeout.")
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            how = self.process.failure or f"ended with code {self.process.exit_code(1.0)}"
            raise ClusterError(f"a worker of the probe {how}; "
                               "check the free memory, or use a smaller model.") from error
        if isinstance(answer, NgsgdError):
            raise answer
        if isinstance(answer, Exception):
            raise ClusterError(f"a worker of the probe failed ({type(answer).__name__}: {answer}); "
                               "check that `ngsgd train cluster=in_process` runs.") from answer
        return answer


@contextlib.contextmanager
def workers(spec: TaskSpec, count: int, num_gpus: int) -> Iterator[list[Process]]:
    """Start `count` processes that are ready for jobs; they end with the context."""
    started = []
    try:
        for index in range(count):
            ours, theirs = multiprocessing.Pipe()
            process = fork_server().launch(serve, (theirs, spec, index, num_gpus), theirs, f"ngsgd probe {index}",
                                           [__name__, *modules_of(spec)])
            started.append(Process(process, ours, spec.settings.cluster.wait_for_workers_s))
        for worker in started:
            worker.receive()
        yield started
    finally:
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.process.exit_code(_END_S)
            worker.connection.close()


def serve(connection: Connection, spec: TaskSpec, index: int, num_gpus: int) -> None:
    """Run tasks and echo vectors in the worker process until the connection is closed."""
    try:
        if num_gpus:
            torch.cuda.set_device(index % num_gpus)
        worker = Worker(spec, index)
        connection.send("ready")
        while True:
            message = connection.recv()
            connection.send(timed(worker, message) if isinstance(message, TimedJob) else message)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send(error)


def timed(worker: Worker, task: TimedJob) -> JobTiming:
    configure_process(task.num_threads)
    watch = Watch(time.perf_counter() + task.limit_s, uses_gpu=worker.device.type == "cuda")
    began = time.perf_counter()
    result = worker.run(task.job, should_stop=watch)
    seconds = time.perf_counter() - began
    step_s = watch.step_s(seconds, result.num_minibatches)
    fixed_s = max(0.0, seconds - step_s * result.num_minibatches)
    return JobTiming(seconds, step_s, fixed_s, result.num_minibatches, np.array(result.sent.read()))


class Watch:
    """A stop signal at a given time that also records when minibatches were done."""

    def __init__(self, deadline: float, *, uses_gpu: bool) -> None:
        self.deadline, self.uses_gpu = deadline, uses_gpu
        self.num_asked = 0
        self.marks: list[tuple[int, float]] = []  # (minibatches done, time)

    def __call__(self) -> bool:
        self.num_asked += 1
        if self.num_asked < _WARM or (self.num_asked - _WARM) % _MARK:
            return False
        if self.uses_gpu:
            # operations are queued ahead of the GPU
            torch.cuda.synchronize()
        self.marks.append((self.num_asked, time.perf_counter()))
        return self.marks[-1][1] > self.deadline and len(self.marks) > 1

    def step_s(self, seconds: float, num_minibatches: int) -> float:
        """Seconds per minibatch after the first eleven; for a short job, its mean."""
        if len(self.marks) < 2:
            return seconds / num_minibatches
        (first, start), (last, end) = self.marks[0], self.marks[-1]
        return (end - start) / (last - first)
