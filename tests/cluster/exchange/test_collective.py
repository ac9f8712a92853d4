"""Averaging among the workers over gloo: the coordinator's bits, whoever dies, hangs, comes or
goes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.cluster.exchange.authentication import new_secret
from ngsgd.cluster.exchange.collective import CollectiveWorker, FetchRequest, GroupFailure, MeanRequest, RemoteResultRef
from ngsgd.cluster.exchange.collective_client import Ending, Exchange, remote
from ngsgd.cluster.exchange.shard_serialization import pack, parcel_size, shard_edges, unpack
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, OuterConfig, RunConfig, check
from ngsgd.ops.averaging import mean_of_chunk, pool_variances, shares_of
from ngsgd.ops.compression import Codec, decode, encode
from ngsgd.schedules import Shard as ArchiveShard
from ngsgd.training.job import Job, JobInit, JobResult, LocalRef, ResultsLost, WorkItem
from ngsgd.training.parameter_vector import FlatLayout, Mean, Vector
from ngsgd.training.storage.audit import audit
from ngsgd.training.validation.checksums import digest
from tests.toy import Run, config, undisturbed

PLAIN = FlatLayout(("weight",), ((5003,),))
NORMALISED = FlatLayout(("a.weight", "norm.weight", "norm.running_mean", "norm.running_var", "b.weight"),
                    ((40, 40), (40,), (40,), (40,), (40,)))


def some(size: int, seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


class Swarm:
    """Members in threads of this process; the groups are real."""

    def __init__(self, layout: FlatLayout, num_workers: int, codec: Codec | None = None) -> None:
        self.members = [CollectiveWorker(worker, layout, torch.device("cpu")) for worker in range(num_workers)]
        self.exchange = Exchange("127.0.0.1", 120.0, codec=codec)
        self.orders: list[Mapping[int, MeanRequest]] = []
        self.gone: set[int] = set()
        self.loses_answers = False

    def result(self, vector: Vector, start: Vector, worker: int, job: int, outer_iter: int = 0) -> JobResult:
        """The result of a worker that encoded its delta."""
        spec = Job(outer_iter, job, 1, (WorkItem(ArchiveShard(0, 0), 0, job),), JobInit(LocalRef(start)), 0.1, 1.0)
        encoded = encode(vector - start, self.exchange.codec) if self.exchange.codec else None
        if encoded is not None:
            vector = start + decode(encoded)
        made = JobResult(spec, worker, LocalRef(vector), digest(vector), 10 + job, 1, -1.0, 0.5, 1.0, 0.0, 0.0, 0,
                         encoded=encoded)
        self.members[worker].make_room(spec)
        return remote(self.members[worker].keep(made), self.fetch)

    def fetch(self, kept: RemoteResultRef) -> Vector:
        return self.members[kept.worker].fetch(kept.identity)

    def ask(self, orders: Mapping[int, MeanRequest], timeout_s: float, when_lost: Callable[[], None]) -> dict[int, object]:
        self.orders.append(orders)
        with ThreadPoolExecutor(len(orders)) as threads:
            answers = list(threads.map(lambda worker: self.members[worker].average(orders[worker]), orders))
        return {} if self.loses_answers else dict(zip(orders, answers, strict=True))

    def mean(self, results: Sequence[JobResult]) -> Mean | None:
        weights = [float(result.num_frames) for result in results]
        return self.exchange.mean(results, weights, self.ask, lambda kept: Ending("gone") if kept.worker in self.gone else None)


def central(layout: FlatLayout, vectors: Sequence[Vector], weights: Sequence[float]) -> Mean:
    mean = mean_of_chunk(vectors, shares_of(len(vectors), weights), slice(0, layout.size))
    pool_variances(mean, vectors, weights, layout.mean_and_variance())
    return mean


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_workers", "num_jobs"), [(5003, 2, 2), (5003, 3, 3), (5003, 2, 5), (100_001, 5, 5), (3, 5, 5),
                                                               (1, 2, 3), (35_000, 34, 34)])
def test_the_mean_has_the_coordinators_bits_for_any_number_of_workers_jobs_and_elements(
        size: int, num_workers: int, num_jobs: int) -> None:
    layout = FlatLayout(("weight",), ((size,),))
    swarm = Swarm(layout, num_workers)
    vectors = [some(size, job) for job in range(num_jobs)]
    # dealt out backwards, so that the order of the sum is not that of the ranks
    results = [swarm.result(vector, vector, (num_jobs - job) % num_workers, job) for job, vector in enumerate(vectors)]
    mean = swarm.mean(results)
    assert mean is not None
    assert np.array_equal(mean, central(layout, vectors, [10.0 + job for job in range(num_jobs)]))


def test_variances_of_batch_normalisation_are_pooled_as_the_coordinator_pools_them() -> None:
    swarm = Swarm(NORMALISED, 3)
    vectors = [some(NORMALISED.size, job) for job in range(3)]
    for vector in vectors:
        vector[NORMALISED.part("norm.running_var")] **= 2
    mean = swarm.mean([swarm.result(vector, vector, job, job) for job, vector in enumerate(vectors)])
    assert mean is not None
    assert np.array_equal(mean, central(NORMALISED, vectors, [10.0, 11.0, 12.0]))


def test_another_set_of_workers_is_another_group_and_the_same_set_is_not() -> None:
    swarm = Swarm(PLAIN, 3)
    for outer_iter, workers in enumerate([(0, 1), (0, 1), (0, 1, 2), (1, 2)]):
        vectors = [some(PLAIN.size, 10 * outer_iter + job) for job in range(len(workers))]
        mean = swarm.mean([swarm.result(vector, vector, worker, job, outer_iter)
                           for job, (worker, vector) in enumerate(zip(workers, vectors, strict=True))])
        assert mean is not None
        assert np.array_equal(mean, central(PLAIN, vectors, [10.0 + job for job in range(len(workers))]))
    assert [{order.generation for order in orders.values()} for orders in swarm.orders] == [{1}, {1}, {2}, {3}]


def test_a_group_that_breaks_leaves_every_result_readable_and_the_next_one_works() -> None:
    swarm = Swarm(PLAIN, 2)
    swarm.exchange.timeout_s = 1.0
    vectors = [some(PLAIN.size, job) for job in range(2)]
    results = [swarm.result(vector, vector, job, job) for job, vector in enumerate(vectors)]
    whole = swarm.ask
    swarm.ask = lambda orders, *_: {0: swarm.members[0].average(orders[0])}  # type: ignore[method-assign]
    assert swarm.mean(results) is None   # the other one never came
    assert all(np.array_equal(result.sent.read(), vector) for result, vector in zip(results, vectors, strict=True))
    swarm.ask, swarm.exchange.timeout_s = whole, 120.0  # type: ignore[method-assign]
    mean = swarm.mean(results)
    assert mean is not None
    assert np.array_equal(mean, central(PLAIN, vectors, [10.0, 11.0]))


def test_results_of_a_lost_worker_are_named_before_waiting_for_them() -> None:
    swarm = Swarm(PLAIN, 2)
    results = [swarm.result(some(PLAIN.size, job), some(PLAIN.size, 9), job, job) for job in range(2)]
    swarm.gone = {1}
    with pytest.raises(ResultsLost) as lost:
        swarm.mean(results)
    assert [(failure.job.job, failure.worker, failure.worker_died) for failure in lost.value.failures] == [(1, 1, True)]
    assert swarm.orders == []


def test_a_result_that_changed_in_its_worker_is_not_averaged() -> None:
    swarm = Swarm(PLAIN, 1)
    vector = some(PLAIN.size, 0)
    result = swarm.result(vector, vector, 0, 0)
    vector[7] += 1.0
    with pytest.raises(ResultsLost, match="damaged"):
        result.sent.read()


# -------------------------------------------------------------------------------------- compression
@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_the_mean_of_compressed_deltas_is_that_of_what_they_decode_to(codec: Codec) -> None:
    swarm = Swarm(PLAIN, 2, codec)
    start = some(PLAIN.size, 99)
    results = [swarm.result(start + 0.01 * some(PLAIN.size, job), start, job, job) for job in range(2)]
    # everything is sent, and then the answers are lost
    swarm.loses_answers = True
    assert swarm.mean(results) is None
    swarm.loses_answers = False
    mean = swarm.mean(results)
    assert mean is not None
    moves = [decode(encode((start + 0.01 * some(PLAIN.size, job)) - start, codec)) for job in range(2)]
    assert np.array_equal(mean, central(PLAIN, [start + move for move in moves], [10.0, 11.0]))


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
def collective(num_workers: int, outer: OuterConfig | None = None, *, timeout_s: float = 60.0, jobs: int = 0) -> RunConfig:
    schedule = replace(config().schedule, num_jobs_initial=jobs or num_workers, num_jobs_final=jobs or num_workers)
    cluster = ClusterConfig("local", num_workers=num_workers, threads_per_worker=1, exchange="collective",
                            exchange_timeout_s=timeout_s)
    return config(cluster=cluster, schedule=schedule, outer=outer or OuterConfig("average"),
                  failure=FailureConfig(hang_timeout_s=60.0))


def pool_of(run: Run) -> ProcessPool:
    return ProcessPool(run.spec, run.config.cluster.num_workers, 1, run.store.layout.size, log_directory=run.folder / "workers")


@pytest.mark.parametrize(("num_workers", "jobs", "outer"), [
    (2, 3, OuterConfig("average")), (2, 3, OuterConfig("bmuf", gain=1.5)),
    pytest.param(2, 2, OuterConfig("bmuf", gain=1.5), marks=pytest.mark.slow),
    pytest.param(5, 5, OuterConfig("average"), marks=pytest.mark.slow)],
    ids=lambda value: getattr(value, "kind", None))
def test_collective_and_one_process_give_identical_bits(tmp_path: Path, num_workers: int, jobs: int, outer: OuterConfig) -> None:
    require_the_bits_of_one_process(tmp_path, collective(num_workers, outer, jobs=jobs))


@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_compressed_deltas_give_the_bits_of_one_process(tmp_path: Path, codec: Codec) -> None:
    settings = collective(2, OuterConfig("average"), jobs=3)
    require_the_bits_of_one_process(tmp_path, replace(settings, cluster=replace(settings.cluster, compression=codec)))


def require_the_bits_of_one_process(tmp_path: Path, settings: RunConfig) -> None:
    whole = undisturbed(settings)
    run = Run(tmp_path / "collective", settings)
    pool = PoolThatCounts(run)
    assert run.train(pool).model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []
    assert pool.num_fetched == 0


class PoolThatCounts(ProcessPool):
    """Counts complete results that came to the coordinator."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, run.config.cluster.num_workers, 1, run.store.layout.size)
        self.num_fetched = 0

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        self.num_fetched += 1
        return super()._fetch(kept)


