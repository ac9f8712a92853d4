"""Averaging among workers over gloo: the coordinator's bits, whoever dies, hangs or comes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ngsgd.cluster.exchange import collective_client, process_group
from ngsgd.cluster.exchange.collective import (
    CollectiveWorker,
    FetchRequest,
    GroupFailure,
    RemoteResultRef,
    StepRequest,
    pack,
    parcel_size,
    shard_edges,
    unpack,
)
from ngsgd.cluster.exchange.collective_client import Ending, Exchange, RemoteRef, remote
from ngsgd.cluster.exchange.process_group import Bytes
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig, RunConfig, check
from ngsgd.ops.averaging import pool_variances
from ngsgd.ops.compression import Codec, decode, encode
from ngsgd.optim.outer import Average, BlockMomentum, Bmuf, DiLoCo, OuterInfo, OuterOptimizer, OuterRule
from ngsgd.schedules import Shard as ArchiveShard
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, ResultsLost, VectorRef, WorkItem
from ngsgd.training.parameter_deltas import Exact, compress, decompress
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import Worker
from tests.toy import Median, Run, config, require_undisturbed

PLAIN = FlatLayout(("weight",), ((5003,),))
NORMALIZED = FlatLayout(("a.weight", "norm.weight", "norm.running_mean", "norm.running_var", "b.weight",
                         "last.running_mean", "last.running_var"),
                        ((90, 90), (1500,), (1500,), (1500,), (40,), (30,), (30,)))


def some(size: int, seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@dataclass(frozen=True)
class Nowhere:
    """The coordinator's model, which nobody may read."""

    is_here = True

    def read(self) -> Vector:
        raise AssertionError("the model was read from the coordinator")


NOWHERE = Nowhere()


class Swarm:
    """Members in threads of this process; the groups are real."""

    def __init__(self, layout: FlatLayout, num_workers: int, codec: Codec | None = None, rule: OuterRule | None = None) -> None:
        self.layout = layout
        self.members = [CollectiveWorker(worker, layout, torch.device("cpu")) for worker in range(num_workers)]
        self.exchange = Exchange("127.0.0.1", 120.0, codec=codec)
        # by the workers, and by the coordinator
        self.optimizer, self.central = (OuterOptimizer(rule or Average(), some(layout.size, 99), ema_decay=0.9)
                                        for _ in range(2))
        self.orders: list[Mapping[int, StepRequest]] = []
        self.gone: set[int] = set()
        self.loses_answers = False

    def result(self, vector: Vector, worker: int, job: int, outer_iter: int = 0) -> JobResult:
        """The result of a worker that encoded its delta."""
        start = self.central.broadcast()
        spec = Job(outer_iter, job, 1, (WorkItem(ArchiveShard(0, 0), 0, job),), JobInit(LocalRef(start)), 0.1, 1.0)
        encoded, exact = None, cast(Exact, ())
        if self.exchange.codec:
            encoded, exact = compress(vector - start, None, self.exchange.codec, self.layout, np.empty_like(vector))
            vector = start + decompress(encoded, exact)
        made = JobResult(spec, worker, LocalRef(vector), digest(vector), 10 + job, 1, -1.0, 0.5, 1.0, 0.0, 0.0, 0,
                         encoded=encoded, exact=exact)
        self.members[worker].make_room(spec)
        return remote(self.members[worker].keep(made), self.fetch)

    def fetch(self, kept: RemoteResultRef) -> Vector:
        return self.members[kept.worker].fetch(kept.identity)

    def ask(self, orders: Mapping[int, StepRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        self.orders.append(orders)
        with ThreadPoolExecutor(len(orders)) as threads:
            answers = list(threads.map(lambda worker: self.members[worker].step(orders[worker]), orders))
        return {} if self.loses_answers else dict(zip(orders, answers, strict=True))

    def step(self, results: Sequence[JobResult]) -> bool:
        """Whether the workers took the step; their state is then bitwise the coordinator's."""
        weights = [float(result.num_frames) for result in results]
        info = OuterInfo(results[0].job.outer_iter, 10, len(results), 0.1)
        vectors = [result.sent.read() for result in results] if not self.gone else []
        is_done = self.exchange.step(self.optimizer, results, weights, info, self.ask,
                                     lambda kept: Ending("gone") if kept.worker in self.gone else None)
        if is_done:
            self.central.step(vectors, weights, info, statistics=self.layout.statistics())
            if len(vectors) > 1:
                pool_variances(self.central.eval_model(), vectors, weights, self.layout.mean_and_variance())
            # as `AveragedModel.step` does: no moving average of statistics
            for optimizer in (self.optimizer, self.central):
                for part in self.layout.statistics():
                    optimizer.final_model()[part] = optimizer.eval_model()[part]
            for name, array in self.central.arrays.items():
                assert np.array_equal(self.optimizer.arrays[name], array), name
            assert self.optimizer.numbers == self.central.numbers
            model = digest(self.central.broadcast())
            self.starts = [self.exchange.start_of(member, NOWHERE, model) for member in self.members_of(results)]
        return is_done

    @staticmethod
    def members_of(results: Sequence[JobResult]) -> list[tuple[int, str]]:
        kept = [result.sent.kept for result in results if isinstance(result.sent, RemoteRef)]
        return sorted({(one.worker, one.process) for one in kept})

    def vectors(self, workers: Sequence[int], outer_iter: int = 0) -> list[Vector]:
        """What these workers train, one job each."""
        vectors = [some(self.layout.size, 10 * outer_iter + job) for job in range(len(workers))]
        for _, variance in self.layout.mean_and_variance():
            for vector in vectors:
                vector[variance] **= 2
        return vectors

    def results(self, workers: Sequence[int], outer_iter: int = 0) -> list[JobResult]:
        return [self.result(vector, worker, job, outer_iter)
                for job, (worker, vector) in enumerate(zip(workers, self.vectors(workers, outer_iter), strict=True))]

    def round(self, workers: Sequence[int], outer_iter: int = 0) -> bool:
        """Step with results of these workers; whether they took the step."""
        return self.step(self.results(workers, outer_iter))


RULES = pytest.mark.parametrize("rule", [Average(), Bmuf(2.0), BlockMomentum(0.5, nesterov=False), DiLoCo(), Median()],
                                ids=["average", "bmuf", "classical", "diloco", "median"])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_workers", "num_jobs"), [(5003, 2, 2), (5003, 3, 3), (5003, 2, 5), (100_001, 5, 5), (3, 5, 5),
                                                               (1, 2, 3), (35_000, 34, 34)])
