"""Averaging among the workers, without sending all parameters to the coordinator: worker side.

P parameters, N workers that hold accepted results. Each worker owns a shard of P / N elements.
Every worker sends every owner its part of the results that it holds (all-to-all: P (N - 1) / N
elements leave and as many arrive). An owner sums its shard over all results in the order of the
jobs, in float64, as `ngsgd.ops.averaging` does. It sends the mean to the coordinator
(`ngsgd.cluster.exchange.collective_client`), which concatenates the shards. The result is bitwise
identical to the mean computed by the coordinator.

Results stay unchanged in their worker until it begins the next outer iteration. If a group breaks,
only the results of dead workers are lost.

With a codec, the compressed parameter deltas of the jobs are transferred.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ngsgd.cluster.exchange.authentication import derive
from ngsgd.cluster.exchange.process_group import Backend, Bytes, Group, join
from ngsgd.cluster.exchange.shard_serialization import pack, parcel_size, shard_edges, unpack
from ngsgd.ops.averaging import CHUNK, mean_of_chunk
from ngsgd.ops.compression import Codec, Encoded
from ngsgd.training.job import Job, JobResult
from ngsgd.training.parameter_vector import FlatLayout, Mean, Vector

# outer iteration, number and attempt of a job
Identity = tuple[int, int, int]
# (mean, variance) of each normalization layer
Parts = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class RemoteResultRef:
    """A result that is stored in the worker that computed it."""

    worker: int
    # a replacement process in the same slot does not have the result
    process: str
    identity: Identity
    is_here = False

    def read(self) -> Vector:
        raise AssertionError("the pool must convert this to a RemoteRef, which can be read")


@dataclass(frozen=True)
class FetchRequest:
    """Request for a complete result."""

    identity: Identity


@dataclass(frozen=True)
class MeanRequest:
    """Request for the worker's shard of the mean."""

    # address of the rendezvous of the group
    host: str
    port: int
    generation: int
    rank: int
    world_size: int
    backend: Backend
    # seconds for the complete operation, including joining the group
    timeout_s: float
    # (rank of the holder, result), in the order of the sum
    results: tuple[tuple[int, Identity], ...]
    # weights; their sum is 1
    shares: tuple[float, ...]
    # None: parameters are transferred uncompressed
    codec: Codec | None
    # secret of this generation, transferred only with the request
    secret: bytes = field(repr=False)

    def key(self, sender: int, receiver: int, identity: Identity) -> bytes:
        """Key for the part of a result that one rank sends to another; empty within a process."""
        if sender == receiver:
            return b""
        return derive(self.secret, "parcel", self.generation, sender, receiver, *identity, str(self.codec))


@dataclass(frozen=True)
class MeanShard:
    """The reply to a MeanRequest."""

    generation: int
    mean: Mean
    layers: Parts
    # per result held here: the elements of `layers`, concatenated
    statistics: dict[Identity, Vector]


@dataclass(frozen=True)
class GroupFailure:
    """The reply to a MeanRequest if the group does not work."""

    generation: int
    reason: str


def process_name(process_id: int) -> str:
    """Name of a process of this machine, unique in the cluster."""
    return f"{os.uname().nodename}/{process_id}"


class _Kept(NamedTuple):
    """A result that is stored here."""

    vector: Vector
    # model that the job started from
    start: Vector
    encoded: Encoded | None


@dataclass
class CollectiveWorker:
    """Keeps the results of a worker, and averages its shard of all results."""

    worker: int
    layout: FlatLayout
    device: torch.device
    _kept: dict[Identity, _Kept] = field(default_factory=dict)
    _group: Group | None = None
    _generation: int = 0

    def keep(self, result: JobResult) -> JobResult:
        """Keep the vector here and return the result with a reference to it."""
        job = result.job
        self._kept[job.identity] = _Kept(result.sent.read(), job.start.model.read(), result.encoded)
        return replace(result, sent=RemoteResultRef(self.worker, process_name(os.getpid()), job.identity))

    def make_room(self, job: Job) -> None:
        """Free results that are obsolete when `job` begins: earlier outer iterations and
        attempts.
        """
        for identity in list(self._kept):
            # a repetition for the audit is compared with a result that may be here
            if identity[0] != job.outer_iter or (identity[1] == job.job and not job.repeat):
                del self._kept[identity]

    def fetch(self, identity: Identity) -> Vector:
        """Return a complete result without compression."""
        return self._kept[identity].vector

    def average(self, order: MeanRequest) -> MeanShard | GroupFailure:
        """Return the shard of the mean that belongs to this worker."""
        deadline = time.monotonic() + order.timeout_s
        try:
            return self._shard(order, self._joined(order), deadline)
        # torch.distributed raises RuntimeError; the others come from content that a peer forged
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            self.leave()
            # messages of gloo begin with the source line in brackets
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).split("\n", 1)[0])[:300]
            return GroupFailure(order.generation, reason or type(error).__name__)

    def leave(self) -> None:
        """Leave the group, if there is one."""
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
        # the received data are ordered by holder
        by_holder = sorted(range(len(order.results)), key=lambda index: (order.results[index][0], index))
        vectors = [np.empty(0, np.float32)] * len(by_holder)
        for place, index in enumerate(by_holder):
            holder, identity = order.results[index]
            vectors[index] = unpack(arrived[place * size:(place + 1) * size], own.stop - own.start, order.codec,
                                    order.key(holder, order.rank, identity))
        if order.codec is not None:
            # deltas from the model; rounded as the coordinator rounds the complete vectors
            start = self._kept[held[0]].start[own]
            vectors = [vector + start for vector in vectors]
        mean = np.empty(own.stop - own.start)
        for first in range(0, len(mean), CHUNK):
            part = slice(first, first + CHUNK)
            mean[part] = mean_of_chunk(vectors, order.shares, part)
        layers = self.layout.mean_and_variance()
        parts = [part for pair in layers for part in pair]
        return MeanShard(order.generation, mean, layers,
                     {identity: np.concatenate([np.empty(0, np.float32), *(self._kept[identity].vector[part] for part in parts)])
                      for identity in held})

    def _content(self, identity: Identity, codec: Codec | None) -> Vector | Encoded:
        kept = self._kept[identity]
        if codec is None:
            return kept.vector
        if kept.encoded is None:
            raise ValueError(f"job {identity[1]} was not compressed in {codec}")
        return kept.encoded


def _packed(contents: Mapping[Identity, Vector | Encoded], edges: Sequence[int], order: MeanRequest) -> tuple[Bytes, list[int]]:
    """Return all outgoing data, in the order of ranks, and the number of bytes for each rank."""
    shards = [slice(first, stop) for first, stop in pairwise(edges)]
    sizes = [parcel_size(shard.stop - shard.start, order.codec) for shard in shards]
    outgoing = np.empty(sum(sizes) * len(contents), np.uint8)
    filled = 0
    for receiver, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        for identity, content in contents.items():
            pack(content, shard, outgoing[filled:filled + size], order.key(order.rank, receiver, identity))
            filled += size
    return outgoing, [size * len(contents) for size in sizes]
