"""Process groups over gloo of tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def gloo_group(folder: Path | str, rank: int = 0, world_size: int = 1) -> Iterator[None]:
    """Form the group of this process with those of other processes that use the same folder.

    A DistributedDataParallel module must not outlive the context. It would be the last owner of the
    group. Its destructor joins gloo's threads while it holds the GIL. One of them can wait for the
    GIL, because each backward pass gives them a Python object (torch 2.13).
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size)
    try:
        yield
        # those in reference cycles
        gc.collect()
        # no rank leaves while another one needs it
        dist.barrier()
    finally:
        dist.destroy_process_group()