def test_the_step_has_the_coordinators_bits_for_any_number_of_workers_jobs_and_elements(
        size: int, num_workers: int, num_jobs: int) -> None:
    swarm = Swarm(FlatLayout(("weight",), ((size,),)), num_workers)
    # dealt out backwards, so that the order of the sum is not that of the ranks
    results = [swarm.result(some(size, job), (num_jobs - job) % num_workers, job) for job in range(num_jobs)]
    assert swarm.step(results)


@RULES
@pytest.mark.parametrize("layout", [PLAIN, NORMALIZED], ids=["plain", "norm"])
def test_owners_keep_the_state_of_every_rule_while_members_come_and_go(rule: OuterRule, layout: FlatLayout) -> None:
    swarm = Swarm(layout, 3, rule=rule)
    sent = []
    for number, workers in enumerate([(0, 1, 2), (0, 1, 2), (0, 1, 2), (1, 2), (1, 2)]):
        assert swarm.round(workers, number)
        sent.append({name for order in swarm.orders[-1].values() for name, (_, shard) in order.state.items() if shard is not None})
    # a change of members moves the edges of the shards. The first model is that of all jobs
    held = set(rule.buffers)
    assert sent == [held, set(), set(), sent[3], set()] and sent[3] >= held


@RULES
def test_every_owner_gathers_the_model_that_jobs_start_from(rule: OuterRule) -> None:
    swarm = Swarm(NORMALIZED, 3, rule=rule)
    for number in range(3):
        assert swarm.round((0, 1, 2), number)
        assert len(swarm.starts) == 3
        assert all(np.array_equal(start.read(), swarm.central.broadcast()) for start in swarm.starts)
    member = swarm.members_of(swarm.results((0,), 3))[0]
    model = digest(swarm.central.broadcast())
    # another process in the same slot, a worker that was no member, and another model
    for other, name in (((0, "there/1"), model), ((3, member[1]), model), (member, model + 1)):
        assert swarm.exchange.start_of(other, NOWHERE, name) is NOWHERE


