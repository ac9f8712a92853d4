"""A WorkerPool over Ray actors, on this machine or on a cluster.

Each worker slot holds one long-lived actor.  An actor that dies fails the job it was running, and a replacement is
started in its slot while the other workers go on; what happens to the job is the coordinator's decision.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.training.flat import Vector
from ngsgd.training.job import Job, JobFailure, JobResult, WorkerSpec
from ngsgd.training.pool import Outcome

_STORE_BYTES = 512 * 2**20  # plasma on one machine; parameters and results of some tens of workers


class _RayWorker:
    """The actor: a `Worker` in a process of its own."""

    def prepare(self, spec: WorkerSpec, index: int, num_threads: int) -> tuple[str, int]:
        """(host, process id) once the worker can take jobs.

        Not the constructor: Ray reports what a constructor raises as the actor's death, and loses its type.
        """
        import torch

        from ngsgd.training.worker import Worker
        torch.set_num_threads(num_threads)
        self._worker = Worker(spec, index)
        return os.uname().nodename, os.getpid()

    def run(self, job: Job, parameters: Vector) -> JobResult:
        return self._worker.run(job, parameters)


@dataclass
class _Slot:
    """One worker: its actor, and what it is doing."""

    index: int
    actor: Any
    ready: Any                       # ref that resolves when the actor can take jobs
    process: tuple[str, int] | None = None  # host and process id, once ready
    job: Job | None = None
    running: Any = None              # ref of the job's result
    deaths: list[str] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return self.process is not None and self.job is None

    @property
    def pending(self) -> Any:
        """The ref to wait for, or None."""
        return self.ready if self.process is None else self.running


class RayPool:
    """Long-lived Ray actors, one job at a time each."""

    def __init__(self, spec: WorkerSpec, num_threads: int) -> None:
        self.spec = spec
        self.config: ClusterConfig = spec.config.cluster
        self.num_threads = num_threads
        self._slots: list[_Slot] = []
        self._owns_ray = False

    def start(self) -> None:
        self._owns_ray = connect(self.config)
        self._spec_ref = ray.put(self.spec)
        options: dict[str, Any] = {"num_cpus": 0 if self._owns_ray else self.num_threads, "max_restarts": 0,
                                   "num_gpus": self._gpus_per_worker()}
        self._actor_class = ray.remote(_RayWorker).options(**options)
        self._slots = [self._new_slot(index) for index in range(self.config.num_workers)]
        deadline = time.monotonic() + self.config.start_timeout_s
        while not all(slot.process for slot in self._slots):
            self._poll(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                up = sum(slot.process is not None for slot in self._slots)
                raise ClusterError(
                    f"{up} of {len(self._slots)} workers were ready after cluster.start_timeout_s = "
                    f"{self.config.start_timeout_s:g}; ask for fewer with cluster.num_workers, or give them more time.")
        self._last_alive = time.monotonic()

    def broadcast(self, parameters: Vector) -> None:
        self._parameters_ref = ray.put(parameters)

    def num_idle(self) -> int:
        return sum(slot.is_idle for slot in self._slots)

    def submit(self, job: Job) -> None:
        # the same job goes to the same slot where it can, so that charts per worker stay comparable
        idle = [slot for slot in self._slots if slot.is_idle]
        slot = min(idle, key=lambda s: (s.index != job.job % len(self._slots), s.index))
        slot.job = job
        slot.running = slot.actor.run.remote(job, self._parameters_ref)

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome = self._poll(timeout_s)
        self._require_a_worker()
        return outcome

    def abandon(self) -> None:
        """Kills the workers that are busy; the pool can only be closed afterwards."""
        for slot in self._slots:
            if slot.job is not None:
                ray.kill(slot.actor)

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)
        self._slots = []
        if self._owns_ray:
            ray.shutdown()

    def process_ids(self) -> list[int]:
        """Of the workers that are ready, by slot."""
        return [slot.process[1] for slot in self._slots if slot.process]

    def _require_a_worker(self) -> None:
        """Fewer workers are no reason to stop; none at all, for as long as a start may take, is."""
        now = time.monotonic()
        if any(slot.process for slot in self._slots):
            self._last_alive = now
        elif now - self._last_alive > self.config.start_timeout_s:
            raise ClusterError(f"all {len(self._slots)} workers are gone and none came back within cluster.start_timeout_s = "
                               f"{self.config.start_timeout_s:g}; see whether the cluster still has their CPUs or GPUs.")

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

    def _finish_start(self, slot: _Slot) -> None:
        try:
            slot.process = ray.get(slot.ready)
        except RayTaskError as error:
            raise _cause(error) from error
        except RayError as error:
            # one death while starting may be bad luck; a slot that cannot start at all must not be tried for ever
            slot.deaths.append(_how_it_ended(error))
            if len(slot.deaths) >= self.spec.config.failure.max_attempts:
                raise ClusterError(f"worker {slot.index} died {len(slot.deaths)} times while starting "
                                   f"({slot.deaths[-1]}); see the Ray log of its node.") from error
            self._replace(slot)

    def _finish_job(self, slot: _Slot) -> Outcome:
        job, slot.job = slot.job, None
        assert job is not None
        try:
            result: JobResult = ray.get(slot.running)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            return JobFailure(job, slot.index, f"{type(cause or error).__name__}: {cause or error}", False, cause)
        except RayError as error:  # the out-of-memory killer's error is no RayActorError
            reason = _how_it_ended(error)
            process = slot.process
            self._replace(slot)
            return JobFailure(job, slot.index, f"process {process[1]} on {process[0]}: {reason}" if process else reason, True)
        finally:
            slot.running = None
        slot.deaths.clear()
        return result

    def _new_slot(self, index: int) -> _Slot:
        actor = self._actor_class.remote()
        return _Slot(index, actor, actor.prepare.remote(self._spec_ref, index, self.num_threads))

    def _replace(self, slot: _Slot) -> None:
        fresh = self._new_slot(slot.index)
        slot.actor, slot.ready, slot.process = fresh.actor, fresh.ready, None

    def _gpus_per_worker(self) -> float:
        """A worker gets a GPU of its own where there are enough, else a share; NCCL is not involved."""
        num_gpus = 0.0 if self.config.device == "cpu" else float(ray.cluster_resources().get("GPU", 0.0))
        if self.config.device == "cuda" and not num_gpus:
            raise ClusterError("cluster.device is cuda, but Ray sees no GPU; set cluster.device=auto or cpu.")
        return min(1.0, num_gpus / self.config.num_workers)


def connect(config: ClusterConfig) -> bool:
    """Joins the Ray cluster of `config.address`, or starts one on this machine; True if it was started here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():  # a test session, or a user's own program
        return False
    worker_env = {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads of one worker would starve another
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR,
                              "runtime_env": {"env_vars": worker_env}}
    try:
        if config.address:
            ray.init(address=config.address, **common)
            return False
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray listens on all interfaces: never without a token
        ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **common)
        return True
    except (RayError, OSError, ValueError, RuntimeError, ConnectionError) as error:
        where = f"the Ray cluster at {config.address} could not be joined" if config.address else "Ray could not be started"
        raise ClusterError(f"{where} ({_first_line(error)}); check cluster.address, or use cluster=in_process.") from error


def _cause(error: RayTaskError) -> Exception:
    """What a worker's constructor raised: the user's error if it is one of ours."""
    cause = error.cause
    if isinstance(cause, NgsgdError):
        return cause
    return ClusterError(f"a worker could not start ({type(cause).__name__}: {cause}); "
                        "is the same version of ngsgd installed on every node?")


def _how_it_ended(error: RayError) -> str:
    text = str(error)
    if "SIGKILL" in text or "signal 9" in text:
        return "killed by SIGKILL"
    if isinstance(error, RayActorError):
        return "its process ended"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
