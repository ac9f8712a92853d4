"""A WorkerPool over Ray actors, on this machine or on a cluster.

Each worker slot holds one long-lived actor. An actor that dies fails the job it was running, and a
replacement is started in its slot while the other workers continue; retrying the job is the
coordinator's decision.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ngsgd.cluster.activity import Activity
from ngsgd.cluster.exchange.collective import FetchRequest, MeanRequest, RemoteResultRef
from ngsgd.cluster.exchange.collective_client import Exchange, exchange_of, remote
from ngsgd.cluster.exchange.compressed import unpacked
from ngsgd.cluster.exchange.process_group import Backend
from ngsgd.cluster.exchange.selection import Way, choose_way
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedVectors
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.restarts import Restarts, check_fingerprint, identity, incidents_of, none_agrees
from ngsgd.config import ClusterConfig
from ngsgd.data.fetching.files import RemoteData
from ngsgd.errors import ClusterError
from ngsgd.interface import option
from ngsgd.launcher.ray.cluster import (
    cause_of,
    connect,
    exchange_error,
    gpu_share,
    how_it_ended,
    log_folder,
    require_cpus,
    room_for_workers,
    shutdown,
)
from ngsgd.launcher.ray.folders import UnseenFolder
from ngsgd.launcher.ray.head import HeadWatch
from ngsgd.launcher.ray.node_data import NodeData
from ngsgd.launcher.ray.worker import Address, RayWorker
from ngsgd.training.auditing.pool import QUARANTINED, WorkerIdentity
from ngsgd.training.awake_clock import AwakeClock
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Mean, Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker_pool import Retired
from ngsgd.training.worker_wait import WorkerWait

_PING_S = 5.0
_POLL_S = 0.2
_NAMES: Mapping[Way, str] = {"shared_memory": "shared memory, and Ray's object store between machines",
                             "object_store": "Ray's object store", "collective": "gloo, averaged by the workers",
                             "nccl": "NCCL, averaged by the workers"}
# for an object to arrive that Ray reports as available; the largest model takes seconds
_FETCH_S = 300.0


@dataclass(frozen=True)
class _StoreRef:
    """A vector in Ray's object store."""

    ref: Any
    # what a worker returns is fetched when it arrives: it would die with the worker's node
    is_here = True

    def read(self) -> Vector:
        try:
            vector: Vector = ray.get(self.ref, timeout=_FETCH_S)
        except GetTimeoutError as error:
            raise ClusterError(f"Ray's object store did not return a vector within {_FETCH_S:g} s; see whether its memory is "
                               "full (ray memory), then resume.") from error
        return vector


@dataclass
class WorkerSlot:
    """One worker: its actor and its current job."""

    index: int
    actor: Any
    # ref that resolves when the actor can take jobs
    ready: Any
    process: Address | None = None  # once ready
    # how the process before this one ended
    predecessor: str = ""
    job: Job | None = None
    # ref of the job's result
    running: Any = None
    # ref of what only the job's next start needs
    own: Any = None
    places: tuple[SharedRef, ...] = ()
    # ref of the answer to how many minibatches are done
    asked: Any = None
    answered: int = 0
    # while it starts, and ref of the next answer
    activity: Activity | None = None
    probe: Any = None
    killed_because: str = ""
    deaths: list[str] = field(default_factory=list)
    # it died too often: nothing comes after it
    retired: bool = False
    # the audit found it at fault: nothing comes after it
    is_quarantined: bool = False

    @property
    def is_idle(self) -> bool:
        return self.is_usable and self.job is None

    @property
    def is_usable(self) -> bool:
        return self.process is not None and not self.is_quarantined

    @property
    def pending(self) -> Any:
        """The ref to wait for, or None."""
        return self.ready if self.process is None else self.running