def test_a_model_that_its_owners_could_not_exchange_is_the_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(PLAIN, 2)
    gathered = CollectiveWorker._gathered

    def broken(self: CollectiveWorker, *arguments: Any) -> Vector:
        if self.worker == 1:
            raise RuntimeError("[gloo.cc:1] connection closed")
        return gathered(self, *arguments)
    monkeypatch.setattr(CollectiveWorker, "_gathered", broken)
    assert swarm.round((0, 1)) and swarm.starts == [NOWHERE, NOWHERE]
    assert len(swarm.exchange.news()) == 1
    monkeypatch.undo()
    assert swarm.round((0, 1), 1) and NOWHERE not in swarm.starts
    assert [order[0].generation for order in swarm.orders] == [1, 2] and not swarm.exchange.news()


@pytest.mark.parametrize("rule", [Average(), Bmuf(2.0)], ids=["average", "bmuf"])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_bytes_of_each_process_do_not_grow_with_the_number_of_workers(
        count: int, rule: OuterRule, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = FlatLayout(("weight",), ((300_000,),))
    swarm, model_bytes = Swarm(layout, count, rule=rule), 4 * layout.size
    sent, received = Counter[int](), Counter[int]()
    whole = process_group.Group.all_to_all

    def all_to_all(group: Any, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        rank = group._group.rank()
        assert len(outgoing) == sum(out_sizes)
        # a part for this process itself passes no socket
        sent[rank] += sum(out_sizes) - out_sizes[rank]
        received[rank] += sum(in_sizes) - in_sizes[rank]
        return whole(group, outgoing, out_sizes, in_sizes, deadline)
    monkeypatch.setattr(process_group.Group, "all_to_all", all_to_all)
    ask, messages = swarm.ask, [0, 0]

    def count_messages(orders: Mapping[int, StepRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        answers = ask(orders, timeout_s, when_lost)
        messages[0] += sum(len(pickle.dumps(order)) for order in orders.values())
        messages[1] += sum(len(pickle.dumps(answer)) for answer in answers.values())
        return answers
    monkeypatch.setattr(swarm, "ask", count_messages)
    # the first step forms the group and, with momentum, sends it the state
    assert swarm.round(range(count))
    for counter in (sent, received):
        counter.clear()
    messages[:] = 0, 0
    assert swarm.round(range(count), 1)
    for counter in (sent, received):
        assert sorted(counter) == list(range(count))
        for rank in range(count):
            # shards end between rows of codecs, so they differ in size
            assert counter[rank] == pytest.approx(2 * model_bytes * (count - 1) / count, rel=0.05)
    # the coordinator sends requests alone, and receives the next state once
    assert messages[0] < 0.02 * model_bytes
    assert messages[1] == pytest.approx((1 + len(rule.buffers)) * model_bytes, rel=0.02)


def test_a_step_without_a_result_is_taken_again_from_the_state_before_it() -> None:
    swarm = Swarm(PLAIN, 3, rule=Bmuf(2.0))
    assert swarm.round((0, 1, 2))
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (swarm.optimizer, swarm.central)]
    results = swarm.results((0, 1, 2), 1)
    assert swarm.step(results)
    for optimizer, state in zip((swarm.optimizer, swarm.central), states, strict=True):
        optimizer.load_state_dict(state)
    assert swarm.step(results[:2])
    # the edges are others without the third worker
    assert swarm.step(swarm.results((0, 1, 2), 2))


def test_a_state_that_changed_elsewhere_is_sent_to_the_owners() -> None:
    swarm = Swarm(PLAIN, 2, rule=Bmuf(2.0))
    assert swarm.round((0, 1))
    for optimizer in (swarm.optimizer, swarm.central):
        optimizer.put(slice(10, 20), np.ones(10, np.float32))
    assert swarm.round((0, 1), 1)
    assert [name for name, (_, shard) in swarm.orders[-1][0].state.items() if shard is not None] == ["model", "block_momentum"]
    assert all(shard is None for _, shard in swarm.orders[-1][1].state.values())


def test_an_owner_without_its_part_of_the_state_breaks_the_group_alone() -> None:
    swarm = Swarm(PLAIN, 2, rule=Bmuf(2.0))
    assert swarm.round((0, 1))
    swarm.members[1]._shards.clear()
    before = swarm.optimizer.eval_model().copy()
    results = swarm.results((0, 1), 1)
    assert not swarm.step(results) and np.array_equal(swarm.optimizer.eval_model(), before)
    (message,) = swarm.exchange.news()
    assert message


def test_another_set_of_workers_is_another_group_and_the_same_set_is_not() -> None:
    swarm = Swarm(PLAIN, 3)
    for number, workers in enumerate([(0, 1), (0, 1), (0, 1, 2), (1, 2)]):
        assert swarm.round(workers, number)
    assert [{order.generation for order in orders.values()} for orders in swarm.orders] == [{1}, {1}, {2}, {3}]


def test_a_group_that_breaks_leaves_every_result_readable_and_the_next_one_works() -> None:
    swarm = Swarm(PLAIN, 2)
    swarm.exchange.timeout_s = 1.0
    vectors, results = swarm.vectors((0, 1)), swarm.results((0, 1))
    whole = swarm.ask
    swarm.ask = lambda orders, *_: {0: swarm.members[0].step(orders[0])}  # type: ignore[method-assign]
    assert not swarm.step(results)   # the other one never came
    assert all(np.array_equal(result.sent.read(), vector) for result, vector in zip(results, vectors, strict=True))
    swarm.ask, swarm.exchange.timeout_s = whole, 120.0  # type: ignore[method-assign]
    assert swarm.round((0, 1), 1)


def test_results_of_a_lost_worker_are_named_before_waiting_for_them() -> None:
    swarm = Swarm(PLAIN, 2)
    results = swarm.results((0, 1))
    swarm.gone = {1}
    with pytest.raises(ResultsLost) as lost:
        swarm.step(results)
    assert [(failure.job.job, failure.worker, failure.worker_died) for failure in lost.value.failures] == [(1, 1, True)]
    assert swarm.orders == []


def test_a_result_that_changed_in_its_worker_is_not_averaged() -> None:
    swarm = Swarm(PLAIN, 1)
    vector = some(PLAIN.size, 0)
    result = swarm.result(vector, 0, 0)
    vector[7] += 1.0
    with pytest.raises(ResultsLost, match="damaged"):
        result.sent.read()


# -------------------------------------------------------------------------------------- compression
@pytest.mark.parametrize("layout", [PLAIN, NORMALIZED], ids=["plain", "norm"])
@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_the_mean_of_compressed_deltas_is_that_of_what_they_decode_to(codec: Codec, layout: FlatLayout) -> None:
    swarm = Swarm(layout, 2, codec)
    results = swarm.results((0, 1))
    # everything is sent, and then the answers are lost
    swarm.loses_answers = True
    assert not swarm.step(results)
    swarm.loses_answers = False
    swarm.exchange.next_try = 0
    assert swarm.step(results)


@pytest.mark.parametrize("codec", [None, "int8", "sparse"])
@pytest.mark.parametrize(("size", "count"), [(5000, 3), (1, 1), (1023, 2), (4096, 4), (5, 7), (20_000, 3)])
def test_parcels_hold_each_shard_once_and_notice_a_wrong_byte(size: int, count: int, codec: Codec | None) -> None:
    vector = some(size, 0)
    content = vector if codec is None else encode(vector, codec)
    edges = shard_edges(size, count)
    lengths = [stop - first for first, stop in pairwise(edges)]
    parcels = [np.full(parcel_size(length, codec), 255, np.uint8) for length in lengths]
    for parcel, (first, stop) in zip(parcels, pairwise(edges), strict=True):
        pack(content, slice(first, stop), parcel, b"key")
    unpacked = np.concatenate([unpack(parcel, length, codec, b"key") for parcel, length in zip(parcels, lengths, strict=True)])
    assert np.array_equal(unpacked, vector if codec is None else decode(encode(vector, codec)))
    for parcel, length in zip(parcels, lengths, strict=True):
        if length:
            parcel[0] ^= 1
            with pytest.raises(RuntimeError, match="damaged"):
                unpack(parcel, length, codec, b"key")


# ---------------------------------------------------------------------------------------- processes
def collective(num_workers: int, outer: OuterConfig | None = None, *, jobs: int = 0) -> RunConfig:
    schedule = replace(config().schedule, num_jobs_initial=jobs or num_workers, num_jobs_final=jobs or num_workers)
    cluster = ClusterConfig("local", num_workers=num_workers, threads_per_worker=1, exchange="collective")
    return config(cluster=cluster, schedule=schedule, outer=outer or OuterConfig("average"),
                  failure=FailureConfig(hang_timeout_s=60.0))


@pytest.mark.parametrize(("num_workers", "jobs", "outer", "codec"), [
    (2, 3, OuterConfig("average"), "none"), (2, 3, OuterConfig("bmuf", gain=1.5), "none"),
    (2, 3, OuterConfig("average"), "int8"), (2, 3, OuterConfig("average"), "sparse"),
    pytest.param(2, 2, OuterConfig("bmuf", gain=1.5), "none", marks=pytest.mark.slow),
    pytest.param(5, 5, OuterConfig("average"), "none", marks=pytest.mark.slow)],
    ids=lambda value: getattr(value, "kind", None))
def test_collective_and_one_process_give_identical_bits(
        tmp_path: Path, num_workers: int, jobs: int, outer: OuterConfig, codec: Any) -> None:
    settings = collective(num_workers, outer, jobs=jobs)
    run = Run(tmp_path, replace(settings, cluster=replace(settings.cluster, compression=codec)))
    pool = PoolThatGathers(run)
    require_undisturbed(run, pool)
    assert pool.num_fetched == 0


class PoolThatCounts(ProcessPool):
    """Counts complete results that came to the coordinator."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, run.config.cluster.num_workers, 1, run.store.layout.size)
        self.num_fetched = 0

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        self.num_fetched += 1
        return super()._fetch(kept)


class PoolThatGathers(PoolThatCounts):
    """Its workers can read only the first model from the coordinator."""

    def _portable(self, slot: Any, ref: VectorRef) -> VectorRef:
        assert slot.job is not None
        return NOWHERE if slot.job.outer_iter and ref is slot.job.start.model else ref


class PoolThatDisturbs(PoolThatCounts):
    """In a reduction the worker of slot 1 stops, and then gets a signal."""

    def __init__(self, run: Run, number: signal.Signals, which: int = 2) -> None:
        super().__init__(run)
        # the first reduction forms the group, the second uses it
        self.number, self.which, self.num_reductions = number, which, 0

    def _ask(self, questions: Mapping[int, StepRequest | FetchRequest], timeout_s: float,
             when_lost: Callable[[], None] = lambda: None) -> dict[int, object]:
        if any(isinstance(question, StepRequest) for question in questions.values()):
            self.num_reductions += 1
            if self.num_reductions == self.which:
                victim = self.process_ids()[1]
                os.kill(victim, signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (victim, self.number)).start()
        return super()._ask(questions, timeout_s, when_lost)


def require_one_death(run: Run, pool: PoolThatDisturbs) -> None:
    """The job of the worker in slot 1 is retried, and nobody healthy is killed."""
    require_undisturbed(run, pool)
    (incident,) = run.recorder.incidents
    how = "killed by SIGKILL" if pool.number == signal.SIGKILL else "gave no answer for 10 s"
    assert incident.what == "worker_died" and how in incident.message and "retried" in incident.message
    assert pool.num_fetched == 0


# members that waited for the timeout of the group would outlast that of the test
DISTURBANCES = pytest.mark.parametrize(("number", "which", "timeout_s"), [
    (signal.SIGKILL, 2, 10_000.0), (signal.SIGKILL, 1, 10_000.0), (signal.SIGSTOP, 2, 10.0)],
    ids=["killed in use", "killed while it forms", "hangs"])


@pytest.mark.faults
@DISTURBANCES
def test_a_worker_that_dies_or_hangs_in_the_reduction_costs_no_bit(
        tmp_path: Path, number: signal.Signals, which: int, timeout_s: float,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_client, "EXCHANGE_TIMEOUT_S", timeout_s)
    run = Run(tmp_path, collective(3))
    require_one_death(run, PoolThatDisturbs(run, number, which))


def cut_connections() -> None:
    """Shut down all TCP connections of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        # others are no sockets, or listen
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class DisturbedWorker:
    """Makes workers; that of slot 1 is disturbed before its second exchange of a model."""

    marker: Path
    number: int  # signal; 0: its connections are cut

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        whole, num_calls = process_group.Group.all_to_all, itertools.count(1)

        def all_to_all(group: Any, *arguments: Any) -> Any:
            # two calls prove the members, and two belong to each step
            if index == 1 and next(num_calls) == 6 and not self.marker.exists():
                self.marker.touch()
                if self.number:
                    os.kill(os.getpid(), self.number)
                else:
                    cut_connections()
            return whole(group, *arguments)
        process_group.Group.all_to_all = all_to_all  # type: ignore[method-assign, assignment]
        return make_worker(spec, index)


@pytest.mark.faults
@pytest.mark.parametrize(("number", "incident", "timeout_s"), [
    (signal.SIGKILL, "worker_died", 10_000.0), (signal.SIGSTOP, "worker_died", 10.0), (0, "exchange_failed", 10.0)],
    ids=["dies", "hangs", "cut"])
def test_a_member_that_is_lost_while_the_model_is_exchanged_costs_no_bit(
        tmp_path: Path, number: int, incident: str, timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_client, "EXCHANGE_TIMEOUT_S", timeout_s)
    run = Run(tmp_path, collective(3, OuterConfig("bmuf", gain=1.5)))
    pool = PoolThatCounts(run)
    pool.make_worker = DisturbedWorker(tmp_path / "disturbed", number)
    require_undisturbed(run, pool)
    assert (tmp_path / "disturbed").exists()
    assert [found.what for found in run.recorder.incidents] == [incident] and pool.num_fetched == 0


class PoolThatWakes(PoolThatDisturbs):
    """The stopped worker continues as soon as the others have given up on it."""

    def _receive(self, slot: Any, message: object) -> None:
        super()._receive(slot, message)
        if isinstance(message, GroupFailure):
            os.kill(self.process_ids()[1], signal.SIGCONT)


@pytest.mark.faults
def test_a_worker_that_is_slow_but_lives_costs_one_round_through_the_coordinator(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the group gives up after 6 s, the coordinator after 12 s: busy machines take some
    monkeypatch.setattr(collective_client, "EXCHANGE_TIMEOUT_S", 12.0)
    run = Run(tmp_path, collective(3))
    pool = PoolThatWakes(run, signal.SIGSTOP)
    require_undisturbed(run, pool)
    assert [incident.what for incident in run.recorder.incidents] == ["exchange_failed"]
    assert pool.num_fetched == 3


@pytest.mark.faults
def test_a_worker_killed_between_two_reductions_is_replaced_in_the_group(tmp_path: Path) -> None:
    run = Run(tmp_path, collective(2))

    class Pool(PoolThatCounts):
        def submit(self, job: Job) -> None:
            super().submit(job)
            if job.identity == (2, 1, 1):
                os.kill(next(slot.process.pid or 0 for slot in self._slots if slot.job is job), signal.SIGKILL)
    require_undisturbed(run, Pool(run))
    assert len(run.recorder.incidents) == 1


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    settings = [replace(collective(2), seed=seed) for seed in (0, 1)]
    wholes = [Run(tmp_path / f"whole{seed}", settings[seed]).train() for seed in (0, 1)]
    runs = [Run(tmp_path / f"run{seed}", settings[seed]) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda run: run.train(PoolThatCounts(run)), runs))
    assert [end.model_sha256 for end in ends] == [whole.model_sha256 for whole in wholes]


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"cluster": ClusterConfig("local", exchange="object_store")}, "cluster.exchange is object_store"),
    ({"cluster": ClusterConfig("in_process", exchange="collective")}, "cluster.kind in_process"),
    ({"cluster": ClusterConfig("local", exchange="collective"), "outer": OuterConfig(overlap=True)}, "with outer.overlap, whose"),
    ({"cluster": ClusterConfig("local", exchange="collective"), "outer": OuterConfig("streaming")},
     "outer.kind streaming"),
    ({"cluster": ClusterConfig("local", compression="int8"), "outer": OuterConfig("streaming")},
     "cluster.compression is int8 with outer.kind")])
def test_ways_that_do_not_go_together_are_named(changes: dict[str, object], sentence: str) -> None:
    (problem,) = check(config(**changes))
    assert sentence in problem
