"""Averaging among the workers, so that parameters do not all pass through the coordinator: the workers' part.

P parameters, N workers that hold accepted results.  Each worker owns a shard, a stretch of P / N elements.  Every worker sends
every owner its part of the results that it holds (all-to-all: P (N - 1) / N elements go out, and as many come in); an owner sums
its shard over all results in the order of the jobs, in float64, as `ngsgd.ops.averaging` does, and sends the mean to the
coordinator (`ngsgd.cluster.exchange.collective_client`), which lays the shards end to end: the
bits are those of the coordinator's own mean.

Results stay where they are, untouched, until their worker begins the next outer iteration: when a group breaks, nothing is lost
but what the dead worker held.

With a codec the moves travel, parameters minus the model that the jobs were given, and what encoding loses of a move is added
to the same job's next one.  That memory is the worker's: a worker in the place of a dead one begins without.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from ngsgd.cluster.exchange.authentication import derive
from ngsgd.cluster.exchange.process_group import Backend, Bytes, Group, join
from ngsgd.cluster.exchange.shard_serialization import pack, parcel_size, shard_edges, unpack
from ngsgd.ops.averaging import CHUNK, mean_of_chunk
from ngsgd.ops.compression import Codec, Encoded, ErrorFeedback
from ngsgd.training.job import Job, JobResult
from ngsgd.training.parameter_vector import FlatLayout, Mean, Vector

# of a job: outer iteration, number, attempt
Identity = tuple[int, int, int]
# (mean, variance) of each normalisation layer
Parts = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class RemoteResultRef:
    """A result that lies in the worker that made it."""

    worker: int
    # another process in the same slot does not have it
    process: str
    identity: Identity
    is_here = False

    def read(self) -> Vector:
        raise AssertionError("the pool turns this into a RemoteRef, which can be read")


@dataclass(frozen=True)
class FetchRequest:
    """Asks a worker for a whole result."""

    identity: Identity


@dataclass(frozen=True)
class MeanRequest:
    """Asks a worker for its shard of the mean."""

    # of the rendezvous of the group
    host: str
    port: int
    generation: int
    rank: int
    world_size: int
    backend: Backend
    # for all of it, joining included
    timeout_s: float
    # (rank of the holder, which), in the order of the sum
    results: tuple[tuple[int, Identity], ...]
    # weights that sum to one
    shares: tuple[float, ...]
    # None: parameters travel as they are
    codec: Codec | None
    # of this generation; travels with the order alone
    secret: bytes = field(repr=False)

    def key(self, sender: int, receiver: int, identity: Identity) -> bytes:
        """For the part of a result that one rank sends to another; none for what stays in its process."""
        if sender == receiver:
            return b""
        return derive(self.secret, "parcel", self.generation, sender, receiver, *identity, str(self.codec))


@dataclass(frozen=True)
class MeanShard:
    """The answer to an order."""

    generation: int
    mean: Mean
    layers: Parts
    # of each result held here: the elements of `layers`, end to end
    statistics: dict[Identity, Vector]


@dataclass(frozen=True)
class GroupFailure:
    """The other answer: the group does not work."""

    generation: int
    reason: str


def process_name(process_id: int) -> str:
    """Of a process of this machine, in the whole cluster."""
    return f"{os.uname().nodename}/{process_id}"


@dataclass
class CollectiveWorker:
    """A worker's part: it keeps its results, and averages a shard of everybody's."""

    worker: int
    layout: FlatLayout
    device: torch.device
    # result, and the model it started from
    _kept: dict[Identity, tuple[Vector, Vector]] = field(default_factory=dict)
    _lanes: dict[int, ErrorFeedback] = field(default_factory=dict)               # by job number
    # by a lane before it sent a result
    _owed: dict[Identity, Vector | None] = field(default_factory=dict)
    _group: Group | None = None
    _generation: int = 0

    def keep(self, result: JobResult) -> JobResult:
        """The result with a reference in place of its vector, which stays here."""
        job = result.job
        self._kept[job.identity] = result.sent.read(), job.start.model.read()
        return replace(result, sent=RemoteResultRef(self.worker, process_name(os.getpid()), job.identity))

    def make_room(self, job: Job) -> None:
        """Lets go of what nobody needs once `job` begins: earlier outer iterations, and earlier tries at the same job."""
        for identity in list(self._kept):
            if identity[0] != job.outer_iter or identity[1] == job.job:
                del self._kept[identity]
                self._owed.pop(identity, None)

    def fetch(self, identity: Identity) -> Vector:
        """A whole result, as it was made."""
        # the coordinator averages that: what may have been sent of it did not count
        self._lane(identity)
        return self._kept[identity][0]

    def average(self, order: MeanRequest) -> MeanShard | GroupFailure:
        """This worker's shard of the mean."""
        deadline = time.monotonic() + order.timeout_s
        try:
            return self._shard(order, self._joined(order), deadline)
        # RuntimeError is what torch.distributed raises; the others come from content that a peer
        # forged
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            self.leave()
            # gloo begins with the line of its source in brackets
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).split("\n", 1)[0])[:300]
            return GroupFailure(order.generation, reason or type(error).__name__)

    def leave(self) -> None:
        """Leaves the group, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _joined(self, order: MeanRequest) -> Group:
        if self._group is None or self._generation != order.generation:
            self.leave()
            self._group = join(order.backend, order.host, order.port, secret=order.secret, generation=order.generation,
                               rank=order.rank, world_size=order.world_size, timeout_s=order.timeout_s, device=self.device)
            self._generation = order.generation
        return self._group

    def _shard(self, order: MeanRequest, group: Group, deadline: float) -> MeanShard:
        edges = shard_edges(self.layout.size, order.world_size)
        own = slice(edges[order.rank], edges[order.rank + 1])
        held = [identity for rank, identity in order.results if rank == order.rank]
        outgoing, out_sizes = _packed({identity: self._content(identity, order.codec) for identity in held}, edges, order)
        size = parcel_size(own.stop - own.start, order.codec)
        in_sizes = [size * sum(holder == rank for holder, _ in order.results) for rank in range(order.world_size)]
        arrived = group.all_to_all(outgoing, out_sizes, in_sizes, deadline)
        vectors = [unpack(arrived[first:first + size], own.stop - own.start, order.codec,
                          order.key(holder, order.rank, identity))
                   for first, (holder, identity) in zip(_places(order.results, size), order.results, strict=True)]
        mean = _mean(vectors, order.shares, own.stop - own.start)
        if order.codec is not None:
            # what arrived were moves from there
            mean += self._kept[held[0]][1][own]
        layers = self.layout.mean_and_variance()
        return MeanShard(order.generation, mean, layers,
                     {identity: _gathered(self._kept[identity][0], layers) for identity in held})

    def _content(self, identity: Identity, codec: Codec | None) -> Vector | Encoded:
        vector, start = self._kept[identity]
        if codec is None:
            return vector
        lane = self._lane(identity)
        lane.codec = codec
        self._owed[identity] = lane.error
        return lane.encode(vector - start)

    def _lane(self, identity: Identity) -> ErrorFeedback:
        """The error feedback of a job, as it was before the result was sent for the first time."""
        lane = self._lanes.setdefault(identity[1], ErrorFeedback("bf16"))
        if identity in self._owed:
            lane.error = self._owed.pop(identity)
        return lane


def _packed(contents: Mapping[Identity, Vector | Encoded], edges: Sequence[int], order: MeanRequest) -> tuple[Bytes, list[int]]:
    """All that goes out, in the order of ranks, and how many bytes go to each."""
    shards = [slice(first, stop) for first, stop in pairwise(edges)]
    sizes = [parcel_size(shard.stop - shard.start, order.codec) for shard in shards]
    outgoing = np.empty(sum(sizes) * len(contents), np.uint8)
    filled = 0
    for receiver, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        for identity, content in contents.items():
            pack(content, shard, outgoing[filled:filled + size], order.key(order.rank, receiver, identity))
            filled += size
    return outgoing, [size * len(contents) for size in sizes]


def _places(results: Sequence[tuple[int, Identity]], size: int) -> list[int]:
    """Where each result's parcel begins among those that arrived, which lie in the order of their holders."""
    by_holder = sorted(range(len(results)), key=lambda index: (results[index][0], index))
    found = [0] * len(results)
    for place, index in enumerate(by_holder):
        found[index] = place * size
    return found


def _mean(vectors: Sequence[Vector], shares: Sequence[float], size: int) -> Mean:
    mean = np.empty(size)
    for first in range(0, size, CHUNK):
        part = slice(first, first + CHUNK)
        mean[part] = mean_of_chunk(vectors, shares, part)
    return mean


def _gathered(vector: Vector, layers: Parts) -> Vector:
    return np.concatenate([vector[part] for pair in layers for part in pair]) if layers else np.empty(0, np.float32)

