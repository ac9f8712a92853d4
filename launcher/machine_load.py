"""Load of the machine that this process runs on: figures for charts."""

from __future__ import annotations

import contextlib
from pathlib import Path


def load_of_machine(folder: Path) -> dict[str, float]:
    """Processor, memory, network and graphics memory in use, and the room on the disk of `folder`; what cannot be told is left out.

    The processor's share is the mean since this process asked before; 0 the first time.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(ImportError, OSError):
        import psutil

        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        found = {"cpu_percent": psutil.cpu_percent(), "memory_used_gb": (memory.total - memory.available) / 1e9,
                 "network_sent_mb": network.bytes_sent / 1e6, "network_received_mb": network.bytes_recv / 1e6}
        # last: a worker need not have that folder
        found["disk_free_gb"] = psutil.disk_usage(str(folder)).free / 1e9
    return found | _gpu_memory()


def _gpu_memory() -> dict[str, float]:
    """Of the first GPU that this process sees; nothing where it uses none, since asking would make it take one."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_used_gb": (total - free) / 1e9}
