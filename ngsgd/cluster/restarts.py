"""Policies shared by pools of processes: replacement of workers, and fingerprint checks."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from ngsgd.cluster.exchange.collective_client import Exchange
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, WorkerFingerprintError
from ngsgd.interface import option
from ngsgd.training.auditing.pool import QUARANTINED, WorkerIdentity
from ngsgd.training.job import JobFailure, Outcome
from ngsgd.training.worker_pool import Retired

_HOUR_S = 3600.0


class Restarts:
    """Limits how often a worker is replaced within any hour; -1 means unlimited."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour = per_hour
        self._clock = clock
        # worker -> times of its restarts
        self._times: dict[int, deque[float]] = defaultdict(deque)
        self._retired: list[Retired] = []
        self._reported: list[Retired] = []

    def allow(self, worker: int, reason: str) -> bool:
        """Count a restart; return False and retire the worker if the limit is exceeded."""
        now, times = self._clock(), self._times[worker]
        while times and times[0] <= now - _HOUR_S:
            times.popleft()
        if 0 <= self.per_hour <= len(times):
            self._retired.append(Retired(worker, (
                f"worker {worker} died ({reason}) and is not replaced, since it was replaced "
                f"{counted(len(times), 'time')} within an hour, the limit of failure.max_restarts_per_hour. "
                "The run continues with the other workers: check its machine, then stop and resume "
                "the run to start it again.")))
            return False
        times.append(now)
        return True

    def news(self) -> list[Retired]:
        """Return incidents since the last call."""
        news, self._retired = self._retired, []
        return news

    def report(self, what: str, worker: int, message: str) -> None:
        """Add an incident about a worker to `news`; duplicates are ignored."""
        incident = Retired(worker, message, what)
        if incident not in self._reported:
            self._reported.append(incident)
            self._retired.append(incident)

    def none_left(self, reason: str) -> ClusterError:
        """Return the error for a run without workers, all of which are retired."""
        return ClusterError("no worker is left: each died more than failure.max_restarts_per_hour "
                            f"= {self.per_hour} times within an hour, the last one because it was "
                            f"{reason}; the last checkpoint is complete: find out why they die, "
                            "then resume.")


def incidents_of(exchange: Exchange | None) -> list[Retired]:
    """Failures of averaging among the workers since the last call, as incidents of a pool."""
    return [Retired(-1, message, "exchange_failed") for message in exchange.news()] if exchange else []


def check_fingerprint(worker: int, found: Fingerprint, agreement: Agreement, restarts: Restarts, *, is_starting: bool,
                      where: str = "") -> str:
    """Compare a ready worker with the fingerprint of the run.

    Returns:
        The differences if the worker must not be used; empty if it may be used.

    Raises:
        ClusterError: the first workers of the run start, and differ.
    """
    differences = agreement.refusal(found, f"in worker {worker}{where}")
    if differences and is_starting:
        raise none_agrees(differences)
    if differences:
        restarts.report("worker_refused", worker, f"the process that replaces worker {worker} "
                                                  "would not compute bitwise identical results "
                                                  f"({differences}) and is not used; another one "
                                                  "is started")
    for line in agreement.accepted():
        restarts.report("other_bits", worker, f"worker {worker} does not compute bitwise identical "
                                              f"results, which {option('allow-other-bits')} allows: {line}")
    return differences


def identity(worker: int, process_id: int, host: str, fingerprint: Fingerprint | None) -> WorkerIdentity:
    """Describe a worker for the audit."""
    device = fingerprint.device if fingerprint else ""
    where = f"process {process_id} on {host}" + (f", {device}" if device not in ("", "cpu") else "")
    bits = "" if fingerprint is None else fingerprint.digest()
    return WorkerIdentity(f"worker {worker} ({where})", host, bits, is_reproducible=device in ("", "cpu"))


def distrusted(outcome: Outcome, worker: int) -> Outcome:
    """Turn a result of a worker in quarantine into a failure."""
    if outcome.worker != worker or isinstance(outcome, JobFailure):
        return outcome
    return JobFailure(outcome.job, worker, f"its worker {QUARANTINED}", False)


def none_agrees(differences: str) -> WorkerFingerprintError:
    """Return the error for a run whose workers would not compute bitwise identical results."""
    return WorkerFingerprintError("no worker would compute bitwise identical results of this run "
                        f"({differences}); install the same versions, compiler and settings on "
                        f"every machine, then resume, or accept other results with {option('allow-other-bits')}.")
