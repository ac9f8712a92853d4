"""All-to-all exchange of bytes among workers: gloo between CPUs, NCCL between GPUs.

Groups are objects of their own and not torch.distributed's default group, so a worker may leave one and join the next without
touching what a user's model does with torch.distributed.

Neither gloo nor NCCL asks who connects.  So the members publish their addresses in a store behind the group's secret, prove the
secret to each other over the connections that came about, and authenticate everything that they send (`parcels`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

from ngsgd.cluster.exchange.authentication import TAG_BYTES, RefusedError, derive
from ngsgd.cluster.exchange.rendezvous import MemberStore

Bytes = npt.NDArray[np.uint8]
Backend = Literal["gloo", "nccl"]
# its type stubs leave out what is used here
c10d: Any = torch.distributed
_POLL_S = 0.0001
# Read when a ProcessGroupNCCL is made.  By default a thread of torch ends the complete process, and
# the results in it, when a peer is gone; with blocking waits there is no such thread
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class Group(Protocol):
    """Workers that are connected.  Every method raises RuntimeError when a member is gone or too slow."""

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        """What the members sent here, in the order of ranks; `out_sizes` bytes of `outgoing` go to each of them.

        `deadline` is in seconds of time.monotonic().  `outgoing` is not changed.
        """

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        """Replaces a tensor by the sum of those of all members, with the same bits everywhere."""

    def close(self) -> None:
        """Cuts the connections, so that the others fail at once and not at their deadline."""


def join(backend: Backend, host: str, port: int, *, secret: bytes, generation: int, rank: int, world_size: int,
         timeout_s: float, device: torch.device) -> Group:
    """Joins the group of that generation on the coordinator's rendezvous; all members must come within the time.

    Raises RuntimeError also where one of those that are connected does not hold the secret.
    """
    deadline = time.monotonic() + timeout_s
    store = MemberStore(host, port, secret, timeout_s)
    group: Group
    try:
        if backend == "nccl":
            group = NcclGroup(store, rank, world_size, timeout_s, device)
        else:
            timeout = timedelta(seconds=timeout_s)
            group = GlooGroup(store, rank, world_size, timeout, _address_towards(host, port))
    except BaseException:
        store.close()
        raise
    try:
        prove_members(group, secret, generation, rank, world_size, deadline)
    except BaseException:
        group.close()
        raise
    return group


def prove_members(group: Group, secret: bytes, generation: int, rank: int, world_size: int, deadline: float) -> None:
    """Every member proves to every other one that it holds the secret, before anything else is sent."""
    def proof(prover: int, verifier: int, nonce: bytes) -> bytes:
        return derive(secret, "member", generation, prover, verifier, nonce)[:TAG_BYTES]

    sizes = [TAG_BYTES] * world_size
    nonces = [secrets.token_bytes(TAG_BYTES) for _ in range(world_size)]
    theirs = _cut(group.all_to_all(_joined(nonces), sizes, sizes, deadline))
    proofs = [proof(rank, other, nonce) for other, nonce in enumerate(theirs)]
    for other, found in enumerate(_cut(group.all_to_all(_joined(proofs), sizes, sizes, deadline))):
        if not secrets.compare_digest(found, proof(other, rank, nonces[other])):
            raise RefusedError(f"the peer that is connected as member {other} does not hold the group's secret")


def _joined(parts: Sequence[bytes]) -> Bytes:
    return np.frombuffer(bytearray(b"".join(parts)), np.uint8)


def _cut(content: Bytes) -> list[bytes]:
    whole = content.tobytes()
    return [whole[first:first + TAG_BYTES] for first in range(0, len(whole), TAG_BYTES)]


class GlooGroup:
    def __init__(self, store: MemberStore, rank: int, world_size: int, timeout: timedelta, address: str) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        # gloo would take the address that this machine's own name stands for, often one that others
        # cannot reach
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = c10d.ProcessGroupGloo(store, rank, world_size, options)
        # the connections are there: gloo asks for no more addresses
        store.close()
        # torch keeps the C++ part alone, which calls methods of the Python part
        self._store = store

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        incoming = torch.empty(sum(in_sizes), dtype=torch.uint8)
        settings = c10d.AllToAllOptions()
        settings.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        self._group.alltoall_base(incoming, torch.from_numpy(outgoing), list(in_sizes), list(out_sizes), settings).wait()
        return incoming.numpy()

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        settings = c10d.AllreduceOptions()
        settings.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        self._group.allreduce([tensor], settings).wait()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        # its sockets close with it
        del self._group


class NcclGroup:
    """GPUs that are connected by NCCL.  It has not run on a GPU yet; tests put gloo in its place.

    Every wait has a deadline, and ends at once when the rendezvous is closed: the coordinator closes
    it when a worker dies, and it closes itself when a member disconnects.  `close` then aborts the
    communicator, which also ends kernels that wait for a peer that is gone.  NCCL authenticates no
    connection; see the top of this file.
    """

    def __init__(self, store: MemberStore, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
        if not hasattr(c10d, "ProcessGroupNCCL"):
            raise RuntimeError(f"torch {torch.__version__} is built without NCCL")
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(device)
        self._device, self._is_gpu = device, is_gpu
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._store = store
        with nccl_options(timeout_s) as options:
            self._group: Any = c10d.ProcessGroupNCCL(store, rank, world_size, options)

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        settings = c10d.AllToAllOptions()
        # else torch uses the current stream and returns nothing that can be waited for
        settings.asyncOp = True
        # without a stream the context does nothing
        with torch.cuda.stream(self._stream):
            sent = self._pinned(torch.from_numpy(outgoing)).to(self._device, non_blocking=True)
            received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=self._device)
            self._wait(self._group.alltoall_base(received, sent, list(in_sizes), list(out_sizes), settings), deadline)
            incoming = torch.empty(len(received), dtype=torch.uint8, pin_memory=self._is_gpu)
            incoming.copy_(received, non_blocking=True)
        if self._stream is not None:
            # ends soon: NCCL's part of it is done
            self._stream.synchronize()
        return incoming.numpy()

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        settings = c10d.AllreduceOptions()
        settings.asyncOp = True
        self._wait(self._group.allreduce([tensor], settings), deadline)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        del self._group
        # the others fail now, and not at their deadline
        self._store.close()

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._is_gpu else tensor

    def _wait(self, work: Any, deadline: float) -> None:
        """Wait until it is done; RuntimeError when it failed, is late, or the group was revoked."""
        # the host must not wait on the stream: nothing would wake it if a peer were gone
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the exchange over NCCL did not end in time")
            if self._store.is_revoked():
                raise RuntimeError("a member of the NCCL group is gone")
            time.sleep(_POLL_S)
        # raises the operation's error; the current stream then waits for NCCL's own
        work.wait()


@contextlib.contextmanager
def nccl_options(timeout_s: float) -> Iterator[Any]:
    """Options for a ProcessGroupNCCL that is made inside the context, and whose failures are exceptions.

    Args:
        timeout_s: Longest time for one operation, and for the connections to come about, in seconds.

    Yields:
        torch.distributed.ProcessGroupNCCL.Options.
    """
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    # a call that waits for a peer that never comes returns, instead of blocking for ever
    options.config.blocking = 0
    # in whole seconds; torch reads it once in the life of a process
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield options
    finally:
        # other groups of this process are the user's
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another one."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # sends nothing: datagrams have no connection
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address
