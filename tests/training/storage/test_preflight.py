"""Checks before the first job."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from ngsgd.cluster.fingerprint import version_digest
from ngsgd.errors import CheckpointError
from ngsgd.training.storage.checkpoint import require_room


def test_a_disk_without_room_for_three_checkpoints_is_reported_before_training(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 300 * 10**6))
    require_room(tmp_path, 100 * 10**6)
    with pytest.raises(CheckpointError, match=r"300 MB.*303 MB"):
        require_room(tmp_path, 101 * 10**6)


def test_the_fingerprint_is_of_the_sources_and_stays() -> None:
    assert len(version_digest()) == 64 and version_digest() == version_digest()
