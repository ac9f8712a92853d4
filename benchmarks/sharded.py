"""Bytes, time and memory of an average between machines: by the workers, by the coordinator, and
torch's all_reduce.

    python benchmarks/sharded.py [--workers 4 8 16] [--millions 25] [--rate 1gbit] [--rounds 3]

Run as root. Each worker and the coordinator has a network namespace with a cable of this rate, in
both directions (tc, token bucket). Bytes are those that the kernel counted at the cables, with all
headers. A round begins when every worker has its result and ends when every worker has the next
model. Each method has fresh processes.

* `workers` is `ngsgd.cluster.exchange`, with the requests and answers of a pool over TCP.
* `coordinator` receives all results, takes the step and sends the model to each worker, which are
  the bytes of Ray's object store without copies between nodes.
* `all_reduce` sums float32 with gloo. It checks nothing and takes no outer step.

All processes share the cores of this machine, so the column of CPU seconds shows when they and not
the cables decide.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import pickle
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ngsgd.cluster.exchange.collective import CollectiveWorker, GatheredRef, StepRequest
from ngsgd.cluster.exchange.collective_client import Exchange, remote
from ngsgd.cluster.exchange.shared_memory import SharedVectors
from ngsgd.optim.outer import Average, Bmuf, OuterInfo, OuterOptimizer, OuterRule
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, VectorRef
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.validation.checksums import digest
from tests.nodes.network import Network, missing

_NEW_NETWORK, _PORT, _GLOO_PORT = 0x40000000, 7000, 7001
_RULES: dict[str, OuterRule] = {"average": Average(), "bmuf": Bmuf(2.0)}


# Transport ----------------------------------------------------------------------------------------


def send(connection: socket.socket, value: object) -> None:
    """Send a pickle; arrays are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[bytes | memoryview] = [head, *(buffer.raw() for buffer in buffers)]
    connection.sendall(struct.pack(f"!Q{len(parts)}Q", len(parts), *map(len, parts)))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    def read(size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            num_read = connection.recv_into(view)
            if not num_read:
                raise ConnectionResetError
            view = view[num_read:]
        return content
    (count,) = struct.unpack("!Q", read(8))
    head, *parts = (read(size) for size in struct.unpack(f"!{count}Q", read(8 * count)))
    return pickle.loads(head, buffers=parts)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True)
class Counters:
    """Of a process and its cable."""

    sent: int
    received: int
    cpu_s: float

    @classmethod
    def now(cls) -> Counters:
        line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)
        fields = line.partition(":")[2].split()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(int(fields[8]), int(fields[0]), used.ru_utime + used.ru_stime)

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.sent - before.sent, self.received - before.received, self.cpu_s - before.cpu_s)


# Worker -------------------------------------------------------------------------------------------