class RayPool:
    """Long-lived Ray actors, one job at a time each.

    Parameters pass through memory that the actors on the coordinator's machine share with it, and
    through Ray's object store to and from all others. Or the coordinator receives the mean alone,
    which the workers make among themselves.
    """

    def __init__(self, spec: TaskSpec, num_threads: int, size: int, agreement: Agreement | None = None,
                 report: Callable[[str], object] = lambda _line: None, folders: Sequence[str] = ()) -> None:
        self.spec = spec
        # that every worker must see or fetch
        self.folders = folders
        self._data = NodeData(spec, report)
        # takes lines of progress
        self._report = report
        # the head of a cluster may be another kind of machine, but its code and libraries are the
        # workers'
        self.agreement = agreement or Agreement(Fingerprint.of_this_process(num_threads).without_machine())
        self.config: ClusterConfig = spec.settings.cluster
        self.num_threads = num_threads
        self._vectors = SharedVectors(size)
        self._cells = SharedVectors(2 * self.config.num_workers)
        # copies of shared vectors for workers on other machines
        self._in_store: dict[SharedRef, _StoreRef] = {}
        self._slots: list[WorkerSlot] = []
        self._owns_ray = False
        self._is_starting = True
        self._restarts = Restarts(spec.settings.failure.max_restarts_per_hour)
        self._head: HeadWatch | None = None
        # a message refers to them
        self._keeps_logs = False
        # where the workers make the mean
        self._exchange: Exchange | None = None

    def start(self) -> None:
        self._owns_ray = connect(self.config)
        if self.config.exchange == "nccl" and self.gpus_per_worker() < 1.0:
            raise ClusterError("cluster.exchange is nccl, which takes one GPU per worker, and Ray offers fewer; set "
                               "cluster.exchange=auto.")
        self._head = HeadWatch(ray.get_runtime_context().gcs_address)
        self._heartbeats = self._cells.allocate()
        self._spec_ref = ray.put(self.spec)
        num_cpus = 0 if self._owns_ray else self.num_threads * self.config.ranks_per_worker
        require_cpus(num_cpus, self.config.address or self._head.address)
        options: dict[str, Any] = {"num_cpus": num_cpus, "max_restarts": 0,
                                   "num_gpus": self.gpus_per_worker(), "concurrency_groups": {"control": 1}}
        self._actor_class = ray.remote(**options)(RayWorker)
        self._slots = [self._new_slot(index) for index in range(self.config.num_workers)]
        clock, wait, total = AwakeClock(), WorkerWait(self.config.wait_for_workers_s, self._report), len(self._slots)
        while (up := sum(slot.process is not None for slot in self._slots)) < total:
            self._poll(_POLL_S)
            clock.tick()
            if wait.is_over(clock.now, up, total, total, self.has_busy_start):
                raise ClusterError(
                    f"{up} of {total} workers were ready after cluster.wait_for_workers_s = "
                    f"{self.config.wait_for_workers_s:g}{room_for_workers(num_cpus)}; ask for fewer (cluster.num_workers, or "
                    f"resume with {option('workers', 'N', 'num_workers')}), or give them more time.")
        self._is_starting = False
        self._way = self.chosen_exchange()
        if self._way in ("collective", "nccl"):
            backend: Backend = "nccl" if self._way == "nccl" else "gloo"
            self._exchange = exchange_of(self.config, ray.util.get_node_ip_address(), backend)

    def publish(self, write: Callable[[Vector], object]) -> VectorRef:
        ref = self._vectors.allocate()
        self._in_store.pop(ref, None)
        write(ref.read())
        return ref

    def release(self, ref: VectorRef) -> None:
        if isinstance(ref, SharedRef):
            self._in_store.pop(ref, None)
            self._vectors.release(ref)

    def mean(self, results: Sequence[JobResult], weights: Sequence[float]) -> Mean | None:
        if self._exchange is None:
            # the vectors are here already, and memory is faster than any message
            return None
        idle = {slot.index: slot.actor.minibatches.options(concurrency_group="control").remote()
                for slot in self._slots if slot.is_idle}
        # those that died since their job are found before anybody waits for them
        self._answers(idle, _PING_S)
        return self._exchange.mean(results, weights, self._ask, self._why_lost)

    def num_idle(self) -> int:
        return sum(slot.is_idle for slot in self._slots)

    def num_workers_alive(self) -> int:
        return sum(slot.is_usable for slot in self._slots)

    def idle_workers(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_idle]

    def workers_alive(self) -> list[int]:
        return [slot.index for slot in self._slots if slot.is_usable]

    def worker_of(self, job: Job) -> int:
        return next((slot.index for slot in self._slots if slot.job is job), -1)

    def identity_of(self, worker: int) -> WorkerIdentity:
        process = self._slots[worker].process
        return (identity(worker, process.process_id, process.host, process.fingerprint) if process
                else WorkerIdentity(f"worker {worker}"))

    def quarantine(self, worker: int) -> str:
        slot = self._slots[worker]
        slot.is_quarantined, slot.killed_because = True, QUARANTINED
        if slot.process is not None:
            self._kill(slot)
            if slot.job is None:
                # nothing else reports its end
                self._replace(slot, QUARANTINED)
        return "It is not used again or replaced, because its replacement could run on the same hardware"

    def has_busy_start(self) -> bool:
        found = False
        for slot in self._slots:
            if slot.process is None and slot.ready is not None:
                # the answer to the question of the last call
                if slot.probe is not None and ray.wait([slot.probe], timeout=0.0)[0]:
                    with contextlib.suppress(RayError):
                        before, slot.activity = slot.activity, ray.get(slot.probe, timeout=_PING_S)
                        found |= slot.activity is not None and slot.activity.is_busy(before)
                    slot.probe = None
                if slot.probe is None:
                    slot.probe = slot.actor.activity.options(concurrency_group="control").remote()
        return found

    def retired(self) -> list[Retired]:
        return [*self._restarts.news(), *incidents_of(self._exchange)]

    def submit(self, job: Job) -> None:
        # the same job goes to the same slot where it can, so that charts per worker stay comparable
        idle = [slot for slot in self._slots if slot.is_idle]
        self.submit_to(job, min(idle, key=lambda s: (s.index != job.job % len(self._slots), s.index)).index)

    def submit_to(self, job: Job, worker: int) -> None:
        slot = self._slots[worker]
        assert slot.process
        slot.job = job
        if slot.process.shares_memory and self._way == "shared_memory":
            slot.places = tuple(self._vectors.allocate() for _ in range(job.num_vectors))
        else:
            start = replace(job.start, model=self._portable(job.start.model), own=job.start.own and self._portable(job.start.own))
            job = replace(job, start=start)
        slot.running, slot.own = slot.actor.run.options(num_returns=2).remote(job, slot.places, self._exchange is not None)

    def wait(self, timeout_s: float) -> Outcome | None:
        assert self._head
        self._head.check()
        return self._poll(timeout_s)

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        found = {}
        heartbeats = self._heartbeats.map().view(np.uint64)
        for slot in self._slots:
            if slot.job is not None and slot.process:
                done = int(heartbeats[slot.index]) if slot.process.shares_memory else self._asked(slot)
                found[slot.index] = (slot.job.identity, done)
        return found

    def kill(self, worker: int, reason: str) -> None:
        slot = self._slots[worker]
        slot.killed_because = reason
        self._kill(slot)

    def stop_jobs(self, outer_iter: int) -> None:
        for slot in self._slots:
            if slot.job is not None and slot.job.outer_iter == outer_iter:
                slot.actor.stop.options(concurrency_group="control").remote()

    def abandon(self) -> None:
        """Kills the workers that are busy; the pool can only be closed afterwards."""
        for slot in self._slots:
            if slot.job is not None:
                ray.kill(slot.actor)

    def close(self) -> None:
        # asking a lost one would end this process
        head_is_there = self._head is not None and not self._head.is_lost
        for slot in self._slots if head_is_there else ():
            ray.kill(slot.actor)
        if head_is_there:
            self._data.close()
        self._slots = []
        self._vectors.close()
        self._cells.close()
        if self._exchange:
            self._exchange.close()
        if self._owns_ray and head_is_there:
            shutdown(keep_logs=self._keeps_logs)

    def process_ids(self) -> list[int]:
        """Of the workers that are ready, by slot."""
        return [slot.process.process_id for slot in self._slots if slot.process]

    def _portable(self, ref: VectorRef) -> VectorRef:
        """The same vector where a worker on another machine can read it."""
        if not isinstance(ref, SharedRef):
            return ref
        if ref not in self._in_store:
            self._in_store[ref] = _StoreRef(ray.put(ref.read()))
        return self._in_store[ref]

    def chosen_exchange(self) -> Way:
        """The way of results to the average; "shared_memory" for those workers that can, the object
        store for the others.

        It stays when a worker's replacement comes up on another machine or GPU. Workers that NCCL
        cannot connect any more make the coordinator average, with bitwise identical results.
        """
        devices = [slot.process.device for slot in self._slots if slot.process]
        way, reason = choose_way(self.config.exchange, devices, jobs_keep_state=self.spec.settings.outer.jobs_keep_state)
        if self.config.exchange != "auto" or any(device.gpu or not device.is_near for device in devices):
            self._report(f"parameters travel by {_NAMES[way]}: {reason}")
        return way

    def _ask(self, questions: Mapping[int, MeanRequest | FetchRequest], timeout_s: float,
             when_lost: Callable[[], None]) -> dict[int, object]:
        """What idle workers answer; those that are silent for too long are killed and replaced."""
        refs = {worker: self._slots[worker].actor.answer.remote(question) for worker, question in questions.items()}
        answers = self._answers(refs, timeout_s, when_lost)
        for worker in refs.keys() - answers.keys():
            slot = self._slots[worker]
            # else it died, and was replaced
            if slot.process is not None:
                self._kill(slot)
                self._replace(slot, f"gave no answer for {timeout_s:g} s and was killed")
        return answers

    def _answers(self, refs: Mapping[int, Any], timeout_s: float, when_lost: Callable[[], None] = lambda: None
                 ) -> dict[int, object]:
        """The answers that come in time; workers that died are replaced."""
        answers: dict[int, object] = {}
        waiting = {ref: worker for worker, ref in refs.items()}
        # a worker that was stopped together with this process still has its time
        clock = AwakeClock()
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=min(_POLL_S, max(0.0, timeout_s - clock.now)))
            clock.tick()
            if not done and clock.now >= timeout_s:
                break
            if not done:
                continue
            worker = waiting.pop(done[0])
            try:
                answers[worker] = ray.get(done[0], timeout=_FETCH_S)
            except RayTaskError as error:
                raise exchange_error(error) from error
            except RayError as error:
                self._replace(self._slots[worker], how_it_ended(error))
                when_lost()
        return answers

    def _fetch(self, kept: RemoteResultRef) -> Vector:
        """Fetch a complete result from its worker."""
        reason = self._why_lost(kept)
        request = {kept.worker: FetchRequest(kept.identity)}
        answers = {} if reason else self._ask(request, self.config.exchange_timeout_s, lambda: None)
        vector = answers.get(kept.worker)
        if not isinstance(vector, np.ndarray):
            raise ClusterError(reason or self._why_lost(kept))
        return vector

    def _why_lost(self, kept: RemoteResultRef) -> str:
        """How the process ended that keeps a result; empty while it lives."""
        slot = self._slots[kept.worker]
        lives = slot.process and f"{slot.process.host}/{slot.process.process_id}" == kept.process
        return "" if lives else f"process {kept.process} {slot.predecessor or 'is gone'}, and its result with it"

    def _asked(self, slot: WorkerSlot) -> int:
        """The minibatches that a worker on another machine last reported as done; a worker that
        hangs reports nothing new.
        """
        if slot.asked is not None and ray.wait([slot.asked], timeout=0.0)[0]:
            # its death is reported by the job
            with contextlib.suppress(RayError):
                slot.answered = ray.get(slot.asked, timeout=_PING_S)
            slot.asked = None
        if slot.asked is None:
            slot.asked = slot.actor.minibatches.options(concurrency_group="control").remote()
        return slot.answered

    def _kill(self, slot: WorkerSlot) -> None:
        # at once, where Ray first asks a stopped process for seconds
        if slot.process and slot.process.shares_memory:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.process.process_id, signal.SIGKILL)
        else:
            ray.kill(slot.actor)

    def _poll(self, timeout_s: float) -> Outcome | None:
        """Waits for one thing to happen: a job ends, or a worker becomes ready (then None)."""
        by_ref = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        done, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if not done:
            return None
        slot = by_ref[done[0]]
        if slot.process is None:
            self._finish_start(slot)
            return None
        return self._finish_job(slot)

    def _finish_start(self, slot: WorkerSlot) -> None:
        try:
            address: Address | UnseenFolder = ray.get(slot.ready, timeout=_FETCH_S)
        except RayTaskError as error:
            raise cause_of(error) from error
        except RayError as error:
            # one death while starting may be bad luck, and one that cannot start is no reason to
            # end a run that has others
            slot.deaths.append(how_it_ended(error))
            is_alone = self._is_starting or not self.num_workers_alive()
            if len(slot.deaths) >= self.spec.settings.failure.max_attempts and is_alone:
                self._keeps_logs = True
                where = f" in {log_folder()}" if log_folder() else ""
                raise ClusterError(f"worker {slot.index} died {len(slot.deaths)} times while starting "
                                   f"({slot.deaths[-1]}); see the Ray log of its node{where}.") from error
            self._replace(slot, slot.deaths[-1])
        else:
            if isinstance(address, UnseenFolder):
                self._start_blind(slot, address)
            else:
                self._admit(slot, address)

    def _start_blind(self, slot: WorkerSlot, unseen: UnseenFolder) -> None:
        """Let a worker fetch the data that its node does not see, or refuse it."""
        remote = None if unseen.reason else self._data.for_node(unseen)
        if remote is None:
            self._refuse_blind(slot, unseen.message(self.spec.settings.output_dir))
            return
        slot.ready = self._prepare(slot.actor, slot.index, remote)

    def _refuse_blind(self, slot: WorkerSlot, message: str) -> None:
        """Replace a worker whose node does not see the data; raise if the run only starts."""
        if self._is_starting:
            raise ClusterError(f"{message}.")
        self._restarts.report("worker_refused", slot.index, f"the process that replaces worker {slot.index} is not used, and "
                                                            f"another one is started: {message}")
        self._refuse(slot, message, ClusterError(f"{message}."))

    def _admit(self, slot: WorkerSlot, address: Address) -> None:
        """Take jobs to a worker that is ready, unless it would compute other bits than the run."""
        differences = check_fingerprint(slot.index, address.fingerprint, self.agreement, self._restarts,
                                        is_starting=self._is_starting, where=f" on {address.host}")
        if not differences:
            slot.process = address
            return
        self._refuse(slot, differences, none_agrees(differences))

    def _refuse(self, slot: WorkerSlot, reason: str, error: ClusterError) -> None:
        """Start another process in the slot; raise the error where that happened too often."""
        slot.deaths.append(f"was refused ({reason})")
        if len(slot.deaths) >= self.spec.settings.failure.max_attempts and not self.num_workers_alive():
            raise error
        ray.kill(slot.actor)
        self._replace(slot, slot.deaths[-1])

    def _finish_job(self, slot: WorkerSlot) -> Outcome:
        job, slot.job = slot.job, None
        assert job is not None
        own, slot.own = slot.own, None
        places, slot.places = slot.places, ()
        try:
            result: JobResult = ray.get(slot.running, timeout=_FETCH_S)
            if slot.is_quarantined:
                return self._distrusted(slot, job, places)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            for place in places:
                self._vectors.release(place)
            return JobFailure(job, slot.index, f"{type(cause or error).__name__}: {cause or error}", False, cause)
        except RayError as error:
            # the out-of-memory killer's error is no RayActorError
            is_killed = bool(slot.killed_because)
            reason = slot.killed_because or how_it_ended(error)
            process = slot.process
            # whether its process is really gone is not known on every machine
            for place in places:
                self._vectors.discard(place)
            self._replace(slot, reason)
            where = f"process {process.process_id} on {process.host}: " if process else ""
            return JobFailure(job, slot.index, where + reason, True, from_outside=is_killed)
        finally:
            slot.running = None
        slot.deaths.clear()
        # the job as it was submitted: its references may have been made portable
        result = unpacked(remote(replace(result, job=job), self._fetch))
        if job.keep_own and result.own is None:
            return replace(result, own=result.sent if job.num_vectors == 1 else _StoreRef(own))
        return result

    def _distrusted(self, slot: WorkerSlot, job: Job, places: Sequence[SharedRef]) -> JobFailure:
        """The end of a job whose worker was killed by the audit after it had finished."""
        for place in places:
            self._vectors.discard(place)
        self._replace(slot, QUARANTINED)
        return JobFailure(job, slot.index, f"its worker {QUARANTINED}", True, from_outside=True)

    def _new_slot(self, index: int) -> WorkerSlot:
        actor = self._actor_class.remote()
        return WorkerSlot(index, actor, self._prepare(actor, index))

    def _prepare(self, actor: Any, index: int, remote: RemoteData | None = None) -> Any:
        return actor.prepare.remote(self._spec_ref, index, self.num_threads, self._heartbeats, self.folders, remote,
                                    has_kernels=self.agreement.has_kernels)

    def _replace(self, slot: WorkerSlot, reason: str) -> None:
        slot.predecessor, slot.process, slot.ready = reason, None, None
        if not slot.is_quarantined and self._restarts.allow(slot.index, reason):
            fresh = self._new_slot(slot.index)
            slot.actor, slot.ready, slot.activity, slot.probe = fresh.actor, fresh.ready, None, None
        else:
            slot.retired = True
            if all(other.retired for other in self._slots):
                raise self._restarts.none_left(reason)
        slot.killed_because, slot.asked, slot.answered = "", None, 0

    def gpus_per_worker(self) -> float:
        num_gpus = 0.0 if self.config.device == "cpu" else float(ray.cluster_resources().get("GPU", 0.0))
        if self.config.device == "cuda" and not num_gpus:
            raise ClusterError("cluster.device is cuda, but Ray sees no GPU; set cluster.device=auto or cpu.")
        size = self.config.ranks_per_worker
        if size == 1 or not num_gpus:
            return gpu_share(num_gpus, self.config.num_workers)
        if num_gpus < size * self.config.num_workers:
            raise ClusterError(f"{self.config.num_workers} workers of {size} ranks need a GPU for each rank, and Ray has "
                               f"{num_gpus:g}; ask for fewer with cluster.num_workers or cluster.ranks_per_worker.")
        return float(size)
