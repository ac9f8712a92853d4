"""The outer step among the workers, without sending results to the coordinator: worker side.

Each of N workers owns P / N parameters and receives that part of all results. It takes the outer
step of its part (`ngsgd.optim.outer`), bitwise as the coordinator would: element by element, in the
order of the jobs. It sends its shard of the next state to the coordinator
(`ngsgd.cluster.exchange.collective_client`), and that of the model from which jobs start to the
other workers. It keeps its shards of the last two states, under their digests, so that a step can
be repeated without some results.

Results stay unchanged in their worker until it begins the next outer iteration. If a group breaks,
only the results of dead workers are lost.

With a codec, the compressed parameter deltas of the jobs are transferred. Shards end between the
rows of the codecs, so a result is encoded once and then divided.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from ngsgd.cluster.exchange.authentication import TAG_BYTES, RefusedError, derive, is_tag, tag
from ngsgd.cluster.exchange.process_group import Backend, Bytes, Group, join
from ngsgd.cluster.exchange.selection import packed
from ngsgd.cluster.exchange.shared_memory import SharedRef
from ngsgd.ops.averaging import pool_variances
from ngsgd.ops.compression import ROW_LENGTH, Codec, Encoded, decode, num_bytes
from ngsgd.optim.outer import OuterInfo, OuterOptimizer, OuterRule
from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import Worker, np_empty

Identity = tuple[int, int, int]  # outer iteration, number and attempt of a job
_WORD = 8  # serialized shards are multiples of this many bytes


@dataclass(frozen=True)
class RemoteResultRef:
    """A result that is stored in the worker that computed it."""

    worker: int
    process: str  # a replacement process in the same slot does not have the result
    identity: Identity
    is_here = False

    def read(self) -> Vector:
        raise AssertionError("the pool must convert this to a RemoteRef, which can be read")


# digest -> model that this process gathered, of the last two steps
_models: dict[int, Vector] = {}


@dataclass(frozen=True)
class GatheredRef:
    """A model that the reading process has gathered."""

    digest: int
    is_here = True

    def read(self) -> Vector:
        """Return the model; raise RuntimeError without it, so that the job is retried."""
        if self.digest not in _models:
            raise RuntimeError("this process has not gathered the model that the job starts from")
        return _models[self.digest]


@dataclass(frozen=True)
class FetchRequest:
    """Request for a complete result."""

    identity: Identity


@dataclass(frozen=True)
class Step:
    """The outer step, for all owners."""

    # (rank of the holder, result), in the order of the sum
    results: tuple[tuple[int, Identity], ...]
    rule: OuterRule
    info: OuterInfo
    numbers: Mapping[str, float]  # coefficients of the last step
    weights: tuple[float, ...]  # of the results


@dataclass(frozen=True)
class StepRequest:
    """Request for the outer step of the worker's shard."""

    host: str  # address of the rendezvous of the group
    port: int
    generation: int
    rank: int
    world_size: int
    backend: Backend
    timeout_s: float  # seconds for the complete operation, including joining the group
    number: int  # of the request
    step: Step
    # array of the optimizer -> (digest of the worker's shard; the shard, unless the worker has it)
    state: Mapping[str, tuple[int, Vector | None]]
    codec: Codec | None  # None: parameters are transferred uncompressed
    # secret of this generation, transferred only with the request
    secret: bytes = field(repr=False)

    def key(self, sender: int, receiver: int, identity: tuple[int, ...], what: str = "shard") -> bytes:
        """Key for what one rank sends to another, or to all (-1); empty within a process."""
        if sender == receiver:
            return b""
        return derive(self.secret, what, self.generation, sender, receiver, *identity, str(self.codec))


@dataclass(frozen=True)
class StepShard:
    """The reply to a StepRequest."""

    generation: int
    arrays: dict[str, Vector]  # of the optimizer, after the step
    digests: frozenset[int]  # of the shards that the worker keeps
    model: int | None = None  # digest of the next start of jobs, if the worker has it
    reason: str = ""  # why it does not have it


@dataclass(frozen=True)
class GroupFailure:
    """The reply to a StepRequest if the group does not work."""

    generation: int
    reason: str


