"""Averaging among the workers: the coordinator's part (the workers' is `ngsgd.cluster.exchange.collective`).

A group of workers has a number, its generation, and a secret, which the workers get with their orders.  A change of members or a
failure makes a new group under the next number, with a rendezvous of its own that is open only while the group forms; a failure
closes it, so that nobody waits there for a worker that is gone.

What a failure costs: if the group broke and every worker lives, the coordinator reads the results one by one, as if there were
no collective; if a worker died or was silent until the deadline and was killed, its results are lost, and its jobs run again
before anything is averaged, so that no result is counted twice or not at all.
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
from ngsgd.errors import ClusterError
from ngsgd.ops.averaging import pool_variances, shares_of
from ngsgd.ops.compression import Codec
from ngsgd.training.job import Job, JobFailure, JobResult, ResultsLost
from ngsgd.training.parameter_vector import Mean, Vector
from ngsgd.training.validation.checksums import digest

# given orders by worker, seconds, and what to call when one of them is found dead: the answers of
# those that gave one in time;
# the others are killed
Ask = Callable[[Mapping[int, MeanRequest], float, Callable[[], None]], dict[int, object]]
# in a row: each may cost half of the timeout, and what disturbs the group is likely to stay
_MAX_FAILURES = 3
# how the process ended that keeps a result; empty while it lives
WhyLost = Callable[[RemoteResultRef], str]


@dataclass(frozen=True)
class RemoteRef:
    """A kept result as the coordinator sees it; reading it moves the whole vector."""

    kept: RemoteResultRef
    job: Job
    digest: int
    # raises ClusterError where the worker is gone
    fetch: Callable[[RemoteResultRef], Vector]
    is_here = False

    def read(self) -> Vector:
        """Raises ResultsLost where it cannot be had, or is not what it was."""
        try:
            vector = self.fetch(self.kept)
        except ClusterError as error:
            raise ResultsLost([JobFailure(self.job, self.kept.worker, str(error), True, from_outside=True)]) from error
        if digest(vector) != self.digest:
            raise ResultsLost([JobFailure(self.job, self.kept.worker, "its parameters arrived damaged", False)])
        return vector


def remote(result: JobResult, fetch: Callable[[RemoteResultRef], Vector]) -> JobResult:
    """The result with a reference that the coordinator can read; as it is, if it lies elsewhere than in its worker."""
    if not isinstance(result.sent, RemoteResultRef):
        return result
    return replace(result, sent=RemoteRef(result.sent, result.job, result.digest, fetch))


class Exchange:
    """Gives the workers their orders, and puts their shards together."""

    def __init__(self, host: str, timeout_s: float, *, backend: Backend = "gloo", codec: Codec | None = None) -> None:
        # of this machine, as the workers reach it
        self.host = host
        # after which a worker that has not answered is killed
        self.timeout_s = timeout_s
        self.backend: Backend = backend
        self.codec: Codec | None = codec
        self._rendezvous: Rendezvous | None = None
        self._secret = b""
        self._members: tuple[tuple[int, str], ...] = ()
        self._generation = 0
        self._num_failures = 0      # in a row
        # of the last one
        self._reason = ""
        self._news: list[str] = []

    def mean(self, results: Sequence[JobResult], weights: Sequence[float], ask: Ask, why_lost: WhyLost) -> Mean | None:
        """The weighted mean in float64; None if the group broke.  Raises ResultsLost if results went with their workers."""
        refs = [result.sent.kept for result in results if isinstance(result.sent, RemoteRef)]
        mean = None
        # else some lie here already, and all are read here
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
        """Sentences about groups that failed since the last call."""
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Closes the rendezvous, so that members that wait there for one that does not come fail at once."""
        self._close_rendezvous()
        # the next group is another one, whoever is in it
        self._members = ()

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _failed(self) -> None:
        """Notes a failure that cost no worker: the coordinator averages."""
        self._num_failures += 1
        found = self._rendezvous
        strangers = "" if found is None or not found.num_refused else (
            f"; {found.num_refused} connections to {found.host}:{found.port} did not hold the group's secret: a process outside "
            "the run connects there")
        until = "; this is tried no more in this process" if self._num_failures >= _MAX_FAILURES else ""
        self._news.append(
            f"the workers could not average among themselves ({self._reason}{strangers}), so the coordinator averages, with the "
            f"same result{until}; see that only the cluster's machines reach its network, or set cluster.exchange=auto.")

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
            # all are connected; an NCCL group lives as long as its rendezvous
            self._close_rendezvous()
        statistics = {identity: vector for shard in shards for identity, vector in shard.statistics.items()}
        layers = shards[0].layers
        mean = np.empty(sum(len(shard.mean) for shard in shards))
        answers.clear()
        filled = len(mean)
        # each is let go of as it is copied: in all, the mean needs its memory once
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
        # half of the time is the group's own: whoever waits for a silent member answers well before
        # it would be killed
        return {worker: MeanRequest(self.host, self._rendezvous.port, self._generation, rank, len(workers), self.backend,
                              self.timeout_s / 2, tuple(placed), tuple(shares), self.codec, self._secret)
                for rank, worker in enumerate(workers)}


def exchange_of(config: ClusterConfig, host: str, backend: Backend = "gloo") -> Exchange:
    """As the configuration has it, for workers that reach this machine as `host`."""
    codec: Codec | None = None if config.compression == "none" else config.compression
    return Exchange(host, config.exchange_timeout_s, backend=backend, codec=codec)


def _require_all(results: Sequence[JobResult], refs: Sequence[RemoteResultRef], why_lost: WhyLost) -> None:
    jobs = {result.job.identity: result.job for result in results}
    # the jobs had ended: whatever took the workers since says nothing against their data
    failures = [JobFailure(jobs[ref.identity], ref.worker, reason, True, from_outside=True)
                for ref in refs if (reason := why_lost(ref))]
    if failures:
        raise ResultsLost(failures)


def _pool(mean: Mean, statistics: Sequence[Vector], weights: Sequence[float], layers: Parts) -> None:
    """Sets the variances in `mean` to those of all data together, from the statistics of each result, end to end."""
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
