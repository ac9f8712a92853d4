"""Workers of a trial that keep their results and take the outer step among themselves.

`Exchange` and `CollectiveWorker` are production code. Each member of a group runs in a thread, and
the data of a transfer do not depend on the order of the threads. A fault ends a member, makes it
silent, breaks its link, or damages the data that it receives, at a drawn transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ngsgd.cluster.exchange import collective, collective_client
from ngsgd.cluster.exchange.collective import CollectiveWorker, RemoteResultRef, StepRequest
from ngsgd.errors import ClusterError
from ngsgd.ops.compression import ROW_LENGTH
from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout, Vector
from tests.simulation.world import Fault, World

# without a code, so that a model of twelve parameters has several shards
_ROW_LENGTH = 4


class _EndedError(BaseException):
    """A member sends nothing more."""


class _Models(MutableMapping[int, Vector]):
    """The models that the running process gathered; each process has its own."""

    def __init__(self) -> None:
        self.local = threading.local()

    @property
    def _own(self) -> dict[int, Vector]:
        found: dict[int, Vector] = self.local.models
        return found

    def __getitem__(self, name: int) -> Vector:
        return self._own[name]

    def __setitem__(self, name: int, model: Vector) -> None:
        self._own[name] = model

    def __delitem__(self, name: int) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


_MODELS = _Models()


class _Rendezvous:
    """A port that needs no network, other than all before."""

    def __init__(self, port: int, host: str) -> None:
        self.host, self.port, self.is_closed, self.num_refused = host, port, False, 0

    def close(self) -> None:
        self.is_closed = True


@dataclass
class _Links:
    """What the members of a group have sent, by transfer and rank."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class _Group:
    """The links of one member."""

    def __init__(self, links: _Links, rank: int, size: int) -> None:
        self.links, self.rank, self.size = links, rank, size
        self._number = 0
        # in the present step
        self.fault: Fault | None = None
        self.fails_at = -1

    def all_to_all(self, outgoing: Any, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Any:
        number, links = self._number, self.links
        self._number += 1
        what = self.fault.what if self.fault and number == self.fails_at else ""
        if what in ("kill", "silent"):
            self.close()
            raise _EndedError
        if what == "link":
            raise RuntimeError("the link is broken")
        with links.changed:
            sent = links.sent.setdefault(number, {})
            sent[self.rank] = np.split(outgoing.copy(), np.cumsum(out_sizes)[:-1])
            links.changed.notify_all()
            links.changed.wait_for(lambda: len(sent) == self.size or bool(links.gone - sent.keys()))
            if len(sent) < self.size:
                raise RuntimeError("a member is gone")
            parts = [sent[other][self.rank].copy() for other in range(self.size)]
        # its own part stays in the process
        for part in parts[:self.rank] + parts[self.rank + 1:] if what == "damage" else ():
            part[:1] ^= 1
        return np.concatenate(parts)

    def expect(self, fault: Fault | None) -> None:
        """Let a fault occur in a transfer of the next step."""
        self.fault = fault
        self.fails_at = self._number + int(fault.value) if fault else -1

    def close(self) -> None:
        with self.links.changed:
            self.links.gone.add(self.rank)
            self.links.changed.notify_all()


class Owner:
    """One worker process, with the results that it keeps and the models that it gathered."""

    def __init__(self, worker: int, process: int, layout: FlatLayout) -> None:
        self.process = str(process)
        self.fault: Fault | None = None
        self._models: dict[int, Vector] = {}
        self._worker = CollectiveWorker(worker, layout, torch.device("cpu"))
        self.make_room, self.fetch = self._worker.make_room, self._worker.fetch

    @contextmanager
    def active(self) -> Iterator[None]:
        """Read and write the models of this process in this thread."""
        _MODELS.local.models = self._models
        try:
            yield
        finally:
            _MODELS.local.models = {}

    def keep(self, result: JobResult) -> JobResult:
        kept = self._worker.keep(result)
        assert isinstance(kept.sent, RemoteResultRef)
        return replace(kept, sent=replace(kept.sent, process=self.process), encoded=None)

    def step(self, order: StepRequest, fault: Fault | None) -> object:
        """Take the step of a shard; None without an answer."""
        self.fault = fault
        group: Any = self._worker._group
        if group is not None:
            group.expect(fault)
        with self.active():
            _MODELS.local.owner = self
            try:
                return self._worker.step(order)
            except _EndedError:
                return None


def steps(orders: Mapping[int, StepRequest], owners: Mapping[int, Owner], faults: Mapping[int, Fault]) -> dict[int, object]:
    """Return the answers of all members, each of which works in a thread."""
    answers: dict[int, object] = {}

    def work(worker: int) -> None:
        answers[worker] = owners[worker].step(orders[worker], faults.get(worker))
    threads = [threading.Thread(target=work, args=(worker,)) for worker in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {worker: answer for worker, answer in sorted(answers.items()) if answer is not None}


@contextmanager
def simulated(world: World, *, has_codec: bool) -> Iterator[None]:
    """Replace the network of the exchange."""
    links: dict[int, _Links] = {}
    lock = threading.Lock()

    def join(_backend: str, _host: str, port: int, *, rank: int, world_size: int, **_more: Any) -> _Group:
        with lock:
            found = links.setdefault(port, _Links())
        owner: Owner = _MODELS.local.owner
        group = _Group(found, rank, world_size)
        group.expect(owner.fault)
        return group

    def listen(host: str, _secret: bytes, **_more: Any) -> _Rendezvous:
        if world.due("port"):
            raise ClusterError("this machine cannot listen on its own address.")
        return _Rendezvous(world.counts["port"], host)
    _MODELS.local.models = {}
    with patch.object(collective, "_models", _MODELS), patch.object(collective, "join", join), \
            patch.object(collective_client, "Rendezvous", listen), \
            patch.object(collective, "ROW_LENGTH", ROW_LENGTH if has_codec else _ROW_LENGTH):
        yield

