"""Cost of snapshots inside jobs, and the time that a killed worker costs with and without them.

    python -m benchmarks.job_snapshots cost [--rounds N] [--minibatches N]
    python -m benchmarks.job_snapshots snapshot [--rounds N] [--minibatches N]
    python -m benchmarks.job_snapshots recovery [--rounds N] [--minibatches N]

Synthetic frames, a network of 4 layers, NG-SGD, one thread.  `cost` runs the same job alternately
with and without snapshots in one process; CPU seconds do not contain the time of other programs.
`snapshot` does the same with a snapshot after every minibatch, which gives the time of one.
`recovery` runs a job in a worker process that ends by SIGKILL after 80 % of its minibatches, and
its retry on another worker process.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.cluster.exchange.shared_memory import SharedSnapshotStore
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, EgsConfig, FailureConfig, ModelConfig, RunConfig, ScheduleConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobFailure, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty

SIZE = 256    # minibatch
KILL_AFTER = 0.8


def frames(num_frames: int, seed: int) -> FrameSet:
    random = np.random.default_rng(seed)
    pdf = random.integers(0, 100, num_frames).astype(np.int32)
    offsets = np.append(np.arange(0, num_frames, 400), num_frames)
    return FrameSet(random.normal(size=(num_frames, 40)).astype(np.float32), pdf, offsets,
                    tuple(f"utt{u}" for u in range(len(offsets) - 1)))


def spec_of(folder: Path, num_minibatches: int, snapshots: Any) -> SpeechTaskSpec:
    """One job of `num_minibatches` minibatches over one archive."""
    config = RunConfig(
        egs=EgsConfig(left_context=4, right_context=4, frames_per_eg=1, samples_per_iter=num_minibatches * SIZE),
        model=ModelConfig(num_layers=4, hidden_dim=512),
        schedule=ScheduleConfig(minibatch_size=SIZE, num_jobs_initial=1, num_jobs_final=1),
        cluster=ClusterConfig(num_workers=2, threads_per_worker=1), failure=FailureConfig(snapshots=snapshots))
    egs = prepare_archives(frames(num_minibatches * SIZE, 1), frames(2000, 2), config.egs, num_classes=100,
                           digest="snapshots", cache_root=folder)
    return SpeechTaskSpec(config, str(egs))


def job_for(worker: Worker) -> Job:
    start = worker.layout.flatten(worker.model.state_dict())
    return Job(0, 0, 1, (WorkItem(Shard(0, 0), 0, 0),), JobInit(LocalRef(start)), lr=1e-4, lr_factor=1.0)


@dataclass(frozen=True)
class Mortal:
    """Makes workers that end by SIGKILL in the first attempt at a job; 0: they do not."""

    ends_after: int

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        return _MortalWorker(spec, index, self.ends_after)


class _MortalWorker(Worker):
    def __init__(self, spec: TaskSpec, index: int, ends_after: int) -> None:
        super().__init__(spec, index)
        self.ends_after, self.left = ends_after, -1

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        self.left = self.ends_after if job.attempt == 1 else -1
        return super().run(job, place, should_stop)

    def _train(self, *arguments: Any) -> None:
        super()._train(*arguments)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def cost(folder: Path, rounds: int, num_minibatches: int) -> None:
    """Print the ratio of CPU and wall seconds of a job with snapshots to one without."""
    torch.set_num_threads(1)
    worker = Worker(spec_of(folder, num_minibatches, "auto"), 0)
    job, store = job_for(worker), SharedSnapshotStore()
    # warms up
    digest = worker.run(job).digest
    ratios = []
    for number in range(2 * rounds):
        used = {}
        for has_snapshots in ((True, False) if number % 2 else (False, True)):
            memory = store.allocate() if has_snapshots else None
            worker.snapshots.memory = memory
            began = time.process_time(), time.perf_counter()
            assert worker.run(job).digest == digest
            used[has_snapshots] = time.process_time() - began[0], time.perf_counter() - began[1]
            if memory is not None:
                newest = store.newest(memory)
                store.release(memory)
        ratios.append((used[True][0] / used[False][0], used[True][1] / used[False][1]))
        timer = worker.snapshots.timer
        print(f"CPU {used[True][0]:.2f} and {used[False][0]:.2f} s, wall {used[True][1]:.2f} and {used[False][1]:.2f} s, last "
              f"snapshot at {newest} of {num_minibatches}: {timer.num_bytes / 1e6:.1f} MB in "
              f"{1e3 * timer.num_bytes / timer.bytes_per_s:.1f} ms", flush=True)
    for name, values in zip(("CPU", "wall"), zip(*ratios, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"ratio of {name} seconds: {middle:.4f} (quartiles {low:.4f} to {high:.4f} of {len(values)} pairs)")


def one_snapshot(folder: Path, rounds: int, num_minibatches: int) -> None:
    """Print the CPU milliseconds of a snapshot: the difference per minibatch of two jobs."""
    torch.set_num_threads(1)
    worker = Worker(spec_of(folder, num_minibatches, "on"), 0)
    worker.snapshots.timer.interval_s, worker.snapshots.timer.max_cost = 0.0, math.inf
    job, store = job_for(worker), SharedSnapshotStore()
    worker.run(job)
    milliseconds = []
    for _ in range(rounds):
        used = []
        for memory in (store.allocate(), None):
            worker.snapshots.memory = memory
            began = time.process_time()
            worker.run(job)
            used.append(time.process_time() - began)
            if memory is not None:
                assert store.newest(memory) == num_minibatches - 1
                store.release(memory)
        milliseconds.append(1e3 * (used[0] - used[1]) / (num_minibatches - 1))
        print(f"{used[0]:.2f} and {used[1]:.2f} s of CPU, {milliseconds[-1]:.2f} ms per snapshot of "
              f"{worker.snapshots.timer.num_bytes / 1e6:.1f} MB", flush=True)
    middle = statistics.median(milliseconds)
    print(f"{middle:.2f} ms per snapshot (median; {min(milliseconds):.2f} to {max(milliseconds):.2f}): "
          f"{middle / 5e3:.3%} of a job with one every 5 s")


def seconds_to_result(pool: ProcessPool, job: Job) -> tuple[float, JobResult]:
    """Wall seconds of a job with its retry."""
    began = time.perf_counter()
    pool.submit(job)
    while True:
        outcome = pool.wait(1.0)
        if isinstance(outcome, JobFailure):
            pool.submit(replace(job, attempt=job.attempt + 1))
        elif outcome is not None:
            return time.perf_counter() - began, outcome


def recovery(folder: Path, rounds: int, num_minibatches: int) -> None:
    """Print the seconds that a worker costs that is killed after KILL_AFTER of its job."""
    variants = {"no fault": ("off", 0), "snapshots": ("auto", int(KILL_AFTER * num_minibatches)),
                "no snapshots": ("off", int(KILL_AFTER * num_minibatches))}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    digests = set()
    job = job_for(Worker(spec_of(folder, num_minibatches, "off"), 0))
    for _ in range(rounds):
        for name, (snapshots, ends_after) in variants.items():
            spec = spec_of(folder, num_minibatches, snapshots)
            pool = ProcessPool(spec, 2, 1, len(job.start.model.read()), make_worker=Mortal(ends_after))
            try:
                pool.start()
                taken, result = seconds_to_result(pool, job)
            finally:
                pool.close()
            seconds[name].append(taken)
            digests.add(result.digest)
            print(f"{name}: {taken:.2f} s, continued at minibatch {result.continued_at} of {num_minibatches}", flush=True)
    assert len(digests) == 1
    for name in ("snapshots", "no snapshots"):
        lost = [with_fault - without for with_fault, without in zip(seconds[name], seconds["no fault"], strict=True)]
        print(f"{name}: a killed worker costs {statistics.median(lost):.2f} s (median; {min(lost):.2f} to {max(lost):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "snapshot", "recovery"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=1000)
    arguments = parser.parse_args()
    functions = {"cost": cost, "snapshot": one_snapshot, "recovery": recovery}
    with tempfile.TemporaryDirectory() as folder:
        functions[arguments.what](Path(folder), arguments.rounds, arguments.minibatches)


if __name__ == "__main__":
    # classes of this file are sent to other processes under its name
    from benchmarks import job_snapshots

    job_snapshots.main()
