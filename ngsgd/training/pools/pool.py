"""Where jobs run: the protocol that the coordinator drives, and the pool inside this very process."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ngsgd.errors import ClusterError, DamagedArchiveError
from ngsgd.training.exchange.groups import Exchange
from ngsgd.training.fingerprint import OVERRIDE, Agreement, Fingerprint
from ngsgd.training.flat import Mean, Vector
from ngsgd.training.job import Held, Job, JobFailure, JobResult, Outcome, VectorRef, WorkerSpec
from ngsgd.training.process import settle
from ngsgd.training.worker import Worker, never, np_empty

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Retired:
    """A worker that died too often to be replaced once more, or another incident that only the pool sees."""

    worker: int     # -1: not about one
    message: str    # one sentence: what was seen, and what to do
    what: str = "worker_retired"   # kind of incident


class Restarts:
    """Whether a worker that died may be replaced once more: at most so many times within any hour; -1 for always."""

    def __init__(self, per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_hour = per_hour
        self._clock = clock
        self._times: dict[int, deque[float]] = defaultdict(deque)  # of the restarts, by worker
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


class WorkerPool(Protocol):
    """N long-lived workers.  A pool reports how a job ended; what to do about it is the coordinator's business."""

    def start(self) -> None:
        """Waits until the workers are ready; ClusterError when they cannot be had."""

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        """Lets `write` fill a vector of the model's size, which the workers can then read."""

    def release(self, ref: VectorRef) -> None:
        """What this pool published, or a worker sent, is not needed any more."""

    def mean(self, results: Sequence[JobResult], weights: Sequence[float]) -> Mean | None:
        """The weighted mean of what the workers sent, where they can make it among themselves; None: the coordinator has to.

        It has the coordinator's bits.  Raises ResultsLost where workers are gone with their results.
        """

    def num_idle(self) -> int:
        """Workers that could take a job now."""

    def num_workers_alive(self) -> int:
        """Workers that are running a job or could take one."""

    def retired(self) -> list[Retired]:
        """Workers that were given up since the last call."""

    def submit(self, job: Job) -> None:
        """Gives a job to an idle worker."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """How a running job ended; None when none has within the time (the in-process pool ignores it)."""

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        """For each worker that has a job: which, and a number that changes with every minibatch."""

    def kill(self, worker: int, reason: str) -> None:
        """Ends a worker that hangs; its job is then reported as failed for that reason, and another worker replaces it."""

    def stop_jobs(self) -> None:
        """Asks the workers to end their jobs after the minibatch at hand and to return what they have."""

    def abandon(self) -> None:
        """Gives up the jobs that are running."""

    def close(self) -> None:
        """Ends the workers."""


class InProcessPool:
    """Logical workers in this process, one job at a time: breakpoints work, and the numbers are those of any pool."""

    def __init__(self, spec: WorkerSpec, num_workers: int, num_threads: int,
                 should_stop: Callable[[], bool] = never, agreement: Agreement | None = None) -> None:
        self.spec = spec
        self.num_workers = num_workers
        self.num_threads = num_threads
        self.should_stop = should_stop
        self.agreement = agreement
        self._queue: deque[Job] = deque()

    def start(self) -> None:
        settle(self.num_threads)
        self._worker = Worker(self.spec, 0)
        if self.agreement is not None and (differences := self.agreement.refusal(
                Fingerprint.of_this_process(self.num_threads, self._worker.device))):
            raise none_agrees(differences)

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        write(vector := np_empty(self._worker.layout.size))
        return Held(vector)

    def release(self, ref: VectorRef) -> None:
        pass

    def mean(self, results: Sequence[JobResult], weights: Sequence[float]) -> Mean | None:
        return None

    def num_idle(self) -> int:
        return self.num_workers - len(self._queue)

    def num_workers_alive(self) -> int:
        return self.num_workers

    def retired(self) -> list[Retired]:
        return []

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def wait(self, timeout_s: float) -> Outcome | None:
        if not self._queue:
            return None
        job = self._queue.popleft()
        # a job leaves nothing behind in its worker, so one object can stand for all
        self._worker.index = job.job % self.num_workers
        try:
            result: JobResult = self._worker.run(job, np_empty, self.should_stop)
        except DamagedArchiveError as error:  # whether to go on without it is not the pool's business
            return JobFailure(job, self._worker.index, str(error), False, error)
        return result

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        return {}

    def kill(self, worker: int, reason: str) -> None:
        raise AssertionError("a job in this process cannot be killed")

    def stop_jobs(self) -> None:
        pass

    def abandon(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()
