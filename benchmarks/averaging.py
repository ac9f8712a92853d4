"""Cost of averaging on one machine, compared with gloo, torchft, PyTorch and Ray's object store,
and the effect of overlap.

    python benchmarks/averaging.py planes [--millions 10 50] [--workers 2 4 8] [--rounds 15]
    python benchmarks/averaging.py local [--millions 10 50] [--ranks 2 4] [--rounds 15]
    python benchmarks/averaging.py overlap [--rounds 3] [--frames 30000]

`planes`: a round starts when every worker has its result in its model and ends when every worker
has the new model in its model. Steps of ngsgd: copy to shared memory, checksum and NaN check in the
worker, checksum in the coordinator, weighted float64 mean, outer step, NaN check, publication,
loading. The object store is the path to a worker on another machine, with the same checks. Steps of
gloo: copy to a buffer, all_reduce, loading. Steps of torchft: `LocalSGD.sync`, which is a quorum,
an all_reduce per parameter tensor, a vote, and loading. gloo and torchft check nothing and take no
outer step. All methods run interleaved in the same Ray actors with one thread each; the coordinator
averages with a thread per core.

`local`: `ngsgd.LocalSGD`, torchft's LocalSGD and DiLoCo, and PyTorch's PostLocalSGD in processes
over gloo, one thread each, interleaved.  A round goes from one barrier to the next.  Rules of one
kind share processes: averages, then DiLoCo.

`overlap`: two worker processes, a network of 10 M parameters.  Measured is the fraction of wall
time that a worker spends outside its minibatches, with and without `outer.overlap`, between the end
of the first outer iteration and the end of the last but one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from ngsgd.cluster.exchange import collective
from ngsgd.cluster.exchange.collective import GroupFailure, StepRequest, StepShard
from ngsgd.cluster.exchange.collective_client import Exchange, remote
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedVectors
from ngsgd.cluster.local_sgd import LocalSGD
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, EgsConfig, ModelConfig, OuterConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.models import build_model
from ngsgd.optim.outer import Average, Bmuf, OuterInfo, OuterOptimizer, OuterRule
from ngsgd.schedules import Schedule
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.coordinator import Coordinator, RunStorage
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, Outcome, VectorRef
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import Trackers
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import CheckpointStore, first_checkpoint
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.checksums import digest, is_finite, not_finite

_WIDTH = 1000          # side of the square layers of the model
_HOST = "127.0.0.1"
_MB = 1e6


def square_layers(millions: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(millions)))


class PeakMemory(AbstractContextManager["PeakMemory"]):
    """Growth of the private memory of this process, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    @property
    def rise_mb(self) -> float:
        return (self.peak - self.start) / _MB

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise AssertionError("this kernel does not report private memory")


class Member:
    """A worker: a model, and the worker's part of a round of each method."""

    def __init__(self, rank: int, millions: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank = rank
        self.model = square_layers(millions)
        self.layout = FlatLayout.of(self.model)
        self.pieces = self.layout.fragment(0, 1)
        self.member = collective.CollectiveWorker(rank, self.layout, torch.device("cpu"))

    def shared(self, model: SharedRef, place: SharedRef) -> tuple[int, str]:
        self.layout.load(self.model, model.read())
        sent = self.layout.flatten(self.model.state_dict(), place.read())
        return digest(sent), not_finite(sent, self.layout, self.pieces)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def stored(self, model: Vector) -> tuple[tuple[int, str], Vector]:
        self.layout.load(self.model, model)
        sent = self.layout.flatten(self.model.state_dict())
        return (digest(sent), not_finite(sent, self.layout, self.pieces)), sent

    def kept(self, model: VectorRef, rank: int) -> JobResult:
        """Keep the result here; `answer` takes the outer step with the others."""
        self.layout.load(self.model, model.read())
        sent = self.layout.flatten(self.model.state_dict())
        trouble = not_finite(sent, self.layout, self.pieces)
        job = Job(0, rank, 1, (), JobInit(model), 0.01, 1.0)
        self.member.make_room(job)
        result = JobResult(job, rank, LocalRef(sent), digest(sent), 1 + rank, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0,
                           rejection_reason=trouble)
        return self.member.keep(result)

    def answer(self, order: StepRequest) -> StepShard | GroupFailure:
        return self.member.step(order)

    def collective(self, model: VectorRef, rank: int, order: StepRequest) -> None:
        self.kept(model, rank)
        self.answer(order)

    def join_gloo(self, port: int, world_size: int) -> None:
        self.buffer = torch.empty(self.layout.size)
        store = TCPStore(_HOST, port, is_master=False)
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=self.rank, world_size=world_size)

    def gloo(self) -> None:
        self.layout.flatten(self.model.state_dict(), self.buffer.numpy())
        dist.all_reduce(self.buffer)
        self.buffer /= dist.get_world_size()
        self.layout.load(self.model, self.buffer.numpy())

    def join_torchft(self, lighthouse: str, world_size: int) -> None:
        from torchft.local_sgd import LocalSGD
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo
        self.own_store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(ProcessGroupGloo(timeout=timedelta(seconds=60)), None, None, world_size, use_async_quorum=False,
                               rank=0, world_size=1, store_addr=_HOST, store_port=self.own_store.port,
                               lighthouse_addr=lighthouse, replica_id=f"worker{self.rank}", hostname=_HOST,
                               # all start with the same model, so no rank has to catch up
                               init_sync=False)
        self.local_sgd = LocalSGD(self.manager, self.model, torch.optim.SGD(self.model.parameters(), 0.1), 1)

    def torchft(self) -> None:
        with torch.no_grad():
            self.local_sgd.sync()

    def count(self, method: str, *arguments: Any) -> float:
        """Megabytes of private memory that a round of a method needs in addition to the model."""
        with PeakMemory() as memory:
            getattr(self, method)(*arguments)
        return memory.rise_mb

    def first(self) -> float:
        return float(next(self.model.parameters()).flatten()[0])