class _Kept(NamedTuple):
    vector: Vector
    start: Vector  # model that the job started from
    encoded: Encoded | None


@dataclass
class CollectiveWorker:
    """Keeps the results of a worker, and takes the outer step of its shard."""

    worker: int
    layout: FlatLayout
    device: torch.device
    _kept: dict[Identity, _Kept] = field(default_factory=dict)
    # digest -> shard of the state before or after the last step
    _shards: dict[int, Vector] = field(default_factory=dict)
    _group: Group | None = None
    _generation: int = 0

    def run(self, worker: Worker, job: Job, places: Sequence[SharedRef], heartbeat: Callable[[], bool], *,
            keep: bool) -> tuple[JobResult, Vector | None]:
        """Run a job; return the result, and the vector that only its next start needs.

        Vectors are written to shared `places`, as far as there are any. With `keep` the one to
        average stays here instead, for the outer step, unless this worker leaves.
        """
        self.make_room(job)
        left: list[SharedRef | None] = [*([None] if keep else []), *places]
        refs: dict[int, SharedRef] = {}

        def place(size: int) -> Vector:
            if not left or (ref := left.pop(0)) is None:
                return np_empty(size)
            vector = replace(ref, size=size).read()
            refs[id(vector)] = replace(ref, size=size)
            return vector
        result = worker.run(job, place, heartbeat)
        assert isinstance(result.sent, LocalRef)
        sent, own = result.sent.vector, result.own.vector if isinstance(result.own, LocalRef) else None
        shared = refs.get(id(own)) if own is not None else None
        result = replace(result, own=shared)
        own = None if shared is not None or own is sent else own
        if id(sent) in refs:
            return replace(result, sent=refs[id(sent)], encoded=None), own
        if keep and not worker.snapshots.is_leaving():
            return replace(self.keep(result), encoded=None), own
        return packed(result), own

    def keep(self, result: JobResult) -> JobResult:
        """Keep the vector here and return the result with a reference to it."""
        job = result.job
        self._kept[job.identity] = _Kept(result.sent.read(), job.start.model.read(), result.encoded)
        process = f"{os.uname().nodename}/{os.getpid()}"
        return replace(result, sent=RemoteResultRef(self.worker, process, job.identity))

    def make_room(self, job: Job) -> None:
        """Free results of earlier outer iterations and attempts when `job` begins."""
        for identity in list(self._kept):
            # a repetition for the audit is compared with a result that may be here
            if identity[0] != job.outer_iter or (identity[1] == job.job and not job.repeat):
                del self._kept[identity]

    def fetch(self, identity: Identity) -> Vector:
        """Return a complete result without compression."""
        return self._kept[identity].vector

    def step(self, order: StepRequest) -> StepShard | GroupFailure:
        """Return the shard of the next state that belongs to this worker."""
        deadline, shard = time.monotonic() + order.timeout_s, None
        try:
            if self._group is None or self._generation != order.generation:
                self.leave()
                self._group = join(order.backend, order.host, order.port, secret=order.secret, generation=order.generation,
                                   rank=order.rank, world_size=order.world_size, timeout_s=order.timeout_s, device=self.device)
                self._generation = order.generation
            shard, start = self._shard(order, self._group, deadline)
            model = self._gathered(start, order, self._group, deadline)
        # torch.distributed raises RuntimeError; the others come from content that a peer forged
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            self.leave()
            # messages of gloo begin with the source line in brackets
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).split("\n", 1)[0])[:300] or type(error).__name__
            return GroupFailure(order.generation, reason) if shard is None else replace(shard, reason=reason)
        name = digest(model)
        for old in (name, *list(_models)[:-1]):
            _models.pop(old, None)
        _models[name] = model
        return replace(shard, model=name)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _gathered(self, start: Vector, order: StepRequest, group: Group, deadline: float) -> Vector:
        """Return the complete model, of which `start` is this worker's shard."""
        def key(sender: int) -> bytes:
            return order.key(sender, -1, (order.number,), "model")
        sizes = [stop - first for first, stop in pairwise(shard_edges(self.layout.size, order.world_size))]
        in_sizes = [parcel_size(size, None) for size in sizes]
        parcel = np.empty(in_sizes[order.rank], np.uint8)
        pack(start, slice(0, len(start)), parcel, key(order.rank))
        arrived = group.all_to_all(np.tile(parcel, order.world_size), [len(parcel)] * order.world_size, in_sizes, deadline)
        parcels = np.split(arrived, list(accumulate(in_sizes))[:-1])
        return np.concatenate([unpack(parcel, size, None, key(sender))
                               for sender, (parcel, size) in enumerate(zip(parcels, sizes, strict=True))])

    def _shard(self, order: StepRequest, group: Group, deadline: float) -> tuple[StepShard, Vector]:
        """Return this worker's shard of the next state, and of the model that jobs start from."""
        shards = [slice(*pair) for pair in pairwise(shard_edges(self.layout.size, order.world_size))]
        own = shards[order.rank]
        held = {identity: self._kept[identity] for rank, identity in order.step.results if rank == order.rank}
        contents = {identity: kept.vector if kept.encoded is None else kept.encoded for identity, kept in held.items()}
        vectors = _exchanged(contents, shards, order, group, deadline)
        start = next(iter(held.values())).start[own]
        if order.codec is not None:
            # deltas from the model; rounded as the coordinator rounds the complete vectors
            vectors = [vector + start for vector in vectors]
        variances = self._share_statistics(held, vectors, own, order, group, deadline)
        before = self._before(order, start)
        optimizer = OuterOptimizer(order.step.rule, before["model"])
        optimizer.load_state_dict({"arrays": before, "numbers": order.step.numbers})
        optimizer.step(vectors, order.step.weights, order.step.info,
                       statistics=[_overlap(part, own)[0] for part in self.layout.statistics()])
        for part, values in variances if len(vectors) > 1 else ():
            optimizer.eval_model()[part] = values
        # not the start, which is a view of a complete model
        kept_shards = [*optimizer.arrays.values(), *(shard for shard in before.values() if shard is not start)]
        self._shards = {digest(shard): shard for shard in kept_shards}
        return StepShard(order.generation, optimizer.arrays, frozenset(self._shards)), optimizer.broadcast()

    def _before(self, order: StepRequest, start: Vector) -> dict[str, Vector]:
        """Return this worker's shard of the state before the step; ValueError if it is not here."""
        found = {name: self._shards.get(wanted, start) if given is None else given
                 for name, (wanted, given) in order.state.items()}
        for name, shard in found.items():
            if digest(shard) != order.state[name][0]:
                raise ValueError(f"the worker does not have its part of the {name} before the step")
        return found

    def _share_statistics(self, held: Mapping[Identity, _Kept], vectors: Sequence[Vector], own: slice, order: StepRequest,
                          group: Group, deadline: float) -> list[tuple[slice, Vector]]:
        """Return (part of this worker's shard, variances of all data) of each normalization layer.

        A code does not contain statistics: `vectors`, if they were compressed, receive them here.
        """
        layers = self.layout.mean_and_variance()
        parts = [part for pair in layers for part in pair]
        if not parts:
            return []
        ends = list(accumulate((part.stop - part.start for part in parts), initial=0))
        places = [slice(*pair) for pair in pairwise(ends)]
        found = _exchanged({identity: np.concatenate([kept.vector[part] for part in parts]) for identity, kept in held.items()},
                           [slice(0, ends[-1])] * order.world_size, replace(order, codec=None), group, deadline, "statistics")
        pooled = np.empty(ends[-1], np.float32)
        pool_variances(pooled, found, order.step.weights, list(zip(places[::2], places[1::2], strict=True)))
        inner = [_overlap(part, own) for part in parts]
        if order.codec is not None:
            for vector, statistics in zip(vectors, found, strict=True):
                for (target, source), place in zip(inner, places, strict=True):
                    vector[target] = statistics[place][source]
        return [(target, pooled[place][source]) for (target, source), place in zip(inner[1::2], places[1::2], strict=True)]


