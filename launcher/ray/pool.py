"""A WorkerPool over Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from ngsgd import process_identity
from ngsgd.cluster.exchange.collective import FetchRequest, Step, StepRequest
from ngsgd.cluster.exchange.collective_client import Ending, Exchange
from ngsgd.cluster.exchange.selection import Way, choose_way
from ngsgd.cluster.exchange.shared_memory import SharedRef, SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.process import Activity
from ngsgd.cluster.slot_pool import Slot, SlotPool
from ngsgd.cluster.worker_process import Ready
from ngsgd.config import ClusterConfig
from ngsgd.data.fetching.files import RemoteData
from ngsgd.errors import ClusterError, FailureKind, reason_of
from ngsgd.launcher.ray.capacity import Capacity, gpus_per_worker, in_words, need_of, room_for
from ngsgd.launcher.ray.cluster import cause_of, connect, exchange_error, how_it_ended, log_folder, shutdown
from ngsgd.launcher.ray.node_data import NodeData, UnseenFolder
from ngsgd.launcher.ray.probe import HeadWatch
from ngsgd.launcher.ray.snapshots import RemoteSnapshotMemory, start_server
from ngsgd.launcher.ray.worker import RayWorker
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.snapshots.job_snapshots import MOST_MEMORY, free_memory
from ngsgd.training.task import TaskSpec

_PING_S = 5.0
# between two questions for the progress of workers on other machines
_ASK_S = 2.0
_GONE_S = 1.0  # time for a killed process of this machine to end
# for an object to arrive that Ray reports as available; the largest model takes seconds
_FETCH_S = 300.0
# until other workers are served
_GET_S = 10.0


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
            raise _store_is_slow() from error
        return vector


@dataclass(kw_only=True)
class WorkerSlot(Slot):
    """One worker: its actor, and refs of its pending answers."""

    actor: Any
    starting: Any = None  # ref of its address, once it can take jobs
    address: Ready | None = None
    running: Any = None  # ref of the job's result, and of what only the job's next start needs
    own: Any = None
    answer: Any = None  # ref of the answer to a question of the exchange
    asked: Any = None  # ref of the answer to how many minibatches are done
    answered: int = 0
    # time on the pool's clock at which its result was first seen on its node
    ended_s: float | None = None
    num_seen: int = 0  # times that it was
    is_asked_to_leave: bool = False  # its node is drained
    probe: Any = None  # while it starts, ref of the next reading of its activity

    @property
    def pending(self) -> Any:
        """The ref to wait for, or None."""
        return next((ref for ref in (self.starting, self.running, self.answer) if ref is not None), None)


class RayPool(SlotPool[WorkerSlot]):
    """Long-lived Ray actors, one job at a time each.

    Parameters pass through memory that the actors on the coordinator's machine share with it, and
    through Ray's object store to and from all others, or the workers make the mean themselves.
    """

    def __init__(self, spec: TaskSpec, num_threads: int, size: int, agreement: Agreement | None = None,
                 report: Callable[[str], object] = lambda _line: None, folders: Sequence[str] = ()) -> None:
        self.config: ClusterConfig = spec.settings.cluster
        # the head may be another kind of machine, but its code and libraries are the workers'
        agreement = agreement or Agreement(Fingerprint.of_this_process(num_threads).without_machine())
        super().__init__(spec, self.config.num_workers, num_threads, size, agreement, report)
        self.folders = folders  # that every worker must see or fetch
        self._data = NodeData(spec, report)
        # copies of shared vectors for workers on other machines
        self._in_store: dict[SharedRef, _StoreRef] = {}
        self._owns_ray = False
        self._head: HeadWatch | None = None
        self._capacity: Capacity | None = None
        self._asked_s = -_ASK_S
        self._ask_every_s = min(_ASK_S, spec.settings.failure.hang_timeout_s / 10.0)
        self._snapshot_server: Any = None
        self._way: Way | None = None
        # the last one, and its ref
        self._step: tuple[Step | None, Any] = None, None

    def start(self) -> None:
        self._owns_ray = connect(self.config)
        # without an address it may be that of the user's own program
        num_gpus = gpus_per_worker(self.config, is_own=not self.config.address, report=self._report)
        if self.config.exchange == "nccl" and num_gpus < 1.0:
            raise ClusterError("cluster.exchange is nccl, which takes one GPU per worker, and Ray offers fewer; set "
                               "cluster.exchange=auto.")
        self._head = HeadWatch(ray.get_runtime_context().gcs_address)
        self._spec_ref = ray.put(self.spec)
        self._num_cpus = 0 if self._owns_ray else self.num_threads * self.config.ranks_per_worker
        self._need = need_of(self._num_cpus, num_gpus)
        self._capacity = Capacity("" if self._owns_ray else self._head.address, self._need, self.num_workers, self._report)
        # workers that wait for room are what an autoscaler reacts to
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "max_restarts": 0, "num_gpus": num_gpus,
                                   "concurrency_groups": {"control": 1}}
        self._actor_class = ray.remote(**options)(RayWorker)
        # machines of a cluster come one after another; NCCL needs to know the GPUs of all
        is_early = self.config.address and self.config.exchange != "nccl"
        self._start_workers(1 if is_early else self.num_workers)
        self.choose_exchange()

    def wait(self, timeout_s: float) -> Outcome | None:
        assert self._head
        self._head.check()
        # workers end their jobs on nodes that Ray is about to remove
        draining = self._capacity.draining if self._capacity else frozenset()
        for slot in self._slots if draining else ():
            if slot.address is None or slot.address.node_id not in draining or not slot.is_usable:
                continue
            ending = Ending(f"its node {slot.address.device.host} is drained", FailureKind.ASKED_TO_END)
            if slot.job is None and slot.pending is None:
                # results that it keeps for the mean would end with it
                for ref in self._kept_by(slot):
                    ref.save()
                slot.leaving = True
                self._kill_for(slot, ending)
            elif slot.job is not None and not slot.is_asked_to_leave:
                slot.is_asked_to_leave, slot.ending = True, ending
                _control(slot.actor.leave)
        return super().wait(timeout_s)

    def has_busy_start(self) -> bool:
        """Whether a worker that starts was busy, or a machine for it came or was requested."""
        assert self._capacity
        has_news = self._capacity.has_news()
        return super().has_busy_start() or has_news

    def release(self, ref: VectorRef) -> None:
        if isinstance(ref, SharedRef):
            self._in_store.pop(ref, None)
        super().release(ref)

    def close(self) -> None:
        # asking a lost one would end this process
        head_is_there = self._head is not None and not self._head.is_lost
        for slot in self._slots if head_is_there else ():
            ray.kill(slot.actor)
        if self._capacity:
            self._capacity.close()
        if head_is_there:
            self._data.close()
            if self._snapshot_server is not None:
                ray.kill(self._snapshot_server)
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
        return slot.address is not None and slot.address.device.is_near

    def _shares_memory(self, slot: WorkerSlot) -> bool:
        return self._is_here(slot) and self.config.exchange != "object_store"

    def _post(self, slot: WorkerSlot, job: Job, snapshots: SharedSnapshotMemory | None, *, keep: bool) -> None:
        slot.running, slot.own = slot.actor.run.options(num_returns=2).remote(
            job, slot.places, keep, snapshots and self._reachable(slot, snapshots))

    def _request(self, slot: WorkerSlot, question: StepRequest | FetchRequest) -> None:
        shared = None
        if isinstance(question, StepRequest):
            # N requests with N results each would take seconds of a thousand workers
            if question.step is not self._step[0]:
                self._step = question.step, ray.put(question.step)
            question, shared = replace(question, step=cast(Step, None)), self._step[1]
        slot.answer = slot.actor.answer.remote(question, shared)

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
        return slot.address.device.host if slot.address else ""

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

    def progress(self) -> Mapping[int, tuple[tuple[int, int, int], int]]:
        # not for every event, of which there are as many as workers
        if time.monotonic() - self._asked_s < self._ask_every_s:
            return super().progress()
        far = [slot for slot in self._slots if slot.job is not None and not self._is_here(slot)]
        asked = {slot.asked: slot for slot in far if slot.asked is not None}
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0.0)[0] if asked else ():
            # its death is reported by the job
            with contextlib.suppress(RayError):
                asked[ref].answered = ray.get(ref, timeout=_PING_S)
            asked[ref].asked = None
        for slot in far:
            # a worker that hangs reports nothing new
            slot.asked = slot.asked or _control(slot.actor.minibatches)
        running = {slot.running: slot for slot in self._slots if slot.running is not None}
        # the result is on the worker's node, and waits for memory here: no worker is at fault
        for ref in ray.wait(list(running), num_returns=len(running), timeout=0.0, fetch_local=False)[0] if running else ():
            slot = running[ref]
            slot.num_seen, slot.ended_s = slot.num_seen + 1, self._clock.now if slot.ended_s is None else slot.ended_s
            if self._clock.now - slot.ended_s > _FETCH_S:
                raise _store_is_slow()
        self._asked_s = time.monotonic()
        return super().progress()

    def _num_done(self, slot: WorkerSlot) -> int:
        """On another machine, the minibatches that the worker last reported as done."""
        # one whose result travels does not hang
        return slot.num_seen + (super()._num_done(slot) if self._is_here(slot) else slot.answered)

    def _why_few(self) -> str:
        if not self._need:
            return ""
        return f" (each takes {in_words(self._need)}, and the machines of the cluster have room for {room_for(self._need)})"

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
        if done:
            # all at once: a wait takes time for each worker
            done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0.0)
        for ref in done:
            slot = by_ref[ref]
            # a death may have ended other workers
            if self._slots[slot.index] is slot:
                self._fetch_answer(slot, ref)

    def _fetch_answer(self, slot: WorkerSlot, ref: Any) -> None:
        try:
            value = ray.get(ref, timeout=_GET_S)
        except RayTaskError as error:
            if slot.starting is not None:
                raise cause_of(error) from error
            if slot.running is None:
                raise exchange_error(error) from error
            if isinstance(error.cause, (ObjectStoreFullError, OutOfDiskError)):
                raise _store_is_full(error.cause) from error
            assert slot.job is not None
            slot.running = None
            cause = error.cause if isinstance(error.cause, Exception) else error
            self._take(slot, JobFailure.of_error(slot.job, slot.index, cause))
        except GetTimeoutError:
            # a store without memory is no death; `progress` limits the time
            return
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise _store_is_full(error) from error
        except RayError as error:
            slot.ending = slot.ending or how_it_ended(error)
            self._died(slot)
        else:
            self._receive(slot, value)

    def _receive(self, slot: WorkerSlot, value: Any) -> None:
        if slot.starting is not None:
            slot.starting = None
            if isinstance(value, UnseenFolder):
                self._start_blind(slot, value)
            else:
                slot.address = value
                self._require_gpu(value)
                self._admit(slot, value.fingerprint, f" on {value.device.host}")
                # NCCL connects no other GPUs than those of the start
                if self._way and self.config.exchange == "auto":
                    self.choose_exchange()
        elif slot.running is not None:
            slot.running = slot.ended_s = None
            self._take(slot, value)
        else:
            slot.answer, self._answers[slot.index] = None, value

    def _readable(self, slot: WorkerSlot, result: JobResult) -> JobResult:
        result = super()._readable(slot, result)
        if result.job.keep_own and result.own is None:
            return replace(result, own=result.sent if result.job.num_vectors == 1 else _StoreRef(slot.own))
        return result

    def _end(self, slot: WorkerSlot) -> tuple[Ending, bool]:
        found = slot.ending or Ending("its process ended")
        if slot.address is None:
            return found, True
        deadline = time.monotonic() + _GONE_S
        is_there = self._is_here(slot)
        while is_there and time.monotonic() < deadline:
            is_there = process_identity.state_and_start_time(slot.address.process_id)[0] not in ("", "Z", "X")
            time.sleep(0.01 * is_there)
        where = f"process {slot.address.process_id} on {slot.address.device.host}"
        return replace(found, reason=f"{where}: {found.reason}"), self._is_here(slot) and not is_there

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

    def _portable(self, slot: WorkerSlot, ref: VectorRef) -> VectorRef:
        if self._shares_memory(slot) or not isinstance(ref, SharedRef):
            return ref
        if ref not in self._in_store:
            try:
                self._in_store[ref] = _StoreRef(ray.put(ref.read()))
            except (ObjectStoreFullError, OutOfDiskError) as error:
                raise _store_is_full(error) from error
        return self._in_store[ref]

    def choose_exchange(self) -> None:
        """Choose the way of results to the average; with `auto` again whenever a worker joins.

        Workers that NCCL cannot connect any more make the coordinator average, with bitwise
        identical results.
        """
        devices = [slot.address.device for slot in self._slots if slot.address and slot.is_usable]
        way, reason = choose_way(self.config.exchange, devices, jobs_keep_state=self.spec.settings.outer.jobs_keep_state)
        is_news = self.config.exchange != "auto" or any(device.gpu or not device.is_near for device in devices)
        if is_news and way != self._way:
            self._report(f"cluster.exchange is {way}: {reason}")
        self._way, self._averages = way, way in ("collective", "nccl")
        if self._averages and self._exchange is None:
            self._exchange = Exchange(ray.util.get_node_ip_address(), codec=self.config.codec,
                                      backend="nccl" if way == "nccl" else "gloo")

    def _require_gpu(self, address: Ready) -> None:
        """Raise ClusterError if a worker that was given a GPU computes on the CPU."""
        if "GPU" not in self._need or address.fingerprint.device not in ("", "cpu"):
            return
        found = f"Ray gave a GPU to the worker on {address.device.host}, but torch there computes on the CPU"
        if self.config.gpus_per_worker or self.config.address:
            raise ClusterError(f"{found}; install torch for CUDA on that machine, or set cluster.device=cpu.")
        self._report(found)

    def _reachable(self, slot: WorkerSlot, memory: SharedSnapshotMemory) -> Any:
        """The snapshot memory of a job where a worker on another machine can use it."""
        if self._is_here(slot):
            return memory
        if self._snapshot_server is None:
            is_limited = self.spec.settings.failure.snapshots == "auto"
            self._snapshot_server = start_server(MOST_MEMORY * free_memory() if is_limited else float("inf"))
        return RemoteSnapshotMemory(memory, self._snapshot_server, is_empty=not self._snapshots.newest(memory))


def _control(method: Any) -> Any:
    """Call a method of an actor that runs next to a job."""
    return method.options(concurrency_group="control").remote()


def _store_is_slow() -> ClusterError:
    return ClusterError(f"Ray's object store did not return a vector within {_FETCH_S:g} s; see whether its memory is full (ray "
                        "memory), then resume.")


def _store_is_full(error: Exception) -> ClusterError:
    return ClusterError(f"an object store of the Ray cluster is full ({reason_of(error).rstrip('.')}); "
                        "start Ray with more memory for objects, or set cluster.exchange=auto, then resume.",
                        failure=FailureKind.MEMORY)
