"""CPU time of the coordinator per outer iteration on 16 to 1000 pretended workers of a Ray cluster.

    python benchmarks/many_workers.py [--workers 16 64 256 1000] [--iterations 5] [--job-seconds 4]

The coordinator, its pool and Ray are real, and so are all messages. One actor answers as all
workers do, each on a separate machine: a job takes a random time without computing, its result
stays there, and the owners answer with the shards of the next model. Ray's own processes are not
part of the figures. `rendezvous` is the time in which as many members, threads of this process,
prove the secret and read the addresses of all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from ngsgd.cluster.exchange.authentication import new_secret
from ngsgd.cluster.exchange.collective import FetchRequest, RemoteResultRef, StepRequest, StepShard, shard_edges
from ngsgd.cluster.exchange.rendezvous import MemberStore, Rendezvous
from ngsgd.cluster.exchange.selection import WorkerDevice
from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.worker_process import Ready
from ngsgd.config import ClusterConfig, RunConfig
from ngsgd.launcher.ray.pool import RayPool, WorkerSlot
from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.task import TaskSpec
from ngsgd.training.validation.checksums import digest
from tests.toy import Recorder, Run, config

_FIRST_PROCESS = 1_000_000


class Workers:
    """All workers in one process; a job trains once, and its result is that of all jobs."""

    def __init__(self, job_s: float) -> None:
        self.job_s, self.num_done = job_s, 0
        self.result: JobResult | None = None

    async def prepare(self, index: int, spec: TaskSpec, _slot: int, num_threads: int, *_arguments: object, **_options: object
                      ) -> Ready:
        if not hasattr(self, "worker"):
            self.worker = make_worker(spec, 0)
        device = WorkerDevice(f"machine{index}", is_near=False)
        fingerprint = Fingerprint.of_this_process(num_threads, self.worker.device, spec.settings.cluster.precision, "")
        return Ready(_FIRST_PROCESS + index, fingerprint, device)

    async def run(self, index: int, job: Job, _places: object, _keep: object, _snapshots: object) -> tuple[JobResult, None]:
        await asyncio.sleep(self.job_s * random.uniform(0.5, 1.0))
        if self.result is None:
            self.result = self.worker.run(job)
        self.num_done += 1
        kept = RemoteResultRef(index, f"machine{index}/{_FIRST_PROCESS + index}", job.identity)
        return replace(self.result, job=job, worker=index, sent=kept), None

    async def activity(self, _index: int) -> None:
        """Nothing that is known."""

    async def minibatches(self, _index: int) -> int:
        self.num_done += 1
        return self.num_done

    async def answer(self, _index: int, question: StepRequest | FetchRequest, _step: object) -> object:
        assert self.result and isinstance(self.result.sent, LocalRef)
        vector = self.result.sent.vector
        if isinstance(question, FetchRequest):
            return vector
        # the mean of equal vectors
        edges = list(pairwise(shard_edges(len(vector), question.world_size)))[question.rank]
        shard = vector[slice(*edges)]
        return StepShard(question.generation, {"model": shard}, frozenset({digest(shard)}), digest(vector))


class Handle:
    """One of the workers, as the pool calls it."""

    def __init__(self, actor: Any, index: int) -> None:
        self._actor, self._index = actor, index

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        def options(num_returns: int = 1, concurrency_group: str = "") -> Any:
            return SimpleNamespace(remote=lambda *given, **named: method.options(num_returns=num_returns).remote(
                self._index, *given, **named))
        return SimpleNamespace(options=options, remote=options().remote)


class Pool(RayPool):
    """Its workers are those of one actor."""

    def __init__(self, run: Run, job_s: float) -> None:
        super().__init__(run.spec, 1, run.store.layout.size)
        self.actor: Any = ray.remote(num_cpus=0, max_concurrency=10_000)(Workers).remote(job_s)

    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> WorkerSlot:
        slot = WorkerSlot(index=index, actor=Handle(self.actor, index), deaths=list(deaths))
        self._prepare(slot)
        return slot

    def close(self) -> None:
        ray.kill(self.actor)
        self._slots = []
        super().close()


class Clocks(Recorder):
    """CPU and wall time at the end of each outer iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.times.append((time.process_time(), time.monotonic()))


def config_of(num_workers: int, num_iterations: int) -> RunConfig:
    base = config()
    # 12 shards are an epoch
    schedule = replace(base.schedule, num_jobs_initial=num_workers, num_jobs_final=num_workers,
                       num_epochs=num_iterations * num_workers / 12)
    return config(schedule=schedule, cluster=ClusterConfig("ray", num_workers=num_workers, threads_per_worker=1))


def measure(num_workers: int, num_iterations: int, job_s: float) -> tuple[float, float]:
    """CPU seconds of the coordinator, and seconds of the clock, of an outer iteration."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), config_of(num_workers, num_iterations))
        run.recorder = Clocks()
        run.train(Pool(run, job_s))
        assert not run.recorder.incidents
        spans = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(run.recorder.times)]
    cpu_s, wall_s = zip(*spans, strict=True)
    return statistics.median(cpu_s), statistics.median(wall_s)


def rendezvous_s(num_workers: int) -> tuple[float, float]:
    """Seconds of the clock, and CPU seconds of clients and server, until all know all addresses."""
    secret = new_secret()
    server = Rendezvous("127.0.0.1", secret)

    def join(rank: int) -> None:
        store = MemberStore("127.0.0.1", server.port, secret, 120.0, num_workers)
        store.set(f"0/{rank}", f"address {rank}".encode())
        for other in range(num_workers):
            store.get(f"0/{other}")
        store.close()
    began, cpu_s = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(num_workers) as threads:
        list(threads.map(join, range(num_workers)))
    server.close()
    return time.monotonic() - began, time.process_time() - cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--job-seconds", type=float, default=4.0)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    print("| workers | CPU s of the coordinator | s of an outer iteration | rendezvous, s | CPU s |\n"
          + "|---" * 5 + "|", flush=True)
    for num_workers in options.workers:
        cpu_s, wall_s = measure(num_workers, options.iterations, options.job_seconds)
        meeting_s, meeting_cpu_s = rendezvous_s(num_workers)
        print(f"| {num_workers} | {cpu_s:.2f} | {wall_s:.1f} | {meeting_s:.1f} | {meeting_cpu_s:.1f} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
