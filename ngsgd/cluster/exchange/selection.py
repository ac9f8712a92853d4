"""Selection of the transfer method of results by the devices of the workers.

NCCL rejects two processes, or two MIG instances, on one GPU; CUDA IPC is impossible between these.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from ngsgd.errors import ClusterError
from ngsgd.training.job import JobResult, LocalRef
from ngsgd.training.parameter_deltas import decompress

Way = Literal["shared_memory", "object_store", "collective", "nccl"]


@dataclass(frozen=True)
class WorkerDevice:
    """The device of a worker, as seen in its process."""

    host: str
    is_near: bool  # shares memory with the coordinator
    gpu: str = ""  # PCI address, shared by all MIG instances of a GPU; empty: the worker has no GPU
    uuid: str = ""  # of the GPU, or of the MIG instance
    is_mig: bool = False

    @classmethod
    def of(cls, device: torch.device, *, is_near: bool) -> WorkerDevice:
        """Query the identity of `device` in the process that uses it."""
        host = os.uname().nodename
        if device.type != "cuda":
            return cls(host, is_near)
        # the type stubs of torch lack some properties
        found: Any = torch.cuda.get_device_properties(device)
        uuid = str(getattr(found, "uuid", ""))
        address = ""
        # some versions of torch do not provide it
        if hasattr(found, "pci_bus_id"):
            address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
        return cls(host, is_near, address or uuid or str(device), uuid, " MIG " in f"{found.name} ")


def choose_way(wanted: str, devices: Sequence[WorkerDevice], *, jobs_keep_state: bool) -> tuple[Way, str]:
    """Return (transfer method of results for the devices of all workers, reason for it).

    If jobs keep state, they continue from their own results, which the workers must not keep.

    Raises:
        ClusterError: the wanted method is impossible.
    """
    far = [worker for worker, device in enumerate(devices) if not device.is_near]
    if wanted == "shared_memory" and far:
        raise ClusterError(f"cluster.exchange is shared_memory, but worker {far[0]} is on another "
                           "machine; set cluster.exchange=auto.")
    if wanted == "nccl" and (obstacle := _why_not_nccl(devices)):
        raise ClusterError(f"cluster.exchange is nccl, but {obstacle}; set cluster.exchange=auto.")
    if wanted != "auto":
        return wanted, "as set"  # type: ignore[return-value]
    if not far:
        return "shared_memory", "all workers are on this machine"
    if len(devices) == 1 or jobs_keep_state:
        return "object_store", "jobs continue from their own results" if jobs_keep_state else "there is one worker"
    # a default must have run on the hardware that it is for, and NCCL has run with one GPU only
    return "collective", "workers are on several machines"


def _why_not_nccl(devices: Sequence[WorkerDevice]) -> str:
    """Return why NCCL cannot connect these workers; empty if it can."""
    users: dict[tuple[str, str], int] = {}
    for worker, device in enumerate(devices):
        if not device.gpu:
            return f"worker {worker} has no GPU"
        if device.is_mig:
            return f"worker {worker} has a MIG instance of a GPU"
        first = users.setdefault((device.host, device.gpu), worker)
        if first != worker:
            return f"workers {first} and {worker} share GPU {device.gpu} of {device.host}"
    return ""


def packed(result: JobResult) -> JobResult:
    """Return the result of a worker without its vector if it contains a code of it."""
    if result.encoded is None:
        return result
    return replace(result, sent=LocalRef(np.empty(0, np.float32)))


def unpacked(result: JobResult) -> JobResult:
    """Decode a result in the coordinator, if its vector was not sent."""
    if result.encoded is None:
        return result
    move = decompress(result.encoded, result.exact)
    if result.job.returns == "parameters":
        np.add(move, result.job.start.model.read(), out=move)
    return replace(result, sent=LocalRef(move), encoded=None, exact=())
