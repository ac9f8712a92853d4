"""Policies shared by pools of processes: replacement of workers, and fingerprint checks."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.counting import counted
from ngsgd.errors import ClusterError, FailureKind, WorkerFingerprintError
from ngsgd.interface import option
from ngsgd.training.auditing.pool import QUARANTINED
from ngsgd.training.job import JobFailure, Outcome
from ngsgd.training.worker_pool import Retired

_HOUR_S = 3600.0
MAX_RESTARTS_PER_HOUR = 60  # of one worker, after which a run continues without it


class Restarts:
    """Limits how often a worker is replaced within any hour; -1 means unlimited."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour = per_hour
        self._clock = clock
        self._times: dict[int, deque[float]] = defaultdict(deque)  # worker -> times of its restarts
        self._retired: list[Retired] = []
        self._reported: list[Retired] = []

    def allow(self, worker: int, reason: str) -> bool:
        """Count a restart; return False and retire the worker if the limit is exceeded."""
        now, times = self._clock(), self._times[worker]
        while times and times[0] <= now - _HOUR_S:
            times.popleft()
        if 0 <= self.per_hour <= len(times):
            self._retired.append(Retired(worker, (f"worker {worker} died ({reason}) and is not replaced, since it was "
                                                  f"replaced {counted(len(times), 'time')} within an hour, the limit. The "
                                                  "run continues with the other workers: check its machine, then stop and "
                                                  "resume the run to start it again.")))
            return False
        times.append(now)
        return True

    def news(self) -> list[Retired]:
        """Return incidents since the last call."""
        news, self._retired = self._retired, []
        return news

    def report(self, what: str, worker: int, message: str, kind: FailureKind = FailureKind.UNKNOWN) -> None:
        """Add an incident about a worker to `news`; duplicates are ignored."""
        incident = Retired(worker, message, what, kind)
        if incident not in self._reported:
            self._reported.append(incident)
            self._retired.append(incident)

    def refusal(self, worker: int, found: Fingerprint, agreement: Agreement, where: str = "", *, is_starting: bool) -> str:
        """Return the reason why a ready worker must not be used; empty if it may be used.

        Raises:
            ClusterError: the first workers of the run start, and differ.
        """
        differences = agreement.refusal(found, f"in worker {worker}{where}")
        if differences and is_starting:
            raise none_agrees(differences)
        if differences:
            self.report("worker_refused", worker, f"the process that replaces worker {worker} would not compute bitwise "
                        f"identical results ({differences}) and is not used; another one is started")
        for line in agreement.accepted():
            self.report("other_bits", worker, f"worker {worker} does not compute bitwise identical results, which "
                        f"{option('allow-other-bits')} allows: {line}")
        return differences

    def none_left(self, reason: str, kind: FailureKind = FailureKind.UNKNOWN) -> ClusterError:
        """Return the error for a run without workers, all of which are retired."""
        return ClusterError(f"no worker is left: each died more than {self.per_hour} times within an hour, the last one because "
                            f"it was {reason}; the last checkpoint is complete: find out why they die, then resume.", failure=kind)


def distrusted(outcome: Outcome, worker: int) -> Outcome:
    """Turn an outcome of a worker in quarantine into a failure for that reason."""
    if outcome.worker != worker:
        return outcome
    if isinstance(outcome, JobFailure):
        return replace(outcome, kind=FailureKind.QUARANTINED)
    return JobFailure(outcome.job, worker, f"its worker {QUARANTINED}", False, kind=FailureKind.QUARANTINED)


def none_agrees(differences: str) -> WorkerFingerprintError:
    """Return the error for a run whose workers would not compute bitwise identical results."""
    return WorkerFingerprintError("no worker would compute bitwise identical results of this run "
                        f"({differences}); install the same versions, compiler and settings on "
                        f"every machine, then resume, or accept other results with {option('allow-other-bits')}.")
