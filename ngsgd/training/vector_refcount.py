"""Reference counts of parameter vectors."""

from __future__ import annotations

from collections import Counter

from ngsgd.training.job import VectorRef
from ngsgd.training.worker_pool import WorkerPool


class VectorRefcount:
    """Releases a vector to the pool when its last user releases it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._needed: Counter[int] = Counter()
        self._refs: dict[int, VectorRef] = {}

    def acquire(self, ref: VectorRef | None) -> None:
        if ref is not None:
            self._refs[id(ref)] = ref  # keeps the object, and so its id, alive
            self._needed[id(ref)] += 1

    def release(self, ref: VectorRef | None) -> None:
        if ref is None:
            return
        self._needed[id(ref)] -= 1
        if not self._needed[id(ref)]:
            del self._needed[id(ref)]
            self.pool.release(self._refs.pop(id(ref)))

    def release_if_unused(self, ref: VectorRef | None) -> None:
        """Release a vector to the pool unless it has users."""
        self.acquire(ref)
        self.release(ref)