class PoolThatDisturbs(PoolThatCounts):
    """In a reduction the worker of slot 1 stops, while the others wait for it; then it gets a
    signal.
    """

    def __init__(self, run: Run, number: signal.Signals, which: int = 2) -> None:
        super().__init__(run)
        self.number = number
        self.which = which   # the first forms the group, the second uses it
        self.num_reductions = 0

    def _ask(self, questions: Mapping[int, MeanRequest | FetchRequest], timeout_s: float,
             when_lost: Callable[[], None] = lambda: None) -> dict[int, object]:
        if any(isinstance(question, MeanRequest) for question in questions.values()):
            self.num_reductions += 1
            if self.num_reductions == self.which:
                victim = self.process_ids()[1]
                os.kill(victim, signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (victim, self.number)).start()
        return super()._ask(questions, timeout_s, when_lost)


@pytest.mark.faults
@pytest.mark.parametrize(("number", "timeout_s"), [
    (signal.SIGKILL, 60.0), (signal.SIGSTOP, 10.0)], ids=["SIGKILL", "SIGSTOP"])
def test_a_worker_that_dies_or_hangs_in_the_reduction_costs_no_bit(
        tmp_path: Path, number: signal.Signals, timeout_s: float) -> None:
    settings = collective(3, timeout_s=timeout_s)
    whole = undisturbed(settings)
    run = Run(tmp_path / "disturbed", settings)
    pool = PoolThatDisturbs(run, number)
    assert run.train(pool).model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []
    (incident,) = run.recorder.incidents   # nobody healthy was killed
    how = "killed by SIGKILL" if number == signal.SIGKILL else "gave no answer for 10 s and was killed"
    assert incident.what == "worker_died" and how in incident.message and "retried" in incident.message
    assert pool.num_fetched == 0