def _overlap(part: slice, own: slice) -> tuple[slice, slice]:
    """Return what two slices of the model have in common: (place in `own`, place in `part`)."""
    first = max(part.start, own.start)
    stop = max(first, min(part.stop, own.stop))
    return slice(first - own.start, stop - own.start), slice(first - part.start, stop - part.start)


def _exchanged(contents: Mapping[Identity, Vector | Encoded], shards: Sequence[slice], order: StepRequest, group: Group,
               deadline: float, what: str = "shard") -> list[Vector]:
    """Send each rank its shard of `contents`; return this rank's shard of all results, in order."""
    sizes = [parcel_size(shard.stop - shard.start, order.codec) for shard in shards]
    outgoing = np.empty(sum(sizes) * len(contents), np.uint8)
    filled = 0
    for receiver, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        for identity, content in contents.items():
            pack(content, shard, outgoing[filled:filled + size], order.key(order.rank, receiver, identity, what))
            filled += size
    own, size = shards[order.rank], sizes[order.rank]
    counts = Counter(holder for holder, _ in order.step.results)
    in_sizes = [size * counts[rank] for rank in range(order.world_size)]
    arrived = group.all_to_all(outgoing, [size * len(contents) for size in sizes], in_sizes, deadline)
    # the received data are ordered by holder
    by_holder = sorted(range(len(order.step.results)), key=lambda index: (order.step.results[index][0], index))
    vectors = [np.empty(0, np.float32)] * len(by_holder)
    for place, index in enumerate(by_holder):
        holder, identity = order.step.results[index]
        vectors[index] = unpack(arrived[place * size:(place + 1) * size], own.stop - own.start, order.codec,
                                order.key(holder, order.rank, identity, what))
    return vectors