_RemoteMember: Any = ray.remote(num_cpus=0)(Member)


class Planes:
    """The coordinator's part of each method."""

    def __init__(self, num_workers: int, millions: int) -> None:
        self.members = [_RemoteMember.remote(rank, millions) for rank in range(num_workers)]
        torch.manual_seed(0)
        model = square_layers(millions)
        layout = FlatLayout.of(model)
        self.size = layout.size
        self.weights = [1.0 + rank for rank in range(num_workers)]
        self.start = layout.flatten(model.state_dict())
        self.vectors = SharedVectors(layout.size)
        self.places = [self.vectors.allocate() for _ in self.members]
        self.model = self.vectors.allocate()
        np.copyto(self.model.read(), self.start)
        self.stored_model = ray.put(self.model.read())
        self.optimizers: dict[str, OuterOptimizer] = {}

    def ours(self, rule: OuterRule) -> Callable[[], None]:
        optimizer = self._optimizer(rule)

        def one_round() -> None:
            waiting = {member.shared.remote(self.model, place): place
                       for member, place in zip(self.members, self.places, strict=True)}
            while waiting:  # in order of arrival, while the other workers still run
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                self._check(ray.get(done), waiting.pop(done).read())
            self._step(optimizer, [place.read() for place in self.places], self.weights)
        return one_round

    def collective(self, rule: OuterRule) -> Callable[[], None]:
        optimizer = self._optimizer(rule)
        self.exchange = Exchange(_HOST, 60.0)
        starts: list[VectorRef] = [self.model] * len(self.members)

        def ask(orders: Mapping[int, StepRequest], *_: object) -> dict[int, object]:
            self.orders = orders
            return dict(zip(orders, ray.get([self.members[worker].answer.remote(order) for worker, order in orders.items()]),
                            strict=True))

        def one_round() -> None:
            self.starts = list(starts)
            results = ray.get([member.kept.remote(starts[rank], rank) for rank, member in enumerate(self.members)])
            refs = [remote(result, lambda kept: self.start) for result in results]
            assert self.exchange.step(optimizer, refs, self.weights, OuterInfo(10, 1000, len(refs), 0.01), ask, lambda kept: None)
            self._publish(optimizer)
            name = digest(self.model.read())
            starts[:] = [self.exchange.start_of((rank, one.sent.process), self.model, name) for rank, one in enumerate(results)]
        return one_round

    def object_store(self, rule: OuterRule) -> Callable[[], None]:
        optimizer = self._optimizer(rule)

        def one_round() -> None:
            refs = [member.stored.remote(self.stored_model) for member in self.members]
            vectors = []
            for said, sent in refs:
                vectors.append(ray.get(sent))
                self._check(ray.get(said), vectors[-1])
            self._step(optimizer, vectors, self.weights)
            self.stored_model = ray.put(self.model.read())
        return one_round

    def gloo(self) -> Callable[[], None]:
        self.store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        ray.get([member.join_gloo.remote(self.store.port, len(self.members)) for member in self.members])
        return lambda: ray.get([member.gloo.remote() for member in self.members])

    def torchft(self) -> Callable[[], None]:
        from torchft.coordination import LighthouseServer
        self.lighthouse = LighthouseServer(bind=f"{_HOST}:0", min_replicas=len(self.members), join_timeout_ms=60000)
        port = self.lighthouse.address().rpartition(":")[2]
        ray.get([member.join_torchft.remote(f"http://{_HOST}:{port}", len(self.members)) for member in self.members])
        return lambda: ray.get([member.torchft.remote() for member in self.members])

    def worker_mb(self, plane: str) -> float:
        arguments: dict[str, list[Any]] = {
            "shared": [(self.model, place) for place in self.places],
            "stored": [(self.stored_model,)] * len(self.members),
            "collective": [(self.starts[rank], rank, self.orders[rank]) for rank in range(len(self.members))]}
        calls = arguments.get(plane, [()] * len(self.members))
        return float(max(ray.get([member.count.remote(plane, *call) for member, call in zip(self.members, calls, strict=True)])))

    def close(self) -> None:
        for member in self.members:
            ray.kill(member)
        self.vectors.close()

    def _optimizer(self, rule: OuterRule) -> OuterOptimizer:
        return OuterOptimizer(rule, self.start, num_threads=os.cpu_count() or 1)

    def _check(self, said: tuple[int, str], vector: Vector) -> None:
        assert said == (digest(vector), ""), "a vector was damaged"

    def _step(self, optimizer: OuterOptimizer, vectors: Sequence[Vector], weights: list[float]) -> None:
        optimizer.step(vectors, weights, OuterInfo(10, 1000, len(vectors), 0.01))
        self._publish(optimizer)

    def _publish(self, optimizer: OuterOptimizer) -> None:
        assert is_finite(optimizer.eval_model())
        optimizer.broadcast(self.model.read())