@pytest.mark.faults
def test_no_worker_waits_for_one_that_dies_while_the_group_forms(tmp_path: Path) -> None:
    # members that waited for the group's own timeout would outlast the timeout of the test
    settings = collective(3, timeout_s=10_000.0)
    whole = undisturbed(settings)
    run = Run(tmp_path / "killed", settings)
    assert run.train(PoolThatDisturbs(run, signal.SIGKILL, 1)).model_sha256 == whole.model_sha256
    assert len(run.recorder.incidents) == 1


class PoolThatWakes(PoolThatDisturbs):
    """The stopped worker continues as soon as the others have given up on it."""

    def _receive(self, slot: Any, message: object) -> None:
        super()._receive(slot, message)
        if isinstance(message, GroupFailure):
            os.kill(self.process_ids()[1], signal.SIGCONT)


@pytest.mark.faults
def test_a_worker_that_is_slow_but_lives_costs_one_round_through_the_coordinator(tmp_path: Path) -> None:
    # the group gives up after 6 s, the coordinator after 12 s: busy machines take some
    settings = collective(3, timeout_s=12.0)
    whole = undisturbed(settings)
    run = Run(tmp_path / "slow", settings)
    pool = PoolThatWakes(run, signal.SIGSTOP)
    assert run.train(pool).model_sha256 == whole.model_sha256
    assert [incident.what for incident in run.recorder.incidents] == ["exchange_failed"]
    assert pool.num_fetched == 3


