"""A group of torch.distributed ranks that continues without ranks that die."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ngsgd.cluster.exchange.process_group import nccl_options
from ngsgd.cluster.replicas.exchanged_tensors import Exchanged, buckets, content_of, overwrite
from ngsgd.errors import ClusterError

# seconds between two heartbeats, and seconds without one after which a rank counts as dead
_BEAT_S, _SILENT_S = 0.5, 4.0
_POLL_S = 0.05
# new groups of the same ranks in a row, after which the collective itself is at fault
_MAX_EQUAL_GROUPS = 3
# by default group of the process: how many groups of equal ranks were created
_COUNTS: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


class LostRankError(Exception):
    """A collective failed: a rank is dead, late, or has left the group."""


class RankGroup:
    """A separate group of the ranks of `process_group`, which can be left when a rank dies."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(), sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self._backend = dist.get_backend(process_group)
        # NCCL has no collectives of the CPU
        self._device = device if self._backend == "nccl" else torch.device("cpu")
        self._timeout_s = timeout_s
        # groups of other ranks have other names in the rendezvous store
        name = hashlib.sha256(json.dumps(self.ranks).encode()).hexdigest()[:16]
        counts = _COUNTS.setdefault(dist.group.WORLD, Counter())
        self._prefix = f"ngsgd/local_sgd/{name}/{counts[name]}"
        counts[name] += 1
        self.num_regroups, self._num_equal_groups = 0, 0
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="ngsgd-local-sgd", daemon=True)
        self._group: Any = self._guarded(self._new_group)

    def start(self) -> None:
        """Publish heartbeats from now on."""
        self._heart.start()
        # Python ends a thread inside torch's C++ code by std::terminate, which aborts the process
        atexit.register(_stop, self._heart, self._closed)

    def stop(self) -> None:
        """End the thread of the heartbeats."""
        if self._heart.ident is not None:
            _stop(self._heart, self._closed)

    # Collectives ----------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over all ranks."""
        self._guarded(dist.all_reduce, tensor, group=self._group, async_op=True)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of rank `source`."""
        self._guarded(dist.broadcast, tensor, source, group=self._group, async_op=True)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, which are equally many."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        found = [torch.empty_like(own) for _ in self.ranks]
        self._guarded(dist.all_gather, found, own, group=self._group, async_op=True)
        return [one.tolist() for one in found]

    def gather_texts(self, text: str) -> list[str]:
        """Return the text of each rank."""
        content = text.encode()
        sizes = [size for size, in self.gather([len(content)])]
        padded = self.gather(list(content.ljust(max(sizes))))
        return [bytes(numbers[:size]).decode() for numbers, size in zip(padded, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._guarded(dist.barrier, group=self._group, async_op=True)

    def equalize(self, tensors: Sequence[Exchanged], source: int) -> None:
        """Set tensors to those of rank `source`, bitwise."""
        for bucket in buckets(tensors):
            contents = [content_of(one) for one in bucket]
            packed = torch.cat(contents).to(self._device if self._backend == "nccl" else contents[0].device)
            self.broadcast(packed, source)
            if self.rank != source:
                for one, content in zip(bucket, packed.split([len(content) for content in contents]), strict=True):
                    overwrite(one, content)

    def _guarded(self, collective: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        try:
            # otherwise torch only queues a collective of NCCL, and a dead rank is never detected
            found = collective(*arguments, **settings)
            if isinstance(found, dist.Work):
                found.wait()
            return found
        except (torch.OutOfMemoryError, NotImplementedError):
            # these are a RuntimeError, but no fault of another rank
            raise
        except RuntimeError as error:
            raise LostRankError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    # Members --------------------------------------------------------------------------------------

    def _new_group(self) -> dist.ProcessGroup:
        """Create a group under a name that contains its ranks."""
        # the names of `dist.new_group` count groups, which differ between processes
        default: Any = dist.group.WORLD
        with nccl_options(self._timeout_s) if self._backend == "nccl" else contextlib.nullcontext() as options:
            group: dist.ProcessGroup
            group, _ = c10d._new_process_group_helper(
                len(self.ranks), self.ranks.index(self.rank), self.ranks, c10d.Backend(self._backend), c10d._get_default_store(),
                f"{self._prefix}/group/{self.num_regroups}",  # type: ignore[arg-type]
                backend_options=options, timeout=timedelta(seconds=self._timeout_s), device_id=default.bound_device_id)
        c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(self.ranks)}
        return group

    def leave(self) -> None:
        """Close the connections, so that neighbors detect it immediately."""
        with contextlib.suppress(Exception):
            # the destructor of NCCL waits for operations that never complete
            (c10d._abort_process_group if self._backend == "nccl" else dist.destroy_process_group)(self._group)
        self._group = None

    def regroup(self, error: LostRankError) -> None:
        """Form a group of the ranks that announce themselves in the store.

        Raises:
            ClusterError: the store is gone, this rank is too late, or the collective is at fault.
        """
        while True:
            self.leave()
            # the connections close when nothing refers to the group
            traceback.clear_frames((error.__cause__ or error).__traceback__)
            members = self._members(error)
            self._num_equal_groups = self._num_equal_groups + 1 if members == self.ranks else 0
            if self._num_equal_groups > _MAX_EQUAL_GROUPS:
                raise ClusterError(f"an exchange between ranks {members} failed {_MAX_EQUAL_GROUPS + 1} times, although they "
                                   f"are alive ({error}); look for the cause on the network or in the backend "
                                   f"({self._backend}), and restart from the last state_dict().") from error
            self.ranks = members
            try:
                self._group = self._guarded(self._new_group)
                return
            except LostRankError as lost:
                error = lost

    def succeeded(self) -> None:
        """Note that all collectives of an average succeeded."""
        self._num_equal_groups = 0

    def _members(self, error: LostRankError) -> list[int]:
        self.num_regroups += 1
        prefix = f"{self._prefix}/{self.num_regroups}"
        try:
            store: Any = c10d._get_default_store()
            store.set(f"{prefix}/{self.rank}", "1")
            present = self._announced(store, prefix)
            # the first rank to decide decides for all
            members: list[int] = json.loads(store.compare_set(f"{prefix}/members", "", json.dumps(present)))
        except (RuntimeError, ValueError) as lost:
            raise ClusterError(f"the process of the rendezvous store ended ({str(lost).splitlines()[0]}), so the live ranks "
                               "cannot find each other; restart from the last state_dict().") from error
        if self.rank not in members:
            raise ClusterError(f"rank {self.rank} answered too late and was excluded; restart it from "
                               "the state_dict() of another rank.")
        return members

    def _announced(self, store: Any, prefix: str) -> list[int]:
        """Return the announced ranks; wait for live ranks that are still in their round."""
        deadline = time.monotonic() + self._timeout_s
        beats = {one: (b"", time.monotonic()) for one in self.ranks}
        while True:
            now = time.monotonic()
            present = [one for one in self.ranks if store.check([f"{prefix}/{one}"])]
            for one in self.ranks:
                beat = store.get(self._alive(one)) if store.check([self._alive(one)]) else b""
                if beat != beats[one][0]:
                    beats[one] = (beat, now)
            awaited = [one for one in self.ranks if one not in present and now - beats[one][1] < _SILENT_S]
            if not awaited or now > deadline:
                return present
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        count = 0
        with contextlib.suppress(Exception):
            # a separate connection, because another thread may block on the first one
            store = c10d._get_default_store()
            store = store.clone() if hasattr(store, "clone") else store
            while not self._closed.wait(_BEAT_S):
                count += 1
                store.set(self._alive(self.rank), str(count))

    def _alive(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"


def _stop(heart: threading.Thread, closed: threading.Event) -> None:
    closed.set()
    heart.join(_SILENT_S)