class Member:
    """A worker: its result, and its part of each method."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.member = CollectiveWorker(rank, FlatLayout(("weight",), ((size,),)), torch.device("cpu"))
        self.vector = np.random.default_rng(rank).random(size, np.float32)
        self.model = np.zeros(size, np.float32)

    def result(self, start: VectorRef | None, outer_iter: int) -> JobResult:
        job = Job(outer_iter, self.rank, 1, (), JobInit(start or LocalRef(self.model)), 0.01, 1.0)
        self.member.make_room(job)
        self.vector[:10] += 1.0
        found = self.member.keep(JobResult(job, self.rank, LocalRef(self.vector), digest(self.vector), 1 + self.rank, 1, 0.0, 0.0,
                                           0.0, 0.0, 0.0, 0))
        # the first model stays here
        return replace(found, job=replace(job, start=JobInit(GatheredRef(0))))

    def step(self, order: StepRequest) -> object:
        return self.member.step(order)

    def fetch(self) -> Vector:
        return self.vector

    def load(self, model: Vector) -> int:
        self.model = model
        return digest(model)

    def join(self, address: str, num_workers: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{_GLOO_PORT}", rank=self.rank, world_size=num_workers)
        self.buffer = torch.from_numpy(self.vector.copy())

    def all_reduce(self) -> None:
        dist.all_reduce(self.buffer)
        self.buffer /= dist.get_world_size()

    def counters(self) -> Counters:
        return Counters.now()


def worker(rank: int, namespace: str, coordinator: str, size: int) -> None:
    enter(namespace)
    torch.set_num_threads(1)
    member = Member(rank, size)
    while True:
        try:
            connection = socket.create_connection((coordinator, _PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    send(connection, rank)
    while (message := receive(connection)) is not None:
        name, *arguments = message
        send(connection, getattr(member, name)(*arguments))
    os._exit(0)


# Coordinator --------------------------------------------------------------------------------------


class Coordinator:
    """Runs rounds; the answers of the workers are received in one thread each."""

    def __init__(self, address: str, num_workers: int, size: int) -> None:
        self.address, self.size, self.num_workers = address, size, num_workers
        with socket.create_server((address, _PORT)) as listener:
            arrived = [listener.accept()[0] for _ in range(num_workers)]
        self.connections = dict(sorted((receive(connection), connection) for connection in arrived))
        self.threads = ThreadPoolExecutor(num_workers)
        self.weights = [1.0 + rank for rank in range(num_workers)]
        self.outer_iter = 0

    def ask(self, name: str, arguments: Mapping[int, tuple[Any, ...]] | None = None) -> dict[int, Any]:
        """Call a method of the workers at once."""
        def asked(rank: int) -> Any:
            send(self.connections[rank], (name, *(arguments[rank] if arguments else ())))
            return receive(self.connections[rank])
        ranks = list(self.connections if arguments is None else arguments)
        return dict(zip(ranks, self.threads.map(asked, ranks), strict=True))

    def by_workers(self, rule: OuterRule) -> tuple[Callable[[], None], Callable[[], None]]:
        """(what precedes a round, the round)."""
        optimizer, exchange = OuterOptimizer(rule, np.zeros(self.size, np.float32)), Exchange(self.address)
        published = SharedVectors(self.size).allocate()
        starts: dict[int, VectorRef | None] = dict.fromkeys(self.connections)
        results: list[JobResult] = []

        def prepare() -> None:
            found = self.ask("result", {rank: (start, self.outer_iter) for rank, start in starts.items()})
            results[:] = [remote(result, lambda kept: self.ask("fetch")[kept.worker]) for result in found.values()]

        def one_round() -> None:
            info = OuterInfo(self.outer_iter, 1000, len(results), 0.01)
            self.outer_iter += 1
            is_done = exchange.step(optimizer, results, self.weights, info, lambda orders, *_: self.ask(
                "step", {rank: (order,) for rank, order in orders.items()}), lambda kept: None)
            assert is_done and not exchange.news()
            optimizer.broadcast(published.read())
            name = digest(published.read())
            for result in results:
                kept: Any = result.sent
                start = exchange.start_of((result.worker, kept.kept.process), published, name)
                assert start is not published
                starts[result.worker] = start
        return prepare, one_round

    def by_coordinator(self, rule: OuterRule) -> tuple[Callable[[], None], Callable[[], None]]:
        optimizer = OuterOptimizer(rule, np.zeros(self.size, np.float32))

        def one_round() -> None:
            self.outer_iter += 1
            vectors = list(self.ask("fetch").values())
            optimizer.step(vectors, self.weights, OuterInfo(self.outer_iter, 1000, len(vectors), 0.01))
            model = optimizer.broadcast()
            names = self.ask("load", dict.fromkeys(self.connections, (model,)))
            assert set(names.values()) == {digest(model)}
        return (lambda: None), one_round

    def by_all_reduce(self) -> tuple[Callable[[], None], Callable[[], None]]:
        self.ask("join", {rank: (f"{self.address.rpartition('.')[0]}.2", self.num_workers) for rank in self.connections})

        def one_round() -> None:
            self.ask("all_reduce")
        return (lambda: None), one_round


class Peak:
    """The largest growth of the resident memory of this process, shared memory included."""

    def __enter__(self) -> Peak:
        self.start = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(coordinator: Coordinator, rounds: int, method: str) -> None:
    """Print the row of a method."""
    model, (who, _, rule) = 4.0 * coordinator.size, method.partition(", ")
    # the state of the outer optimizer counts too
    with Peak() as peak:
        prepare, one_round = (coordinator.by_all_reduce() if who == "all_reduce" else
                              (coordinator.by_workers if who == "workers" else coordinator.by_coordinator)(_RULES[rule]))
        # the group forms, and pages are mapped
        prepare()
        one_round()
    seconds, figures = [], []
    for _ in range(rounds):
        prepare()
        before, own_before = coordinator.ask("counters"), Counters.now()
        began = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - began)
        own = Counters.now() - own_before
        there = [after - before[rank] for rank, after in coordinator.ask("counters").items()]
        figures.append([max(one.sent for one in there) / model, max(one.received for one in there) / model,
                        own.sent / model, own.received / model, sum(one.cpu_s for one in there) + own.cpu_s])
    sent, received, own_sent, own_received, cpu_s = (statistics.median(column) for column in zip(*figures, strict=True))
    print(f"| {coordinator.num_workers} | {method} | {sent:.2f} / {received:.2f} | {own_sent:.2f} / {own_received:.2f} | "
          f"{statistics.median(seconds):.2f} ({min(seconds):.2f}) | {cpu_s:.2f} | {(peak.most - peak.start) / model:.1f} |",
          flush=True)


def run(namespace: str, address: str, options: argparse.Namespace, num_workers: int, method: str) -> None:
    enter(namespace)
    torch.set_num_threads(1)
    coordinator = Coordinator(address, num_workers, options.millions * 1_000_000)
    measure(coordinator, options.rounds, method)
    for connection in coordinator.connections.values():
        send(connection, None)
    os._exit(0)


def shape(network: Network, rate: str) -> None:
    """Limit both directions of every cable."""
    for index, node in enumerate(network.nodes):
        bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", f"ngsgd-v{index}", *bucket], check=True)
        subprocess.run(["tc", "-n", node.name, "qdisc", "add", "dev", node.device, *bucket], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--millions", type=int, default=25)
    parser.add_argument("--rate", default="1gbit", help="of a cable in each direction, as tc reads it; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+",
                        default=["workers, average", "workers, bmuf", "coordinator, average", "all_reduce"])
    options = parser.parse_args()
    if reason := missing():
        print(f"no nodes can be made here: {reason}")
        return 2
    print("| workers | average by, rule | models sent / received by a worker | by the coordinator | "
          "s, median (min) | CPU s of all | coordinator's memory, models |\n" + "|---" * 7 + "|", flush=True)
    context = multiprocessing.get_context("fork")
    for num_workers in options.workers:
        with tempfile.TemporaryDirectory() as scratch, Network(num_workers + 1, Path(scratch)) as network:
            if options.rate != "0":
                shape(network, options.rate)
            for method in options.methods:
                head, *others = network.nodes
                processes = [context.Process(target=run, args=(head.name, head.address, options, num_workers, method)),
                             *(context.Process(target=worker, args=(rank, node.name, head.address, options.millions * 1_000_000))
                               for rank, node in enumerate(others))]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
