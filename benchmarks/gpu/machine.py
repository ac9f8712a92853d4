"""The device, the versions and the code of a run, as recorded in its JSON file."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# packages that parts use beyond torch and numpy
_PACKAGES = ("numpy", "ray", "hydra-core", "safetensors", "psutil", "kaldi-decoder", "triton")


def describe(*, dry_run: bool) -> dict[str, Any]:
    """Device, versions and commit; the device is the CPU in a dry run."""
    found: dict[str, Any] = {
        "device": device_name(dry_run=dry_run),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "packages": _versions(),
    }
    if not dry_run and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "num_gpus": torch.cuda.device_count(),
            "driver": _driver(),
            "cudnn": torch.backends.cudnn.version(),
        }
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def device_name(*, dry_run: bool) -> str:
    """The name of the GPU, or of the processor in a dry run."""
    if not dry_run and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU, {_processor()}"


def commit() -> str:
    """Short commit id, with + where files differ from it; "" outside of a git repository."""
    try:
        words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def library_digest() -> str:
    """SHA-256 of the sources of the library and the service: the code that is measured."""
    folders = ("ngsgd", "launcher", "conf")
    return digest(
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".cpp", ".yaml")
    )


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of the names and contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        match = re.search(
            r"^model name\s*:\s*(.*)$",
            Path("/proc/cpuinfo").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if match:
            return " ".join(match[1].split())
    return platform.processor() or platform.machine()


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=20, check=False
        ).stdout.strip()
    return ""
