"""Memory of this machine, or of its container, that is not in use."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(cgroup: Path = _CGROUP) -> float:
    """Bytes that can be allocated without swapping, page cache included."""
    import psutil

    available = float(psutil.virtual_memory().available)
    try:
        limit, used = (float((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        # no such limit: "max"
        return available
    return min(available, max(0.0, limit - used))
