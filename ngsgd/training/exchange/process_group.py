"""All-to-all exchange of bytes among workers: gloo between CPUs, NCCL between GPUs.

Groups are objects of their own and not torch.distributed's default group, so a worker may leave one and join the next without
touching what a user's model does with torch.distributed.  Neither the store nor gloo asks who connects: they are for networks
on which nobody else is.
"""

from __future__ import annotations

import contextlib
import os
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

from ngsgd.errors import ClusterError

Bytes = npt.NDArray[np.uint8]
Backend = Literal["gloo", "nccl"]
c10d: Any = torch.distributed   # its type stubs leave out what is used here
_POLL_S = 0.001


class Group(Protocol):
    """Workers that are connected.  Every method raises RuntimeError when a member is gone or too slow."""

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        """What the members sent here, in the order of ranks; `out_sizes` bytes of `outgoing` go to each of them.

        `deadline` is in seconds of time.monotonic().  `outgoing` is not changed.
        """

    def close(self) -> None:
        """Cuts the connections, so that the others fail at once and not at their deadline."""


def new_store(host: str, timeout_s: float) -> Any:
    """Where groups meet: a server in this process, on a port of `host` that was free."""
    try:
        # left to itself the store would listen on all of this machine's addresses
        server = socket.create_server((host, 0))
    except OSError as error:
        raise ClusterError(f"this machine cannot listen on its own address {host} ({error.strerror}), where workers would meet to "
                           "average among themselves; set cluster.exchange=object_store.") from error
    port = server.getsockname()[1]
    return c10d.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
                         master_listen_fd=server.detach())


def join(backend: Backend, host: str, port: int, *, generation: int, rank: int, world_size: int, timeout_s: float,
         device: torch.device) -> Group:
    """Joins the group of that generation on the coordinator's store; all members must come within the time."""
    timeout = timedelta(seconds=timeout_s)
    # a name per generation: whoever comes late to an old one meets nobody
    store = c10d.PrefixStore(f"g{generation}", c10d.TCPStore(host, port, is_master=False, timeout=timeout))
    if backend == "nccl":
        return _NcclGroup(store, rank, world_size, timeout, device)
    return _GlooGroup(store, rank, world_size, timeout, _address_towards(host, port))


class _GlooGroup:
    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta, address: str) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        # gloo would take the address that this machine's own name stands for, often one that others cannot reach
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = c10d.ProcessGroupGloo(store, rank, world_size, options)

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        incoming = torch.empty(sum(in_sizes), dtype=torch.uint8)
        settings = c10d.AllToAllOptions()
        settings.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        self._group.alltoall_base(incoming, torch.from_numpy(outgoing), list(in_sizes), list(out_sizes), settings).wait()
        return incoming.numpy()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        del self._group  # its sockets close with it


class _NcclGroup:
    """Not run anywhere yet: there was no machine with GPUs to run it on."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> None:
        # by default NCCL's watchdog ends the whole process, and the results in it, when a peer is gone
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        torch.cuda.set_device(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._group: Any = c10d.ProcessGroupNCCL(store, rank, world_size, options)

    def all_to_all(self, outgoing: Bytes, out_sizes: Sequence[int], in_sizes: Sequence[int], deadline: float) -> Bytes:
        with torch.cuda.stream(self._stream):
            sent = torch.from_numpy(outgoing).pin_memory().to(self._device, non_blocking=True)
            received = torch.empty(sum(in_sizes), dtype=torch.uint8, device=self._device)
            work = self._group.alltoall_base(received, sent, list(in_sizes), list(out_sizes), c10d.AllToAllOptions())
            # the host must not wait on the stream before it is known to end: nothing would wake it if a peer were gone
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("the exchange on the GPUs did not end in time")
                time.sleep(_POLL_S)
            work.wait()  # the stream waits for NCCL's own, and errors are raised
            incoming: Tensor = torch.empty(len(received), dtype=torch.uint8, pin_memory=True)
            incoming.copy_(received, non_blocking=True)
        self._stream.synchronize()
        return incoming.numpy()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        del self._group


def _address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to another one."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing: datagrams have no connection
        address: str = probe.getsockname()[0]
    return address
