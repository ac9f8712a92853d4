"""The Ray actor of a worker slot: a `Worker` in a separate process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import numpy as np
import numpy.typing as npt
import ray

from ngsgd.cluster.exchange.collective import CollectiveWorker, FetchRequest, GroupFailure, Step, StepRequest, StepShard
from ngsgd.cluster.exchange.shared_memory import SharedRef
from ngsgd.cluster.groups import make_worker
from ngsgd.cluster.process import Activity, activity_of, configure_process
from ngsgd.cluster.worker_process import Ready
from ngsgd.data.fetching.files import RemoteData
from ngsgd.data.fetching.source import FetchError
from ngsgd.errors import ClusterError
from ngsgd.launcher.mlflow.metrics import load_of_machine
from ngsgd.launcher.ray.node_data import UnseenFolder, unseen_here
from ngsgd.object_storage.urls import local_root
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobResult
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.snapshots.job_snapshots import SnapshotMemory
from ngsgd.training.task import TaskSpec


class RayWorker:
    """The actor: a `Worker` in a separate process."""

    def __init__(self) -> None:
        self._is_leaving = self._is_busy = self._should_stop = False
        # here, in the main thread; jobs run in another one, during which signals arrive
        if threading.current_thread() is threading.main_thread():
            self._end_as_ray = signal.signal(signal.SIGTERM, self._asked_to_end)

    def prepare(self, spec: TaskSpec, index: int, num_threads: int, heartbeats: SharedRef, folders: Sequence[str] = (),
                remote: RemoteData | None = None, *, has_kernels: bool | None = None) -> Ready | UnseenFolder:
        """Where the worker is, once it can take jobs; or which of the `folders` it does not see.

        With `remote` it fetches these. Not the constructor, of whose errors Ray loses the type.
        """
        # before the task, whose error would not name the node
        unseen = unseen_here(folders)
        if unseen and remote is None:
            return unseen
        configure_process(num_threads, has_kernels)
        self._index = index
        self._minibatches = 0
        self._heartbeats = _reached(heartbeats)
        try:
            if unseen and remote is not None and isinstance(spec, SpeechTaskSpec):
                spec = spec.fetching(replace(remote, progress=self._count))
            self._worker = make_worker(spec, index)
        except FetchError as error:
            assert unseen
            return replace(unseen, reason=str(error))
        self._worker.snapshots.is_leaving = lambda: self._is_leaving
        self._output_dir = local_root(spec.settings.output_dir)
        self._member = CollectiveWorker(index, self._worker.layout, self._worker.device)
        return Ready.of(self._worker, num_threads, is_near=self._heartbeats is not None,
                        node_id=ray.get_runtime_context().get_node_id())

    def run(self, job: Job, places: tuple[SharedRef, ...], keep: bool,
            snapshots: SnapshotMemory | None) -> tuple[JobResult, Vector | None]:
        """The result, and the vector that only the job's next start needs, if it is another one.

        In `places` on the coordinator's machine; elsewhere both travel through the object store,
        the second only if it is asked for. With `keep` the result stays here, for their mean.
        """
        self._should_stop = False
        self._worker.snapshots.memory = snapshots
        self._is_busy = True
        try:
            result, own = self._member.run(self._worker, job, places, self._heartbeat, keep=keep)
        finally:
            self._is_busy = False
        # the coordinator sees its own machine
        if self._heartbeats is None:
            result = replace(result, host=os.uname().nodename, machine=load_of_machine(self._output_dir))
        return result, own

    def answer(self, question: StepRequest | FetchRequest, step: Step | None) -> StepShard | GroupFailure | Vector:
        """This worker's shard of the outer step, or a result that it kept."""
        if isinstance(question, StepRequest):
            assert step
            return self._member.step(replace(question, step=step))
        return self._member.fetch(question.identity)

    def minibatches(self) -> int:
        """How many are done; answered while a job runs."""
        return self._minibatches

    def activity(self) -> Activity | None:
        """Signs of life; answered while it starts."""
        return activity_of(os.getpid())

    def stop(self) -> None:
        """End the job after the current minibatch."""
        self._should_stop = True

    def leave(self) -> None:
        """End the job after the current minibatch, with a snapshot: another worker continues it."""
        self._is_leaving = True

    def _asked_to_end(self, signum: int, frame: FrameType | None) -> None:
        self._is_leaving = True
        if not self._is_busy and callable(self._end_as_ray):
            self._end_as_ray(signum, frame)

    def _heartbeat(self) -> bool:
        self._count()
        return self._should_stop or self._is_leaving

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
