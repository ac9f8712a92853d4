"""All-to-all exchange of bytes among workers: gloo between CPUs, NCCL between GPUs.

Groups are not the default group of torch.distributed, which a custom model may use.

Neither gloo nor NCCL authenticates connections. So the members publish their addresses in a store
that is protected by the secret of the group, prove the secret to each other over the new
connections, and authenticate everything they send (`ngsgd.cluster.exchange.collective.pack`).
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
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

from ngsgd.cluster.exchange.authentication import TAG_BYTES, RefusedError, derive
from ngsgd.cluster.exchange.rendezvous import MemberStore

Bytes = npt.NDArray[np.uint8]
Backend = Literal["gloo", "nccl"]
c10d: Any = torch.distributed  # the type stubs lack the names used here
_POLL_S = 0.0001
# read when a ProcessGroupNCCL is created. By default a thread of torch ends the complete process,
# and loses its results, when a peer is gone; with blocking waits there is no such thread
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


def join(backend: Backend, host: str, port: int, *, secret: bytes, generation: int, rank: int, world_size: int,
         timeout_s: float, device: torch.device) -> Group:
    """Join the group of that generation on the rendezvous of the coordinator.

    Raises:
        RuntimeError: a member is missing after `timeout_s`, or does not hold the secret.
    """
    deadline = time.monotonic() + timeout_s
    store = MemberStore(host, port, secret, timeout_s, world_size)
    try:
        # the address of this machine on the route to the coordinator
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:3]) as probe:
            probe.connect(found[4])  # sends nothing: datagrams have no connection
            address: str = probe.getsockname()[0]
        group = Group(backend, store, rank, world_size, timeout_s=timeout_s, address=address, device=device)
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
    """Prove to every other member that this one holds the secret, and verify their proofs."""
    def proof(prover: int, verifier: int, nonce: bytes) -> bytes:
        return derive(secret, "member", generation, prover, verifier, nonce)[:TAG_BYTES]

    def exchanged(parts: Sequence[bytes]) -> list[bytes]:
        sizes = [TAG_BYTES] * world_size
        outgoing = np.frombuffer(bytearray(b"".join(parts)), np.uint8)
        received = group.all_to_all(outgoing, sizes, sizes, deadline).tobytes()
        return [received[first:first + TAG_BYTES] for first in range(0, len(received), TAG_BYTES)]

    nonces = [secrets.token_bytes(TAG_BYTES) for _ in range(world_size)]
    proofs = [proof(rank, other, nonce) for other, nonce in enumerate(exchanged(nonces))]
    for other, found in enumerate(exchanged(proofs)):
        if not secrets.compare_digest(found, proof(other, rank, nonces[other])):
            raise RefusedError(f"the peer that is connected as member {other} does not hold the secret of the group")


class Group:
    """Connected workers; every method raises RuntimeError if a member is gone or too slow.

    Every wait has a deadline. With NCCL it also ends when the rendezvous is closed: by the
    coordinator when a worker dies, or because a member disconnects. `close` then aborts the
    communicator, which also ends kernels that wait for a missing peer. NCCL has run on one GPU,
    with one rank; tests replace it by gloo.
    """

    def __init__(self, backend: Backend, store: MemberStore, rank: int, world_size: int, *, timeout_s: float, address: str,
                 device: torch.device) -> None:
        self._is_nccl = backend == "nccl"
        self._is_gpu = self._is_nccl and device.type == "cuda"
        self._device = device if self._is_gpu else torch.device("cpu")
        if self._is_gpu:
            torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device) if self._is_gpu else None
        self._store = store  # torch keeps only the C++ part, which calls methods of the Python part
        if self._is_nccl:
            if not hasattr(c10d, "ProcessGroupNCCL"):
                raise RuntimeError(f"torch {torch.__version__} is built without NCCL")
            with nccl_options(timeout_s) as options:
                self._group: Any = c10d.ProcessGroupNCCL(store, rank, world_size, options)
            return
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # gloo would use that of the host name, which others often cannot reach
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        self._group = c10d.ProcessGroupGloo(store, rank, world_size, options)
        # all connections exist: gloo needs no more addresses
        store.close()

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        """Send bytes to all members, in the order of ranks, and return those received from them.

        The sizes are of the part for or from each member; `deadline` is one of time.monotonic().
        """
        # without a stream the context has no effect
        with torch.cuda.stream(self._stream):
            sent = torch.from_numpy(outgoing)
            if self._is_gpu:
                sent = sent.pin_memory().to(self._device, non_blocking=True)
            received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=self._device)
            settings = c10d.AllToAllOptions()
            # NCCL otherwise uses the current stream and returns no work to wait for
            settings.timeout, settings.asyncOp = timedelta(seconds=max(0.001, deadline - time.monotonic())), True
            self._wait(self._group.alltoall_base(received, sent, list(in_sizes), list(out_sizes), settings), deadline)
            if self._stream is None:
                return received.numpy()
            incoming = torch.empty(len(received), dtype=torch.uint8, pin_memory=True)
            incoming.copy_(received, non_blocking=True)
        # returns soon: the NCCL operation is complete
        self._stream.synchronize()
        return incoming.numpy()

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        """Replace a tensor by the sum over all members, bitwise identical on all of them."""
        settings = c10d.AllreduceOptions()
        settings.timeout, settings.asyncOp = timedelta(seconds=max(0.001, deadline - time.monotonic())), True
        self._wait(self._group.allreduce([tensor], settings), deadline)

    def close(self) -> None:
        """Close the connections, so that the others fail immediately, not at their deadline."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        # the sockets of gloo close with it
        del self._group
        self._store.close()

    def _wait(self, work: Any, deadline: float) -> None:
        """Wait for an operation; raise RuntimeError if it fails, is late or is revoked."""
        # the host must not block on a stream: nothing would wake it if a peer were gone
        while self._is_nccl and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("the exchange over NCCL did not end in time")
            if self._store.is_revoked():
                raise RuntimeError("a member of the NCCL group is gone")
            time.sleep(_POLL_S)
        # raises the error of the operation; the current stream then waits for the stream of NCCL
        work.wait()


@contextlib.contextmanager
def nccl_options(timeout_s: float) -> Iterator[Any]:
    """Options for a ProcessGroupNCCL created in this context, whose failures are exceptions.

    `timeout_s` is the maximum time for one operation, and for establishing the connections.
    """
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    # a call that waits for a missing peer returns instead of blocking forever
    options.config.blocking = 0
    # an integer number of seconds; torch reads it once per process
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield options
    finally:
        # other groups of this process belong to the user
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before
