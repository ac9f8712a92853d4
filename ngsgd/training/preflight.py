"""What is looked at before the first job, because finding it out later would cost hours."""

from __future__ import annotations

import hashlib
import shutil
from functools import cache
from pathlib import Path

import torch

from ngsgd.errors import CheckpointError
from ngsgd.training.fingerprint import code_digest

_CHECKPOINTS = 3  # the newest, the one being written, and one that was damaged


@cache
def fingerprint() -> str:
    """Of the code that decides a run's numbers: this package's sources, and torch's version.

    `ngsgd.training.fingerprint` has all that decides a run's bits.
    """
    return hashlib.sha256(f"{torch.__version__}{code_digest()}".encode()).hexdigest()


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises CheckpointError unless there is room for three checkpoints of so many bytes."""
    free = shutil.disk_usage(directory).free
    if free < _CHECKPOINTS * num_bytes:
        raise CheckpointError(f"{directory} has {free / 1e6:.0f} MB free, and three checkpoints take "
                              f"{_CHECKPOINTS * num_bytes / 1e6:.0f} MB; make room, or choose another place with output_dir=PATH.")
