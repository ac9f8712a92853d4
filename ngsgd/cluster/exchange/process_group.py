"""All-to-all exchange of bytes among workers: gloo between CPUs, NCCL between GPUs.

Groups are objects of their own and not torch.distributed's default group, so a worker may leave one and join the next without
touching what a user's model does with torch.distributed.

Neither gloo nor NCCL asks who connects.  So the members publish their addresses in a store behind the group's secret, prove the
secret to each other over the connections that came about, and authenticate everything that they send (`parcels`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
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
_POLL_S = 0.001


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
    timeout = timedelta(seconds=timeout_s)
    store = MemberStore(host, port, secret, timeout_s)
    group: Group
    if backend == "nccl":
        group = _NcclGroup(store, rank, world_size, timeout, device)
    else:
        group = GlooGroup(store, rank, world_size, timeout, _address_towards(host, port))
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


class _NcclGroup:
    """Not run anywhere yet, so only `cluster.exchange=nccl` chooses it.  NCCL's own connections are not authenticated by NCCL."""

    def __init__(self, store: MemberStore, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> None:
        # by default NCCL's watchdog ends the whole process, and the results in it, when a peer is
        # gone
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # see above; NCCL asks it when the group is first used
        self._store = store
        self._group: Any = c10d.ProcessGroupNCCL(store, rank, world_size, options)

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        with torch.cuda.stream(self._stream):
            sent = torch.from_numpy(outgoing).pin_memory().to(self._device, non_blocking=True)
            received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=self._device)
            work = self._group.alltoall_base(received, sent, list(in_sizes), list(out_sizes), c10d.AllToAllOptions())
            # the host must not wait on the stream before it is known to end: nothing would wake it
            # if a peer were gone
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("the exchange on the GPUs did not end in time")
                time.sleep(_POLL_S)
            # the stream waits for NCCL's own, and errors are raised
            work.wait()
            incoming: Tensor = torch.empty(len(received), dtype=torch.uint8, pin_memory=True)
            incoming.copy_(received, non_blocking=True)
        self._stream.synchronize()
        return incoming.numpy()

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        work = self._group.allreduce([tensor], c10d.AllreduceOptions())
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the sum over the GPUs did not end in time")
        work.wait()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        del self._group


def _address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another one."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # sends nothing: datagrams have no connection
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address