def shard_edges(size: int, count: int) -> list[int]:
    """Offsets of the shards of `size` elements, and the end; rows of a codec are never split.

    Some shards may be empty.
    """
    num_rows = -(-size // ROW_LENGTH)
    return [min(size, num_rows * index // count * ROW_LENGTH) for index in range(count + 1)]


def parcel_size(num_elements: int, codec: Codec | None) -> int:
    """Bytes of a serialized shard of `num_elements` elements."""
    return -(-sum(_raw_sizes(num_elements, codec)) // _WORD) * _WORD + TAG_BYTES


def pack(content: Vector | Encoded, part: slice, parcel: Bytes, key: bytes) -> None:
    """Write one shard of a plain or encoded vector, and its authentication code, to `parcel`.

    `parcel` has `parcel_size` bytes. An empty key writes no code: the part stays in the process.
    """
    if isinstance(content, np.ndarray):
        raw = [content[part].view(np.uint8)]
    else:
        first, first_peak = num_bytes(part.start, content.codec)
        stop, last_peak = num_bytes(part.stop, content.codec)
        raw = [content.codes[first:stop], content.peaks.view(np.uint8)[first_peak:last_peak]]
    filled, end = sum(map(len, raw)), len(parcel) - TAG_BYTES
    np.concatenate(raw, out=parcel[:filled])
    parcel[filled:end] = 0
    parcel[end:] = np.frombuffer(tag(key, parcel[:end]), np.uint8) if key else 0


def unpack(parcel: Bytes, num_elements: int, codec: Codec | None, key: bytes) -> Vector:
    """Return the elements; raise RefusedError if they differ from those packed with this key."""
    if key and not is_tag(parcel[-TAG_BYTES:].tobytes(), key, parcel[:-TAG_BYTES]):
        raise RefusedError("a part of a result was damaged or forged in transfer")
    if codec is None:
        return parcel[:4 * num_elements].view(np.float32)
    num_codes, num_peaks = _raw_sizes(num_elements, codec)
    codes, peaks = parcel[:num_codes], parcel[num_codes:num_codes + num_peaks].copy().view(np.float32)
    return decode(Encoded(codec, num_elements, codes, peaks))


def _raw_sizes(num_elements: int, codec: Codec | None) -> tuple[int, int]:
    """(bytes of codes or numbers, bytes of peaks)."""
    return (4 * num_elements, 0) if codec is None else num_bytes(num_elements, codec)