# models through sockets per worker and round; twice for the object store if workers are on other
# machines
_THROUGH_SOCKETS: dict[str, Callable[[int], str]] = {
    "ours, average": lambda n: "0", "ours, BMUF": lambda n: "0", "object store": lambda n: "0 (2)",
    "collective": lambda n: f"{2 * (n - 1) / n + 1 / n:.2f}",
    "gloo": lambda n: f"{2 * (n - 1) / n:.2f}", "torchft": lambda n: f"{2 * (n - 1) / n:.2f}"}
_METHOD = {"collective": "collective", "ours, average": "shared", "ours, BMUF": "shared", "object store": "stored"}


def measure(num_workers: int, millions: int, rounds: int) -> None:
    """Print a row per method."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False,
             object_store_memory=(num_workers + 4) * millions * 4_100_000 + 200_000_000)
    planes = Planes(num_workers, millions)
    run = {"ours, average": planes.ours(Average()), "ours, BMUF": planes.ours(Bmuf(2.0)),
           "object store": planes.object_store(Average()), "collective": planes.collective(Average()),
           "gloo": planes.gloo(), "torchft": planes.torchft()}
    milliseconds: dict[str, list[float]] = {plane: [] for plane in run}
    names = list(run)
    for number in range(rounds + 2):
        for plane in names[number % len(names):] + names[:number % len(names)]:
            began = time.perf_counter()
            run[plane]()
            if number >= 2:  # pages are mapped and connections open
                milliseconds[plane].append(1e3 * (time.perf_counter() - began))
    for plane in names:
        with PeakMemory() as memory:
            run[plane]()
        worker_mb = planes.worker_mb(_METHOD.get(plane, plane)) + (planes.size * 4 / _MB if plane == "gloo" else 0.0)
        times = milliseconds[plane]
        ratios = [ours / theirs for ours, theirs in zip(milliseconds["ours, average"], times, strict=True)]
        print(f"| {millions} M | {num_workers} | {plane} | {statistics.median(times):.0f} ({min(times):.0f}) | "
              f"{statistics.median(ratios):.2f} | {_THROUGH_SOCKETS[plane](num_workers)} | "
              f"{memory.rise_mb * _MB / (4 * planes.size):.2f} | {worker_mb * _MB / (4 * planes.size):.2f} |", flush=True)
    planes.close()
    ray.shutdown()


def measure_planes(options: argparse.Namespace) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RUST_LOG", "error")  # torchft writes eight long lines per round
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    print("| parameters | workers | method | ms, median (min) | ratio | models through sockets per worker | "
          "coordinator's memory, models | a worker's |\n" + "|---" * 8 + "|")
    for millions in options.millions:
        for num_workers in options.workers:
            measure(num_workers, millions, options.rounds)


# Custom loops -------------------------------------------------------------------------------------


class LocalRank:
    """A process of `local`: a model, and a round of each method."""

    def __init__(self, rank: int, num_ranks: int, millions: int, port: int, lighthouse: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank, self.num_ranks, self.lighthouse = rank, num_ranks, lighthouse
        dist.init_process_group("gloo", init_method=f"tcp://{_HOST}:{port}", rank=rank, world_size=num_ranks)
        self.model = square_layers(millions)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)

    def method(self, name: str) -> Callable[[], object]:
        whose, _, outer = name.partition(", ")
        return self.ours(outer) if whose == "LocalSGD" else self.torchft(outer) if whose == "torchft" else self.torch_average

    def ours(self, outer: str) -> Callable[[], object]:
        local = LocalSGD(self.model, self.optimizer, sync_every=1, outer=outer)
        return local.step

    def torch_average(self) -> None:
        """The averaging of PostLocalSGDOptimizer after the step of its optimizer."""
        average_parameters(iter(list(self.model.parameters())), dist.distributed_c10d._get_default_group())

    def torchft(self, outer: str) -> Callable[[], object]:
        from torchft.local_sgd import DiLoCo as TorchftDiLoCo
        from torchft.local_sgd import LocalSGD as TorchftLocalSGD
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self.store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(ProcessGroupGloo(timeout=timedelta(seconds=60)), None, None, self.num_ranks, use_async_quorum=False,
                               rank=0, world_size=1, store_addr=_HOST, store_port=self.store.port, lighthouse_addr=self.lighthouse,
                               replica_id=f"rank{self.rank}", hostname=_HOST, init_sync=False)
        if outer == "average":
            local = TorchftLocalSGD(self.manager, self.model, self.optimizer, 1)
            synced: Callable[[], object] = torch.no_grad()(local.sync)
            return synced
        theirs = torch.optim.SGD(self.model.parameters(), 0.7, momentum=0.9, nesterov=True)
        # a step without gradients: only the averaging hook has an effect
        TorchftDiLoCo(self.manager, [self.model], self.optimizer, theirs, sync_every=1).__enter__()
        return self.optimizer.step


def local_rank(rank: int, num_ranks: int, millions: int, rounds: int, names: Sequence[str], port: int, lighthouse: str,
               answers: Any) -> None:
    """Return milliseconds of each round by method, and the growth of memory in models."""
    one = LocalRank(rank, num_ranks, millions, port, lighthouse)
    with PeakMemory() as memory:
        methods = {name: one.method(name) for name in names}
        for method in methods.values():
            # pages are mapped and connections open
            method()
            method()
        dist.barrier()
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in [*names[number % len(names):], *names[:number % len(names)]]:
            dist.barrier()
            began = time.perf_counter()
            methods[name]()
            dist.barrier()
            milliseconds[name].append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        answers.put((milliseconds, memory.rise_mb / (4 * millions)))
    dist.barrier()
    os._exit(0)


def local_ranks(num_ranks: int, millions: int, rounds: int, names: Sequence[str]) -> tuple[dict[str, list[float]], float]:
    """Processes that run only these methods."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"{_HOST}:0", min_replicas=num_ranks, join_timeout_ms=60000)
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    address = f"http://{_HOST}:{lighthouse.address().rpartition(':')[2]}"
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=local_rank, args=(rank, num_ranks, millions, rounds, names, port, address, answers))
             for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    lighthouse.shutdown()
    found: tuple[dict[str, list[float]], float] = answers.get()
    return found


