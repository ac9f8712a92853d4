"""Averaging among the workers: coordinator side (workers: `ngsgd.cluster.exchange.collective`).

A group of workers has a number, its generation, and a secret, which the workers get with their
requests. A change of members or a failure creates a new group with the next number. Its rendezvous
is open only while the group forms. A failure closes it, so that no member waits there for a worker
that is gone.

Consequences of a failure: if the group broke and every worker lives, the coordinator reads the
results one by one, as without a collective. A worker that was silent until the deadline is killed.
Results of dead workers are lost, and their jobs run again before anything is averaged. Every result
is therefore counted exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ngsgd.cluster.exchange.authentication import new_secret
from ngsgd.cluster.exchange.collective import GroupFailure, Identity, MeanRequest, MeanShard, Parts, RemoteResultRef
from ngsgd.cluster.exchange.process_group import Backend
from ngsgd.cluster.exchange.rendezvous import Rendezvous
from ngsgd.config import ClusterConfig
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, FailureKind
from ngsgd.ops.averaging import pool_variances, shares_of
from ngsgd.ops.compression import Codec
from ngsgd.training.job import Job, JobFailure, JobResult, ResultsLost
from ngsgd.training.parameter_vector import Mean, Vector
from ngsgd.training.validation.checksums import digest

# (requests by worker, timeout in seconds, callback for a dead worker) -> answers that arrived in
# time; the other workers are killed
Ask = Callable[[Mapping[int, MeanRequest], float, Callable[[], None]], dict[int, object]]
# consecutive failures: each may cost half of the timeout, and the cause is likely to persist
_MAX_FAILURES = 3


@dataclass(frozen=True)
class Ending:
    """How a worker process ended, or why it is killed."""

    reason: str
    kind: FailureKind = FailureKind.UNKNOWN


# how the process that stores a result ended; None while it lives
WhyLost = Callable[[RemoteResultRef], Ending | None]


@dataclass(frozen=True)
class RemoteRef:
    """Reference of the coordinator to a result stored in a worker; `read` transfers it."""

    kept: RemoteResultRef
    job: Job
    digest: int
    # raises ClusterError if the worker is gone
    fetch: Callable[[RemoteResultRef], Vector]
    is_here = False

    def read(self) -> Vector:
        """Transfer the vector; raise ResultsLost if it is gone or damaged."""
        try:
            vector = self.fetch(self.kept)
        except ClusterError as error:
            raise ResultsLost([JobFailure(self.job, self.kept.worker, str(error), True, from_outside=True,
                                          kind=error.failure)]) from error
        if digest(vector) != self.digest:
            raise ResultsLost([JobFailure(self.job, self.kept.worker, "its parameters arrived damaged", False,
                                          kind=FailureKind.DAMAGED_RESULT)])
        return vector


def remote(result: JobResult, fetch: Callable[[RemoteResultRef], Vector]) -> JobResult:
    """Return the result with a reference that the coordinator can read, if its worker stores it."""
    if not isinstance(result.sent, RemoteResultRef):
        return result
    return replace(result, sent=RemoteRef(result.sent, result.job, result.digest, fetch))


class Exchange:
    """Sends requests to the workers, and concatenates their shards of the mean."""

    def __init__(self, host: str, timeout_s: float, *, backend: Backend = "gloo", codec: Codec | None = None) -> None:
        # name of this machine in the network of the workers
        self.host = host
        # seconds after which a worker that has not answered is killed
        self.timeout_s = timeout_s
        self.backend: Backend = backend
        self.codec: Codec | None = codec
        self._rendezvous: Rendezvous | None = None
        self._secret = b""
        self._members: tuple[tuple[int, str], ...] = ()
        self._generation = 0
        self._num_failures = 0      # consecutive
        # reason of the last failure
        self._reason = ""
        self._news: list[str] = []

    def mean(self, results: Sequence[JobResult], weights: Sequence[float], ask: Ask, why_lost: WhyLost) -> Mean | None:
        """Return the weighted mean in float64, or None if the group broke.

        Raises:
            ResultsLost: results were lost with their workers.
        """
        refs = [result.sent.kept for result in results if isinstance(result.sent, RemoteRef)]
        mean = None
        # otherwise some results are here already, and all are read here
        is_tried = len(refs) == len(results) and self._num_failures < _MAX_FAILURES
        if is_tried:
            _require_all(results, refs, why_lost)
            mean = self._mean(refs, weights, ask)
        if mean is None:
            _require_all(results, refs, why_lost)
            if is_tried:
                self._failed()
        else:
            self._num_failures = 0
        return mean

    def news(self) -> list[str]:
        """Return messages about groups that failed since the last call."""
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Close the rendezvous, so that members waiting for a missing member fail immediately."""
        self._close_rendezvous()
        # the next group is new, even with the same members
        self._members = ()

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _failed(self) -> None:
        """Record a failure without dead workers: the coordinator averages."""
        self._num_failures += 1
        found = self._rendezvous
        strangers = "" if found is None or not found.num_refused else (
            f"; {counted(found.num_refused, 'connection')} to {found.host}:{found.port} failed "
            "authentication: a process outside the run connects there")
        until = (
            "; collectives are disabled for the rest of this process"
        ) if self._num_failures >= _MAX_FAILURES else ""
        self._news.append(
            f"the workers could not average among themselves ({self._reason}{strangers}), so the "
            f"coordinator averages, with the same result{until}; check that only machines of the "
            "cluster reach its network, or set cluster.exchange=auto.")

    def _mean(self, refs: Sequence[RemoteResultRef], weights: Sequence[float], ask: Ask) -> Mean | None:
        workers = sorted({ref.worker for ref in refs})
        answers = ask(self._orders(refs, shares_of(len(refs), weights), workers), self.timeout_s, self.close)
        shards = [answer for answer in map(answers.get, workers)
                  if isinstance(answer, MeanShard) and answer.generation == self._generation]
        if len(shards) < len(workers):
            failures = (answer.reason for answer in answers.values() if isinstance(answer, GroupFailure))
            self._reason = next(failures, "no answer in time")
            self.close()
            return None
        if self.backend == "gloo":
            # all members are connected; only an NCCL group needs its rendezvous longer
            self._close_rendezvous()
        statistics = {identity: vector for shard in shards for identity, vector in shard.statistics.items()}
        layers = shards[0].layers
        mean = np.empty(sum(len(shard.mean) for shard in shards))
        answers.clear()
        filled = len(mean)
        # each shard is freed after it is copied, so the mean needs its memory only once
        while shards:
            shard = shards.pop()
            mean[filled - len(shard.mean):filled] = shard.mean
            filled -= len(shard.mean)
        _pool(mean, [statistics[ref.identity] for ref in refs], weights, layers)
        return mean

    def _orders(self, refs: Sequence[RemoteResultRef], shares: Sequence[float], workers: Sequence[int]) -> dict[int, MeanRequest]:
        members = tuple(sorted({(ref.worker, ref.process) for ref in refs}))
        is_revoked = self.backend == "nccl" and self._rendezvous is not None and self._rendezvous.is_closed
        if self._rendezvous is None or members != self._members or is_revoked:
            self._close_rendezvous()
            self._secret = new_secret()
            self._rendezvous = Rendezvous(self.host, self._secret, revokes=self.backend == "nccl")
            self._members = members
            self._generation += 1
        placed: list[tuple[int, Identity]] = [(workers.index(ref.worker), ref.identity) for ref in refs]
        # half of the time is for the group: a worker that waits for a silent member answers well
        # before it would be killed
        return {worker: MeanRequest(self.host, self._rendezvous.port, self._generation, rank, len(workers), self.backend,
                              self.timeout_s / 2, tuple(placed), tuple(shares), self.codec, self._secret)
                for rank, worker in enumerate(workers)}


