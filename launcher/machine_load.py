"""Load of the machine that this process runs on: figures for charts."""

from __future__ import annotations

import contextlib
from pathlib import Path


def load_of_machine(folder: Path) -> dict[str, float]:
    """Return load of processor, memory, network and GPU, and free space on the disk of `folder`.

    Unavailable figures are omitted. The processor load is the mean since the previous call of this
    process, and 0 at the first call.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(ImportError, OSError):
        import psutil

        memory, network = psutil.virtual_memory(), psutil.net_io_counters()
        found = {"cpu_percent": psutil.cpu_percent(), "memory_used_gb": (memory.total - memory.available) / 1e9,
                 "network_sent_mb": network.bytes_sent / 1e6, "network_received_mb": network.bytes_recv / 1e6}
        # last, because the folder may not exist on a worker
        found["disk_free_gb"] = psutil.disk_usage(str(folder)).free / 1e9
    return found | _gpu_memory()


def _gpu_memory() -> dict[str, float]:
    """Memory of the first GPU; empty without a CUDA context, which a query would create."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"gpu_memory_used_gb": (total - free) / 1e9}