@pytest.mark.faults
def test_a_worker_killed_between_two_reductions_is_replaced_in_the_group(tmp_path: Path) -> None:
    settings = collective(2)
    whole = undisturbed(settings)
    run = Run(tmp_path / "killed", settings)

    class Pool(PoolThatCounts):
        def submit(self, job: Job) -> None:
            super().submit(job)
            if job.identity == (2, 1, 1):
                os.kill(next(slot.process.pid or 0 for slot in self._slots if slot.job is job), signal.SIGKILL)
    assert run.train(Pool(run)).model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []
    assert len(run.recorder.incidents) == 1


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    settings = [replace(collective(2), seed=seed) for seed in (0, 1)]
    wholes = [Run(tmp_path / f"whole{seed}", settings[seed]).train() for seed in (0, 1)]
    runs = [Run(tmp_path / f"run{seed}", settings[seed]) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda run: run.train(pool_of(run)), runs))
    assert [end.model_sha256 for end in ends] == [whole.model_sha256 for whole in wholes]


@pytest.mark.slow
def test_a_run_with_compressed_deltas_learns(tmp_path: Path) -> None:
    settings = collective(2)
    objf = {}
    for codec in ("none", "int8", "sparse"):
        run = Run(tmp_path / codec, replace(settings, cluster=replace(settings.cluster, compression=codec)))
        run.train(pool_of(run))
        objf[codec] = run.recorder.records[-1].valid.objf
        assert audit(run.ledger_path) == []
    assert abs(objf["int8"] - objf["none"]) < 0.01
    # six outer iterations send a third of the elements once
    assert run.recorder.records[0].valid.objf < objf["sparse"] < objf["none"]


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


def test_a_broken_group_reports_the_reason() -> None:
    member = CollectiveWorker(0, PLAIN, torch.device("cpu"))
    swarm = Swarm(PLAIN, 1)
    swarm.result(some(PLAIN.size, 0), some(PLAIN.size, 0), 0, 0)
    answer = member.average(MeanRequest("127.0.0.1", 1, 1, 0, 2, "gloo", 0.5, (), (), None, new_secret()))
    assert isinstance(answer, GroupFailure) and answer.reason