def exchange_of(config: ClusterConfig, host: str, backend: Backend = "gloo") -> Exchange:
    """Build the configured exchange for workers that reach this machine as `host`."""
    return Exchange(host, config.exchange_timeout_s, backend=backend, codec=config.codec)


def _require_all(results: Sequence[JobResult], refs: Sequence[RemoteResultRef], why_lost: WhyLost) -> None:
    jobs = {result.job.identity: result.job for result in results}
    # the jobs had ended, so the death of their workers is no evidence against their data
    failures = [JobFailure(jobs[ref.identity], ref.worker, lost.reason, True, from_outside=True, kind=lost.kind)
                for ref in refs if (lost := why_lost(ref))]
    if failures:
        raise ResultsLost(failures)


def _pool(mean: Mean, statistics: Sequence[Vector], weights: Sequence[float], layers: Parts) -> None:
    """Set variances in `mean` to those of all data together, from the statistics of each result."""
    places, filled = [], 0
    for center, variance in layers:
        middle = filled + center.stop - center.start
        end = middle + variance.stop - variance.start
        places.append((slice(filled, middle), slice(middle, end)))
        filled = end
    pooled = np.empty(filled)
    pool_variances(pooled, statistics, weights, places)
    for (_, variance), (_, place) in zip(layers, places, strict=True):
        mean[variance] = pooled[place]
