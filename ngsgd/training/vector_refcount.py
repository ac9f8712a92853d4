"""Which parameter vectors are still needed, and by whom."""

from __future__ import annotations

from collections import Counter

from ngsgd.training.job import VectorRef
from ngsgd.training.worker_pool import WorkerPool


class VectorRefcount:
    """Gives a vector back to the pool when the last of those who need it says so."""

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
        """Gives a vector back unless somebody needs it."""
        self.acquire(ref)
        self.release(ref)
