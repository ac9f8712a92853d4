"""Snapshots of jobs on other machines, kept on the machine of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ngsgd.cluster.exchange.shared_memory import SharedSnapshotMemory
from ngsgd.errors import ClusterError
from ngsgd.training.snapshots.packing import HEADER_BYTES, Block

# for a snapshot to arrive, before a worker that was asked to end continues to end
_SEND_S = 30.0


class SnapshotServer:
    """The actor next to the coordinator; its blocks use at most `num_bytes` bytes."""

    def __init__(self, num_bytes: float) -> None:
        self._left = num_bytes

    def write(self, memory: SharedSnapshotMemory, index: int, content: Block) -> bool:
        """Store a block, which has the identity of its job; return False without memory for it."""
        try:
            more = max(0, len(content) - len(memory.block(index)))
            if more > self._left:
                return False
            block = memory.room(index, len(content))
        except (OSError, ClusterError):
            return False
        self._left -= more
        block[:HEADER_BYTES] = 0
        block[HEADER_BYTES:len(content)] = content[HEADER_BYTES:]
        block[:HEADER_BYTES] = content[:HEADER_BYTES]
        return True

    def read(self, memory: SharedSnapshotMemory, index: int) -> Block:
        return memory.block(index)


def start_server(num_bytes: float) -> Any:
    """Start the actor on the node of this process."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(SnapshotServer).remote(num_bytes)


@dataclass
class RemoteSnapshotMemory:
    """Blocks of one job, for a worker on another machine; see `SnapshotMemory`."""

    memory: SharedSnapshotMemory
    server: Any
    is_empty: bool  # no attempt before this one has stored a snapshot
    _found: dict[int, Block] = field(default_factory=dict)
    _sent: Any = None  # ref of the answer to the last block
    _is_lost: bool = False

    def room(self, index: int, num_bytes: int) -> Block:
        return np.empty(num_bytes, np.uint8)

    def block(self, index: int) -> Block:
        if index not in self._found:
            self._found[index] = np.empty(0, np.uint8)
            if not self.is_empty and (found := self._answer(self.server.read.remote(self.memory, index))) is not None:
                self._found[index] = found
        return self._found[index]

    def is_ready(self) -> bool:
        """Whether the last block has arrived; a slow network has fewer snapshots."""
        if self._sent is not None and ray.wait([self._sent], timeout=0.0)[0]:
            self._is_lost, self._sent = not self._answer(self._sent), None
        return self._sent is None and not self._is_lost

    def written(self, index: int, block: Block, *, is_last: bool) -> None:
        try:
            self._sent = self.server.write.remote(self.memory, index, block)
        except RayError:
            # the object store of this node is full
            self._is_lost = True
        if is_last and self._sent is not None:
            # the job continues elsewhere as soon as this worker ends it
            self._answer(self._sent)

    def _answer(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=_SEND_S)
        except RayError:
            return None
