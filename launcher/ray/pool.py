"""A WorkerPool over Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ngsgd import process_identity
from ngsgd.cluster.exchange.collective import FetchRequest, MeanRequest
from ngsgd.cluster.exchange.collective_client import Ending, exchange_of
from ngsgd.cluster.exchange.process_group import Backend
from ngsgd.cluster.exchange.selection import Way, choose_way, unpacked
from ngsgd.cluster.exchange.shared_memory import SharedRef
from ngsgd.cluster.exchange.snapshot_memory import SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.process import Activity
from ngsgd.cluster.slot_pool import Slot, SlotPool
from ngsgd.config import ClusterConfig
from ngsgd.data.fetching.files import RemoteData
from ngsgd.errors import ClusterError
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
from ngsgd.launcher.ray.node_data import NodeData
from ngsgd.launcher.ray.probe import HeadWatch
from ngsgd.launcher.ray.worker import Address, RayWorker
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec

_PING_S = 5.0
# time for a killed process of this machine to end
_GONE_S = 1.0
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


@dataclass(kw_only=True)
class WorkerSlot(Slot):
    """One worker: its actor, and refs of its pending answers."""

    actor: Any
    # ref of its address, once it can take jobs
    starting: Any = None
    address: Address | None = None
    # ref of the job's result, and of what only the job's next start needs
    running: Any = None
    own: Any = None
    # ref of the answer to a question of the exchange
    answer: Any = None
    # ref of the answer to how many minibatches are done
    asked: Any = None
    answered: int = 0
    # while it starts, ref of the next reading of its activity
    probe: Any = None

    @property
    def pending(self) -> Any:
        """The ref to wait for, or None."""
        return next((ref for ref in (self.starting, self.running, self.answer) if ref is not None), None)


class RayPool(SlotPool[WorkerSlot]):
    """Long-lived Ray actors, one job at a time each.

    Parameters pass through memory that the actors on the coordinator's machine share with it, and
    through Ray's object store to and from all others. Or the coordinator receives the mean alone,
    which the workers make among themselves.
    """

    def __init__(self, spec: TaskSpec, num_threads: int, size: int, agreement: Agreement | None = None,
                 report: Callable[[str], object] = lambda _line: None, folders: Sequence[str] = ()) -> None:
        self.config: ClusterConfig = spec.settings.cluster
        # the head of a cluster may be another kind of machine, but its code and libraries are the
        # workers'
        agreement = agreement or Agreement(Fingerprint.of_this_process(num_threads).without_machine())
        super().__init__(spec, self.config.num_workers, num_threads, size, agreement, report)
        # that every worker must see or fetch
        self.folders = folders
        self._data = NodeData(spec, report)
        # copies of shared vectors for workers on other machines
        self._in_store: dict[SharedRef, _StoreRef] = {}
        self._owns_ray = False
        self._head: HeadWatch | None = None
        # a message refers to them
        self._keeps_logs = False

    def start(self) -> None:
        self._owns_ray = connect(self.config)
        if self.config.exchange == "nccl" and self.gpus_per_worker() < 1.0:
            raise ClusterError("cluster.exchange is nccl, which takes one GPU per worker, and Ray offers fewer; set "
                               "cluster.exchange=auto.")
        self._head = HeadWatch(ray.get_runtime_context().gcs_address)
        self._spec_ref = ray.put(self.spec)
        self._num_cpus = 0 if self._owns_ray else self.num_threads * self.config.ranks_per_worker
        require_cpus(self._num_cpus, self.config.address or self._head.address)
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_restarts": 0,
                                   "num_gpus": self.gpus_per_worker(), "concurrency_groups": {"control": 1}}
        self._actor_class = ray.remote(**options)(RayWorker)
        self._start_workers()
        self._way = self.chosen_exchange()
        if self._way in ("collective", "nccl"):
            backend: Backend = "nccl" if self._way == "nccl" else "gloo"
            self._exchange = exchange_of(self.config, ray.util.get_node_ip_address(), backend)

    def wait(self, timeout_s: float) -> Outcome | None:
        assert self._head
        self._head.check()
        return super().wait(timeout_s)

    def release(self, ref: VectorRef) -> None:
        if isinstance(ref, SharedRef):
            self._in_store.pop(ref, None)
        super().release(ref)

    def close(self) -> None:
        # asking a lost one would end this process
        head_is_there = self._head is not None and not self._head.is_lost
        for slot in self._slots if head_is_there else ():
            ray.kill(slot.actor)
        if head_is_there:
            self._data.close()
        super().close()
        if self._owns_ray and head_is_there:
            shutdown(keep_logs=self._keeps_logs)

    # Slots ----------------------------------------------------------------------------------------

    def _new_slot(self, index: int, deaths: Sequence[str] = ()) -> WorkerSlot:
        slot = WorkerSlot(index=index, actor=self._actor_class.remote(), deaths=list(deaths))
        self._prepare(slot)
        return slot

    def _prepare(self, slot: WorkerSlot, remote: RemoteData | None = None) -> None:
        slot.starting = slot.actor.prepare.remote(self._spec_ref, slot.index, self.num_threads, self._heartbeats, self.folders,
                                                  remote, has_kernels=self.agreement.has_kernels)

    def _is_here(self, slot: WorkerSlot) -> bool:
        return slot.address is not None and slot.address.shares_memory

    def _num_places(self, slot: WorkerSlot, job: Job) -> int:
        return job.num_vectors if self._is_here(slot) and self._way == "shared_memory" else 0

    def _post(self, slot: WorkerSlot, job: Job, snapshots: SharedSnapshotMemory | None) -> None:
        if not slot.places:
            start = replace(job.start, model=self._portable(job.start.model), own=job.start.own and self._portable(job.start.own))
            job = replace(job, start=start)
        keeps = self._exchange is not None
        slot.running, slot.own = slot.actor.run.options(num_returns=2).remote(job, slot.places, keeps, snapshots)

    def _request(self, slot: WorkerSlot, question: MeanRequest | FetchRequest) -> None:
        slot.answer = slot.actor.answer.remote(question)

    def _ask_to_stop(self, slot: WorkerSlot) -> None:
        _control(slot.actor.stop)

    def _kill(self, slot: WorkerSlot) -> None:
        # at once, where Ray first asks a stopped process for seconds
        if self._is_here(slot):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_id(slot), signal.SIGKILL)
        else:
            ray.kill(slot.actor)

    def _process_id(self, slot: WorkerSlot) -> int:
        return slot.address.process_id if slot.address else 0

    def _host(self, slot: WorkerSlot) -> str:
        return slot.address.host if slot.address else ""

    def _activity(self, slot: WorkerSlot) -> Activity | None:
        # the answer to the question of the last call
        found: Activity | None = None
        if slot.probe is not None and ray.wait([slot.probe], timeout=0.0)[0]:
            with contextlib.suppress(RayError):
                found = ray.get(slot.probe, timeout=_PING_S)
            slot.probe = None
        if slot.probe is None:
            slot.probe = _control(slot.actor.activity)
        return found

    def _num_done(self, slot: WorkerSlot) -> int:
        """On another machine, the minibatches that the worker last reported as done."""
        if self._is_here(slot):
            return super()._num_done(slot)
        if slot.asked is not None and ray.wait([slot.asked], timeout=0.0)[0]:
            # its death is reported by the job
            with contextlib.suppress(RayError):
                slot.answered = ray.get(slot.asked, timeout=_PING_S)
            slot.asked = None
        if slot.asked is None:
            # a worker that hangs reports nothing new
            slot.asked = _control(slot.actor.minibatches)
        return slot.answered

    def _why_few(self) -> str:
        return room_for_workers(self._num_cpus)

    def _find_deaths(self) -> None:
        pings = {_control(slot.actor.minibatches): slot for slot in self._slots if slot.is_idle}
        done, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_S) if pings else ((), ())
        for ref in done:
            try:
                ray.get(ref, timeout=_PING_S)
            except RayError as error:
                self._died_by(pings[ref], error)

    # Events ---------------------------------------------------------------------------------------

    def _process_events(self, timeout_s: float) -> None:
        for slot in self._slots:
            # nothing else reports its end
            if slot.killed is not None and slot.pending is None and not slot.retired:
                self._died(slot)
        by_ref = {slot.pending: slot for slot in self._slots if slot.pending is not None and not slot.retired}
        if not by_ref:
            time.sleep(timeout_s)
            return
        done, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        for ref in done:
            slot = by_ref[ref]
            try:
                value = ray.get(ref, timeout=_FETCH_S)
            except RayTaskError as error:
                self._raised(slot, error)
            except RayError as error:
                self._died_by(slot, error)
            else:
                self._receive(slot, value)

    def _receive(self, slot: WorkerSlot, value: Any) -> None:
        if slot.starting is not None:
            slot.starting = None
            if isinstance(value, UnseenFolder):
                self._start_blind(slot, value)
            else:
                slot.address = value
                self._admit(slot, value.fingerprint, f" on {value.host}")
        elif slot.running is not None:
            slot.running = None
            self._take(slot, value)
        else:
            slot.answer, self._answers[slot.index] = None, value

    def _readable(self, slot: WorkerSlot, result: JobResult) -> JobResult:
        result = unpacked(super()._readable(slot, result))
        if result.job.keep_own and result.own is None:
            return replace(result, own=result.sent if result.job.num_vectors == 1 else _StoreRef(slot.own))
        return result

    def _raised(self, slot: WorkerSlot, error: RayTaskError) -> None:
        """Process an exception in a worker, which lives."""
        if slot.starting is not None:
            raise cause_of(error) from error
        if slot.running is None:
            raise exchange_error(error) from error
        assert slot.job is not None
        slot.running = None
        cause = error.cause if isinstance(error.cause, Exception) else error
        self._take(slot, JobFailure.of_error(slot.job, slot.index, cause))

    def _died_by(self, slot: WorkerSlot, error: RayError) -> None:
        slot.ending = slot.ending or how_it_ended(error)
        self._died(slot)

    def _end(self, slot: WorkerSlot) -> tuple[Ending, bool]:
        found = slot.ending or Ending("its process ended")
        if slot.address is None:
            return found, True
        deadline = time.monotonic() + _GONE_S
        is_there = self._is_here(slot)
        while is_there and time.monotonic() < deadline:
            is_there = process_identity.state_and_start_time(slot.address.process_id)[0] not in ("", "Z", "X")
            time.sleep(0.01 * is_there)
        where = f"process {slot.address.process_id} on {slot.address.host}"
        return replace(found, reason=f"{where}: {found.reason}"), self._is_here(slot) and not is_there

    def _cannot_start(self, slot: WorkerSlot, num_deaths: int, ending: Ending) -> ClusterError:
        self._keeps_logs = True
        return super()._cannot_start(slot, num_deaths, ending)

    @property
    def advice(self) -> str:
        return "see the Ray log of its node" + (f" in {log_folder()}" if log_folder() else "")

    def _start_blind(self, slot: WorkerSlot, unseen: UnseenFolder) -> None:
        """Let a worker fetch the data that its node does not see, or replace it."""
        remote = None if unseen.reason else self._data.for_node(unseen)
        if remote is not None:
            self._prepare(slot, remote)
            return
        message = unseen.message(self.spec.settings.output_dir)
        is_last = len(slot.deaths) + 1 >= self.spec.settings.failure.max_attempts and not self.num_workers_alive()
        if self._is_starting or is_last:
            raise ClusterError(f"{message}.")
        self._restarts.report("worker_refused", slot.index, f"the process that replaces worker {slot.index} is not used, and "
                                                            f"another one is started: {message}")
        slot.ending = Ending(f"was refused ({message})")
        ray.kill(slot.actor)
        self._died(slot)

    # Machines -------------------------------------------------------------------------------------

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
        devices = [slot.address.device for slot in self._slots if slot.address]
        way, reason = choose_way(self.config.exchange, devices, jobs_keep_state=self.spec.settings.outer.jobs_keep_state)
        if self.config.exchange != "auto" or any(device.gpu or not device.is_near for device in devices):
            self._report(f"parameters travel by {_NAMES[way]}: {reason}")
        return way

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


def _control(method: Any) -> Any:
    """Call a method of an actor that runs next to a job."""
    return method.options(concurrency_group="control").remote()
