"""The outer step among workers: coordinator side (workers: `ngsgd.cluster.exchange.collective`).

A change of members or a failure creates a new group of workers, with the next generation and a new
secret. If the group broke and every worker lives, the coordinator reads the results one by one.
Results of dead workers are lost, and their jobs run again before anything is averaged. Every result
is therefore counted exactly once.

After a failure the workers try again in the next outer iteration, then after 2, 4, ... 64 of them,
and whenever a worker joins. Results of the outer iterations between go to the coordinator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ngsgd.cluster.exchange.authentication import new_secret
from ngsgd.cluster.exchange.collective import GatheredRef, GroupFailure, RemoteResultRef, Step, StepRequest, StepShard, shard_edges
from ngsgd.cluster.exchange.process_group import Backend
from ngsgd.cluster.exchange.rendezvous import Rendezvous
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, FailureKind
from ngsgd.ops.compression import Codec
from ngsgd.optim.outer import OuterInfo, OuterOptimizer
from ngsgd.training.job import Job, JobFailure, JobResult, ResultsLost, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.validation.checksums import digest

# (requests by worker, timeout in seconds, callback for a dead worker) -> answers that arrived in
# time; the other workers are killed
Ask = Callable[[Mapping[int, StepRequest], float, Callable[[], None]], dict[int, object]]
# outer iterations between two tries of a group that fails: each may cost half of the timeout
_MAX_PAUSE = 64
# for a worker to send its part of an average, after which it counts as hanging; and bytes per
# second of the slowest link that a model may take longer on
EXCHANGE_TIMEOUT_S, _SLOWEST = 60.0, 10e6


@dataclass(frozen=True)
class Ending:
    """How a worker process ended, or why it is killed."""

    reason: str
    kind: FailureKind = FailureKind.UNKNOWN


Member = tuple[int, str]  # worker and its process
# how the process that stores a result ended; None while it lives
WhyLost = Callable[[RemoteResultRef], Ending | None]


@dataclass(eq=False)
class RemoteRef:
    """Reference of the coordinator to a result stored in a worker; `read` transfers it."""

    kept: RemoteResultRef
    job: Job
    digest: int
    fetch: Callable[[RemoteResultRef], Vector]  # raises ClusterError if the worker is gone
    is_here = False

    def save(self) -> None:
        """Transfer the vector while its worker lives, which is about to end."""
        with contextlib.suppress(ClusterError):
            vector = self.fetch(self.kept)
            self.fetch, self.is_here = lambda _kept: vector, True

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
    """Sends requests to the workers, and concatenates their shards of the next state.

    Args:
        host: name of this machine in the network of the workers.
        timeout_s: after which a silent worker is killed, and longer for large models (`limit_s`);
            None: `EXCHANGE_TIMEOUT_S`.
        backend: of the group.
        codec: of the parameter deltas; None: parameters are transferred.
    """

    def __init__(self, host: str, timeout_s: float | None = None, *,
                 backend: Backend = "gloo", codec: Codec | None = None) -> None:
        self.host, self.backend, self.codec = host, backend, codec
        self.timeout_s = EXCHANGE_TIMEOUT_S if timeout_s is None else timeout_s
        # open while a group forms; one of NCCL needs it as long as it lives
        self._rendezvous: Rendezvous | None = None
        self._secret = b""
        self._members: tuple[Member, ...] = ()
        # digests of the shards, and of the next model, that each one has
        self._shards: dict[Member, frozenset[int]] = {}
        self._models: dict[Member, int | None] = {}
        self._number = 0  # of the last request
        self._generation = 0
        self._num_failures = 0  # consecutive
        self.next_try = 0  # outer iteration
        self._reason = ""  # of the last failure
        self._news: list[str] = []

    def step(self, optimizer: OuterOptimizer, results: Sequence[JobResult], weights: Sequence[float], info: OuterInfo,
             ask: Ask, why_lost: WhyLost) -> bool:
        """Take the outer step; False, and no change, if the group broke. May raise ResultsLost."""
        refs = [result.sent.kept for result in results if isinstance(result.sent, RemoteRef) and not result.sent.is_here]
        # otherwise some results are here already, and all are read here
        is_tried = len(refs) == len(results) and self.is_open(info.outer_iter)
        self._reason, is_done = "", False
        _require_all(results, refs, why_lost)
        if is_tried:
            is_done = self._step(optimizer, refs, info, weights, ask)
        if not is_done:
            _require_all(results, refs, why_lost)
        if self._reason:
            # the workers of all results live
            self._failed(info.outer_iter, is_done=is_done)
        elif is_done:
            self._num_failures = 0
        return is_done

    def _failed(self, outer_iter: int, *, is_done: bool) -> None:
        """Plan the next try, and report the first of consecutive failures."""
        self.close()
        self._num_failures += 1
        self.next_try = outer_iter + min(2 ** (self._num_failures - 1), _MAX_PAUSE)
        if self._num_failures > 1:
            return
        found = self._rendezvous
        strangers = "" if found is None or not found.num_refused else (
            f"; {counted(found.num_refused, 'connection')} to {found.host}:{found.port} failed "
            "authentication: a process outside the run connects there")
        failed, instead = (("exchange the next model", "sends it") if is_done else
                           ("average among themselves", "averages, with the same result"))
        self._news.append(f"the workers could not {failed} ({self._reason}{strangers}), so the coordinator {instead}. They try "
                          f"again in the next outer iteration, then after 2, 4, ... {_MAX_PAUSE}, and when a worker joins; check "
                          "that the machines of the cluster, and no others, reach each other on all ports.")

    def is_open(self, outer_iter: int) -> bool:
        """Whether the workers try to take the step of an outer iteration, and keep results."""
        return not self._num_failures or outer_iter >= self.next_try

    def limit_s(self, size: int) -> float:
        """Seconds for an exchange of models of `size` elements, after which a worker is killed."""
        return self.timeout_s + 2 * 4 * size / _SLOWEST

    def start_of(self, member: Member, model: VectorRef, name: int | None) -> VectorRef:
        """Return a reference to a model that names its digest, if the worker gathered it."""
        return model if name is None or self._models.get(member) != name else GatheredRef(name)

    def forget(self, member: Member) -> None:
        """Send a worker the next model whether it gathered it or not."""
        self._models.pop(member, None)

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

    def _step(self, optimizer: OuterOptimizer, refs: Sequence[RemoteResultRef], info: OuterInfo, weights: Sequence[float],
              ask: Ask) -> bool:
        limit_s = self.limit_s(len(optimizer.eval_model()))
        try:
            orders = self._orders(refs, optimizer, info, weights, limit_s / 2)
        except ClusterError as error:
            self._reason = str(error).rstrip(".")
            return False
        answers = ask(orders, limit_s, self.close)
        shards = {worker: answer for worker in orders if isinstance(answer := answers.get(worker), StepShard)
                  and answer.generation == self._generation}
        if len(shards) < len(orders):
            failures = (answer.reason for answer in answers.values() if isinstance(answer, GroupFailure))
            self._reason = next(failures, "no answer in time")
            # the workers may have taken the step, and keep the models of two steps
            self._models.clear()
            self.close()
            return False
        self._reason = next((shard.reason for shard in shards.values() if shard.reason), "")
        if self.backend == "gloo":
            # all members are connected; only an NCCL group needs its rendezvous longer
            self._close_rendezvous()
        optimizer.adopt([shard.arrays for shard in shards.values()], info)
        self._shards = {member: shards[member[0]].digests for member in self._members}
        self._models = {member: shards[member[0]].model for member in self._members}
        return True

    def _orders(self, refs: Sequence[RemoteResultRef], optimizer: OuterOptimizer, info: OuterInfo, weights: Sequence[float],
                limit_s: float) -> dict[int, StepRequest]:
        """Return a request per worker, in the order of ranks."""
        members = tuple(sorted({(ref.worker, ref.process) for ref in refs}))
        is_revoked = self.backend == "nccl" and self._rendezvous is not None and self._rendezvous.is_closed
        if self._rendezvous is None or members != self._members or is_revoked:
            self._close_rendezvous()
            self._secret = new_secret()
            self._rendezvous = Rendezvous(self.host, self._secret, revokes=self.backend == "nccl")
            self._members = members
            self._generation += 1
        self._number += 1
        ranks = {worker: rank for rank, (worker, _) in enumerate(members)}
        placed = tuple((ranks[ref.worker], ref.identity) for ref in refs)
        step = Step(placed, optimizer.rule, info, optimizer.numbers, tuple(weights))
        edges = shard_edges(len(optimizer.eval_model()), len(members))
        states = [self._state(optimizer, slice(*own), member) for own, member in zip(pairwise(edges), members, strict=True)]
        # half of the time is for the group: a worker that waits for a silent member answers well
        # before it would be killed
        return {member[0]: StepRequest(self.host, self._rendezvous.port, self._generation, rank, len(members), self.backend,
                                       limit_s, self._number, step, states[rank], self.codec, self._secret)
                for rank, member in enumerate(members)}

    def _state(self, optimizer: OuterOptimizer, own: slice, member: Member) -> dict[str, tuple[int, Vector | None]]:
        """Return the digests of a shard before the step, and what its owner does not have of it."""
        state: dict[str, tuple[int, Vector | None]] = {}
        for name in ("model", *optimizer.rule.buffers):
            shard = optimizer.arrays[name][own]
            found = digest(shard)
            # jobs start from the model, so their workers have it
            is_there = found in self._shards.get(member, ()) or (name == "model" and optimizer.broadcasts_model)
            state[name] = found, None if is_there else shard.copy()
        return state


def _require_all(results: Sequence[JobResult], refs: Sequence[RemoteResultRef], why_lost: WhyLost) -> None:
    jobs = {result.job.identity: result.job for result in results}
    # the jobs had ended, so the death of their workers is no evidence against their data
    failures = [JobFailure(jobs[ref.identity], ref.worker, lost.reason, True, from_outside=True, kind=lost.kind)
                for ref in refs if (lost := why_lost(ref))]
    if failures:
        raise ResultsLost(failures)
