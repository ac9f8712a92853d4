"""What pools of processes share: whether a worker is replaced, and whether a worker computes the run's bits."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from ngsgd.cluster.exchange.collective_client import Exchange
from ngsgd.cluster.fingerprint import OVERRIDE, Agreement, Fingerprint
from ngsgd.errors import ClusterError
from ngsgd.training.worker_pool import Retired

_HOUR_S = 3600.0


class Restarts:
    """Whether a worker that died may be replaced once more: at most so many times within any hour; -1 for always."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour = per_hour
        self._clock = clock
        # of the restarts, by worker
        self._times: dict[int, deque[float]] = defaultdict(deque)
        self._retired: list[Retired] = []
        self._reported: list[Retired] = []

    def allow(self, worker: int, reason: str) -> bool:
        """Counts a restart after a death for that reason; False, and the worker is retired, where it would be one too many."""
        now, times = self._clock(), self._times[worker]
        while times and times[0] <= now - _HOUR_S:
            times.popleft()
        if 0 <= self.per_hour <= len(times):
            self._retired.append(Retired(worker, (
                f"worker {worker} died ({reason}) and is not replaced, as it was {len(times)} times within an hour, which is what "
                "failure.max_restarts_per_hour allows; the run goes on with the others: look at its machine, then stop the run "
                "and resume to have it back.")))
            return False
        times.append(now)
        return True

    def news(self) -> list[Retired]:
        """Those retired since the last call."""
        news, self._retired = self._retired, []
        return news

    def report(self, what: str, worker: int, message: str) -> None:
        """Have `news` return an incident about a worker; the same one once only."""
        incident = Retired(worker, message, what)
        if incident not in self._reported:
            self._reported.append(incident)
            self._retired.append(incident)

    def none_left(self, reason: str) -> ClusterError:
        """The error for a run all of whose workers are retired."""
        return ClusterError(f"no worker is left: each died more than failure.max_restarts_per_hour = {self.per_hour} times within "
                            f"an hour, the last one because it was {reason}; the last checkpoint is whole: see why they die, then "
                            "resume.")


def incidents_of(exchange: Exchange | None) -> list[Retired]:
    """Failures of averaging among the workers since the last call, as a pool reports them."""
    return [Retired(-1, message, "exchange_failed") for message in exchange.news()] if exchange else []


def check_fingerprint(worker: int, found: Fingerprint, agreement: Agreement, restarts: Restarts, *, is_starting: bool,
                      where: str = "") -> str:
    """How a worker that is ready differs from the run's fingerprint, and must not be used for it; empty if it may be used.

    Raises ClusterError while the run's first workers start.
    """
    differences = agreement.refusal(found, f"in worker {worker}{where}")
    if differences and is_starting:
        raise none_agrees(differences)
    if differences:
        restarts.report("worker_refused", worker, f"the process that replaces worker {worker} would compute other bits than the "
                                                  f"run ({differences}) and is not used; another one is started")
    for line in agreement.accepted():
        restarts.report("other_bits", worker, f"worker {worker} computes other bits, as {OVERRIDE} allows: {line}")
    return differences


def none_agrees(differences: str) -> ClusterError:
    """The error for a run whose workers would compute other bits."""
    return ClusterError(f"no worker would compute the bits of this run ({differences}); give every machine the same versions, "
                        f"compiler and settings, then resume; or accept other bits with {OVERRIDE}.")
