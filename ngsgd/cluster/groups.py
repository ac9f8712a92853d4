"""Workers that are groups of processes, which sum their gradients in every step.

Each rank trains on different minibatches, with equal parameters as in DistributedDataParallel.
The coordinator communicates only with rank 0, which starts the other ranks on its machine and
passes jobs to them. If a rank dies, the job fails and is retried with new ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.cluster.exchange.process_group import Backend, Group, join
from ngsgd.cluster.exchange.rendezvous import Rendezvous
from ngsgd.cluster.fingerprint import NO_KERNEL, Fingerprint, kernels
from ngsgd.cluster.fork_server import fork_server
from ngsgd.cluster.messages import Disconnected, Messages
from ngsgd.cluster.newborn import die_with_parent
from ngsgd.cluster.process import configure_process
from ngsgd.cluster.restarts import none_agrees
from ngsgd.errors import ClusterError, NgsgdError
from ngsgd.ops.tensors import dense
from ngsgd.training.devices import Ranks
from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Place, Worker, never, np_empty

_LOCALHOST = "127.0.0.1"
# a member that hangs longer ends the job; the coordinator's deadline for a minibatch is shorter
_HANGS_S = 1800.0
_REASON_S = 2.0  # time for the error of a rank to arrive after its connections broke
# placeholder for parameters that are transferred separately
_NOTHING = LocalRef(np.empty(0, dtype=np.float32))


@dataclass(frozen=True)
class _RankSetup:
    """The first message to a rank."""

    spec: TaskSpec
    index: int
    rank: int
    num_threads: int
    port: int
    secret: bytes
    kernels: Mapping[str, str]  # C++ kernels of rank 0


class GroupRanks(Ranks):
    """One rank of a connected group."""

    def __init__(self, rank: int, size: int, group: Group, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._group, self._device = group, device

    def start_vector(self, read: Callable[[], Vector], size: int) -> Vector:
        vector = torch.zeros(size)
        if self.rank == 0:
            vector.copy_(torch.from_numpy(read()))
        # the other ranks add zeros, which preserves every bit except the sign of zeros
        return self.sum_in_place(vector.to(self._device)).cpu().numpy()

    def sum_gradients(self, model: nn.Module, num_examples: int) -> int:
        params = [p for p in model.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else dense(p.grad) for p in params]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.sum_in_place(flat)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = part.view(p.shape)
        counts = torch.tensor([num_examples], dtype=torch.int64, device=self._device)
        return int(self.sum_in_place(counts))

    def sum_(self, values: Sequence[Tensor]) -> None:
        total = self.sum_in_place(torch.stack(list(values)))
        for value, found in zip(values, total, strict=True):
            value.copy_(found)

    def any(self, flag: bool) -> bool:
        return bool(self.sum_in_place(torch.tensor([int(flag)], device=self._device)))

    def require_equal(self, model: nn.Module) -> None:
        """Raise ClusterError if the parameters of the ranks differ."""
        own = torch.stack([p.detach().double().sum() for p in model.parameters() if p.requires_grad]).sum()[None]
        total = self.sum_in_place(own.clone())
        # rounding of the sum over the ranks
        if bool((total - self.size * own).abs() > 1e-12 * total.abs()):
            raise ClusterError("the parameters of the ranks of a group differ, because an optimizer setting uses the "
                               "minibatch of one rank; set cluster.ranks_per_worker=1.")

    def close(self) -> None:
        """Leave the group, so that the other ranks fail immediately."""
        self._group.close()

    def sum_in_place(self, tensor: Tensor) -> Tensor:
        self._group.all_reduce(tensor, time.monotonic() + _HANGS_S)
        return tensor


class GroupWorker(Worker):
    """Rank 0, in the process that the coordinator started."""

    def __init__(self, spec: TaskSpec, index: int) -> None:
        self._spec = spec
        self._others: list[_OtherRank] = []
        super().__init__(spec, index, _not_connected(spec))
        # raises errors of other ranks before the first job
        self._start()

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        if not self._others:
            self._start()
        # `Ranks.start_vector` transfers the parameters
        message = replace(job, start=replace(job.start, model=_NOTHING, own=None))
        try:
            for other in self._others:
                other.messages.send(message)
            return super().run(job, place, should_stop)
        except Exception as error:
            raise self._end(error) from error

    def _start(self) -> None:
        secret = secrets.token_bytes(32)
        is_nccl = backend_of(self.device, self.ranks.size) == "nccl"
        self._rendezvous = Rendezvous(_LOCALHOST, secret, revokes=is_nccl)
        size = self.ranks.size
        try:
            self._others = [_OtherRank(_RankSetup(self._spec, self.index, rank, torch.get_num_threads(),
                                                  self._rendezvous.port, secret, kernels())) for rank in range(1, size)]
            group = _joined(self._spec, 0, self._rendezvous.port, secret, self.device)
        except Exception as error:
            raise self._end(error) from error
        finally:
            # an NCCL group needs its rendezvous for its complete life
            if not is_nccl:
                self._rendezvous.close()
        self.ranks = GroupRanks(0, size, group, self.device)
        # a machine with fewer GPUs has another one; a sum of two gradients does not depend on it
        self.ranks.summed_by = backend_of(self.device, size) if size > 2 else ""

    def _end(self, error: Exception) -> Exception:
        """End all ranks; return the error of the rank that failed first, if it is known."""
        reasons = [other.end() for other in self._others]
        self._others = []
        self._rendezvous.close()
        if isinstance(self.ranks, GroupRanks):
            self.ranks.close()
        self.ranks = _not_connected(self._spec)
        if isinstance(error, NgsgdError):
            return error
        return next((reason for reason in reasons if reason is not None), error)


class _OtherRank:
    """A process of rank 1 or higher."""

    def __init__(self, setup: _RankSetup) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.messages = setup.rank, Messages(ours)
        self._process = fork_server().launch(serve_rank, (theirs,), theirs, f"ngsgd-worker-{setup.index}-rank-{setup.rank}")
        self.messages.send(setup)

    def end(self) -> Exception | None:
        """Kill the process; return the error that it sent, or how it ended before, if any."""
        code = self._process.exit_code(0.0)
        found: Exception | None = None
        deadline = time.monotonic() + _REASON_S
        while found is None and time.monotonic() < deadline:
            try:
                found = next((one for one in self.messages.arrived() if isinstance(one, Exception)), None)
            except Disconnected:
                code = self._process.exit_code(_REASON_S)
                break
            time.sleep(0.01)
        self._process.kill()
        self.messages.close()
        if found is None and code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            # not an NgsgdError, which would end the run: the job is retried
            return RuntimeError(f"rank {self.rank} of the group ended ({how})")
        return found


def serve_rank(connection: socket.socket) -> None:
    """Receive a setup and then jobs from rank 0, until it closes the connection."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    messages = Messages(connection)
    try:
        setup = messages.receive()
        assert isinstance(setup, _RankSetup)
        configure_process(setup.num_threads, set(setup.kernels.values()) != {NO_KERNEL})
        worker = Worker(setup.spec, setup.index, _not_connected(setup.spec, setup.rank))
        group = _joined(setup.spec, setup.rank, setup.port, setup.secret, worker.device)
        worker.ranks = GroupRanks(setup.rank, worker.ranks.size, group, worker.device)
        # after the connection: rank 0 finds the reason of an end only then
        own = Fingerprint.of_this_process(setup.num_threads)
        if differing := Fingerprint(kernels=setup.kernels).differences(own, "in rank 0", f"in rank {setup.rank}"):
            raise none_agrees("; ".join(differing))
        while True:
            job = messages.receive()
            assert isinstance(job, Job)
            worker.train(job)
    except Disconnected:
        sys.exit(0)
    except Exception as error:
        with contextlib.suppress(Disconnected):
            messages.send(error)
        sys.exit(1)


