"""Checkpoints are whole or absent."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from ngsgd import files
from ngsgd.errors import CheckpointError
from ngsgd.training.checkpoint import CheckpointStore, Progress
from ngsgd.training.flat import Layout


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", Layout.of(torch.nn.Linear(3, 2)), num_to_keep=2)


def vector(value: float) -> np.ndarray:
    return np.full(8, value, np.float32)


def test_what_is_saved_comes_back(store: CheckpointStore) -> None:
    store.save(Progress(4, 1000, 1.5), vector(0.25))
    latest, problems = store.latest()
    assert latest is not None and problems == []
    assert latest.progress == Progress(4, 1000, 1.5)
    assert np.array_equal(latest.parameters, vector(0.25))


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for outer_iter in range(12):
        store.save(Progress(outer_iter, 0, 0.0), vector(outer_iter))
    assert [path.name for path in sorted(store.directory.iterdir())] == ["iter-000010", "iter-000011"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "broken manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named(store: CheckpointStore, damage: str) -> None:
    store.save(Progress(0, 10, 0.0), vector(0))
    store.save(Progress(1, 20, 0.0), vector(1))
    newest = store.directory / "iter-000001"
    content = (newest / "model.safetensors").read_bytes()
    if damage == "truncate":
        (newest / "model.safetensors").write_bytes(content[:-4])
    elif damage == "flip":
        (newest / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    latest, problems = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0
    assert len(problems) == 1 and "iter-000001 is damaged" in problems[0]


def test_a_checkpoint_of_another_model_is_refused(store: CheckpointStore) -> None:
    store.save(Progress(0, 10, 0.0), vector(0))
    other = CheckpointStore(store.directory, Layout.of(torch.nn.Linear(2, 3)), 2)
    with pytest.raises(CheckpointError, match="other layers"):
        other.load(store.directory / "iter-000000")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_is_told_and_leaves_nothing_half_written(
        store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.save(Progress(0, 10, 0.0), vector(0))

    def fails(path: Path) -> None:
        raise OSError(code, "No space left on device")
    monkeypatch.setattr(files, "_fsync", fails)
    with pytest.raises(CheckpointError, match=r"outer iteration 2 could not be saved .*No space left on device"):
        store.save(Progress(1, 20, 0.0), vector(1))
    assert [path.name for path in store.directory.iterdir()] == ["iter-000000"]
    latest, _ = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0
