"""The Ray actor of a worker slot: a `Worker` in a separate process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ngsgd.cluster.exchange.collective import FetchRequest, GroupFailure, MeanRequest, MeanShard
from ngsgd.cluster.exchange.selection import WorkerDevice, packed
from ngsgd.cluster.exchange.shared_memory import SharedRef
from ngsgd.cluster.exchange.snapshot_memory import SharedSnapshotMemory
from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.cluster.process import Activity, activity_of
from ngsgd.data.fetching.files import RemoteData
from ngsgd.data.fetching.source import FetchError
from ngsgd.errors import ClusterError
from ngsgd.launcher.machine_load import load_of_machine
from ngsgd.launcher.ray.folders import UnseenFolder, unseen_here
from ngsgd.launcher.ray.node_data import fetching
from ngsgd.object_storage.urls import local_root
from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec


@dataclass(frozen=True)
class Address:
    """Of a worker process."""

    host: str
    process_id: int
    fingerprint: Fingerprint
    device: WorkerDevice

    @property
    def shares_memory(self) -> bool:
        """Whether it does so with the coordinator."""
        return self.device.is_near


class RayWorker:
    """The actor: a `Worker` in a separate process."""

    def prepare(self, spec: TaskSpec, index: int, num_threads: int, heartbeats: SharedRef,
                folders: Sequence[str] = (), remote: RemoteData | None = None, *,
                has_kernels: bool | None = None) -> Address | UnseenFolder:
        """Where the worker is, once it can take jobs; or which of the `folders` it does not see.

        With `remote` it fetches the folders that it does not see.

        Not the constructor: Ray reports what a constructor raises as the actor's death, and loses
        its type.
        """
        from ngsgd.cluster.exchange.collective import CollectiveWorker
        from ngsgd.cluster.groups import make_worker
        from ngsgd.cluster.process import configure_process
        # before the task, whose error would not name the node
        unseen = unseen_here(folders)
        if unseen and remote is None:
            return unseen
        configure_process(num_threads, has_kernels)
        self._index = index
        self._minibatches = 0
        self._should_stop = False
        self._heartbeats = _reached(heartbeats)
        try:
            if unseen and remote is not None:
                spec = fetching(spec, replace(remote, progress=self._count))
            self._worker = make_worker(spec, index)
        except FetchError as error:
            assert unseen
            return replace(unseen, reason=str(error))
        self._output_dir = local_root(spec.settings.output_dir)
        self._member = CollectiveWorker(index, self._worker.layout, self._worker.device)
        fingerprint = Fingerprint.of_this_process(num_threads, self._worker.device, spec.settings.cluster.precision,
                                                  self._worker.ranks.summed_by)
        device = WorkerDevice.of(self._worker.device, is_near=self._heartbeats is not None)
        return Address(os.uname().nodename, os.getpid(), fingerprint, device)

    def run(self, job: Job, places: tuple[SharedRef, ...], keep: bool,
            snapshots: SharedSnapshotMemory | None) -> tuple[JobResult, Vector | None]:
        """The result, and apart from it the vector that only the job's next start needs, if it is
        another one.

        In `places` on the coordinator's machine; elsewhere both travel through the object store,
        the second only if it is asked for. With `keep` the result stays here, to be averaged among
        the workers.
        """
        self._should_stop = False
        self._worker.snapshots.memory = snapshots
        self._member.make_room(job)
        left = list(places)
        refs: dict[int, SharedRef] = {}

        def place(size: int) -> Vector:
            if not left:
                return np.empty(size, dtype=np.float32)
            ref = replace(left.pop(0), size=size)
            vector = ref.read()
            refs[id(vector)] = ref
            return vector
        result = self._worker.run(job, place, self._heartbeat)
        # the coordinator sees its own machine
        if self._heartbeats is None:
            result = replace(result, host=os.uname().nodename, machine=load_of_machine(self._output_dir))
        assert isinstance(result.sent, LocalRef)
        own = result.own.vector if isinstance(result.own, LocalRef) else None
        if places:
            return replace(result, sent=refs[id(result.sent.vector)], own=refs[id(own)] if own is not None else None,
                           encoded=None), None
        if own is result.sent.vector:
            own = None
        if keep:
            return replace(self._member.keep(result), own=None, encoded=None), own
        return replace(packed(result), own=None), own

    def answer(self, question: MeanRequest | FetchRequest) -> MeanShard | GroupFailure | Vector:
        """This worker's share of the mean, or a result that it kept."""
        from ngsgd.cluster.exchange.collective import MeanRequest
        return self._member.average(question) if isinstance(question, MeanRequest) else self._member.fetch(question.identity)

    def minibatches(self) -> int:
        """How many are done; answered while a job runs."""
        return self._minibatches

    def activity(self) -> Activity | None:
        """Signs of life; answered while it starts."""
        return activity_of(os.getpid())

    def stop(self) -> None:
        """End the job after the current minibatch."""
        self._should_stop = True

    def _heartbeat(self) -> bool:
        self._count()
        return self._should_stop

    def _count(self) -> None:
        """Report progress; a part of an archive counts as a minibatch."""
        self._minibatches += 1
        if self._heartbeats is not None:
            self._heartbeats[self._index] = self._minibatches


def _reached(ref: SharedRef) -> npt.NDArray[np.uint64] | None:
    """The coordinator's counters, where its memory can be shared."""
    try:
        return ref.map().view(np.uint64)
    except ClusterError:
        return None