def measure_local(options: argparse.Namespace) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    print("| parameters | ranks | method | ms, median (min) | ratio | memory, models |\n" + "|---" * 6 + "|")
    groups = [["LocalSGD, average", "torchft, average", "torch PostLocalSGD"], ["LocalSGD, diloco", "torchft, diloco"]]
    for millions, num_ranks, names in itertools.product(options.millions, options.ranks, groups):
        milliseconds, _ = local_ranks(num_ranks, millions, options.rounds, names)
        for name, times in milliseconds.items():
            _, memory = local_ranks(num_ranks, millions, 0, [name])
            ratios = [ours / theirs for ours, theirs in zip(milliseconds[names[0]], times, strict=True)]
            print(f"| {millions} M | {num_ranks} | {name} | {statistics.median(times):.0f} ({min(times):.0f}) | "
                  f"{statistics.median(ratios):.2f} | {memory:.1f} |", flush=True)


# Overlap ------------------------------------------------------------------------------------------


class TimedPool(ProcessPool):
    """Records when each result arrived, and the time of its minibatches."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # by worker: (when, seconds of minibatches), in order
        self.arrived: dict[int, list[tuple[float, float]]] = {}

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = super().wait(timeout_s)
        if isinstance(outcome, JobResult):
            self.arrived.setdefault(outcome.worker, []).append((time.monotonic(), outcome.seconds))
        return outcome

    def idle_share(self) -> float:
        """Fraction of time outside the minibatches, from the end of each worker's first job to the
        end of its last but one.
        """
        window = sum(found[-2][0] - found[0][0] for found in self.arrived.values())
        computing = sum(seconds for found in self.arrived.values() for _, seconds in found[1:-1])
        return 1.0 - computing / window

    def job_seconds(self) -> float:
        return statistics.median(seconds for found in self.arrived.values() for _, seconds in found)


def overlap_run(folder: Path, frames_per_job: int, outer: OuterConfig) -> TimedPool:
    """Six outer iterations of two jobs on random frames, with all work of a run between them."""
    classes, dim = 2000, 40
    random = np.random.default_rng(0)
    num_frames = 2 * frames_per_job
    utterances = np.linspace(0, num_frames, 51, dtype=np.int64)
    frames = FrameSet(random.normal(size=(num_frames, dim)).astype(np.float32),
                      random.integers(0, classes, num_frames).astype(np.int32), utterances, tuple(map(str, range(50))))
    egs = EgsConfig(frames_per_eg=1, samples_per_iter=frames_per_job)
    config = RunConfig(egs=egs, model=ModelConfig(num_layers=8, hidden_dim=1024), outer=outer,
                       cluster=ClusterConfig("local", num_workers=2, threads_per_worker=1))
    reader = EgsReader(prepare_archives(frames, frames, egs, num_classes=classes, digest="random", cache_root=folder))
    model = build_model(config.model, reader.info.num_inputs, classes, 0)
    layout = FlatLayout.of(model)
    spec = SpeechTaskSpec(config, str(reader.directory))
    pool = TimedPool(spec, 2, 1, layout.size)
    checkpoints = CheckpointStore(folder / f"checkpoints-{outer.overlap}", layout, num_to_keep=1)
    checkpoints.directory.mkdir(exist_ok=True)
    ledger = Ledger(folder / f"ledger-{outer.overlap}.jsonl")
    # a constant, small rate: with random classes there is nothing to learn, and nothing should
    # diverge
    schedule = Schedule(reader.info.num_archives, 1, 6.0, 1e-6, 1e-6, 2, 2)
    try:
        pool.start()
        settings = EngineSettings.of(config, num_averaging_threads=os.cpu_count() or 1)
        coordinator = Coordinator(spec.task(), model, schedule, pool, RunStorage(checkpoints, ledger, Trackers([])), settings)
        coordinator.train(first_checkpoint(layout.flatten(model.state_dict())))
    finally:
        ledger.close()
        pool.close()
    return pool


def measure_overlap(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    for _ in range(options.rounds):
        for outer in (OuterConfig(overlap=True), OuterConfig(overlap=False)):
            with tempfile.TemporaryDirectory() as folder:
                pool = overlap_run(Path(folder), options.frames, outer)
            print(f"overlap {outer.overlap}: {100 * pool.idle_share():.2f} % of the time outside the minibatches; a job takes "
                  f"{pool.job_seconds():.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    planes = commands.add_parser("planes")
    planes.add_argument("--millions", type=int, nargs="+", default=[10, 50])
    planes.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    planes.add_argument("--rounds", type=int, default=15)
    planes.set_defaults(measure=measure_planes)
    local = commands.add_parser("local")
    local.add_argument("--millions", type=int, nargs="+", default=[10, 50])
    local.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    local.add_argument("--rounds", type=int, default=15)
    local.set_defaults(measure=measure_local)
    overlap = commands.add_parser("overlap")
    overlap.add_argument("--rounds", type=int, default=3)
    overlap.add_argument("--frames", type=int, default=30000, help="frames per job; the default takes 20 s")
    overlap.set_defaults(measure=measure_overlap)
    options = parser.parse_args()
    options.measure(options)


if __name__ == "__main__":
    main()