def make_worker(spec: TaskSpec, index: int) -> Worker:
    """Build the configured kind of worker."""
    return Worker(spec, index) if spec.settings.cluster.ranks_per_worker == 1 else GroupWorker(spec, index)


def backend_of(device: torch.device, num_ranks: int) -> Backend:
    """NCCL if every rank of a group has a separate GPU, else gloo.

    The visible GPUs are assigned round-robin; NCCL rejects two ranks on one GPU. A process sees at
    most one MIG instance, so ranks on MIG instances use gloo.
    """
    return "nccl" if device.type == "cuda" and torch.cuda.device_count() >= num_ranks else "gloo"


def _not_connected(spec: TaskSpec, rank: int = 0) -> Ranks:
    ranks = Ranks()
    ranks.rank, ranks.size = rank, spec.settings.cluster.ranks_per_worker
    return ranks


def _joined(spec: TaskSpec, rank: int, port: int, secret: bytes, device: torch.device) -> Group:
    cluster = spec.settings.cluster
    try:
        return join(backend_of(device, cluster.ranks_per_worker), _LOCALHOST, port, secret=secret, generation=0, rank=rank,
                    world_size=cluster.ranks_per_worker, timeout_s=cluster.wait_for_workers_s, device=device)
    except RuntimeError as error:
        raise ClusterError(f"the {cluster.ranks_per_worker} ranks of a group did not connect within cluster.wait_for_workers_s = "
                           f"{cluster.wait_for_workers_s:g}: {error}; raise the timeout or see the log of the worker.") from error
