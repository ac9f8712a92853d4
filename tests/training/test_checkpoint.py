"""Checkpoints are whole or absent."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd import files
from ngsgd.errors import CheckpointError
from ngsgd.schedules import Shard
from ngsgd.training.checkpoint import CheckpointStore
from ngsgd.training.flat import Layout
from ngsgd.training.job import Piece
from ngsgd.training.planning import Progress


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", Layout.of(torch.nn.Linear(3, 2)), num_to_keep=2)


def vector(value: float) -> np.ndarray:
    return np.full(8, value, np.float32)


def state(value: float) -> dict[str, Any]:
    """Of an outer optimiser with momentum."""
    return {"arrays": {"model": vector(value), "momentum": vector(-value)}, "numbers": {"eta": 0.5}}


def at(outer_iter: int) -> Progress:
    return Progress(outer_iter, passes_done=2 * outer_iter, frames_processed=100, elapsed_s=1.5)


def test_what_is_saved_comes_back(store: CheckpointStore) -> None:
    late = Piece(Shard(3, 1), outer_iter=2, job=0, first=4, stop=9)
    progress = replace(at(4), pending=(late,), quarantined=(replace(late, stop=None),), lr_scale=0.5)
    saved = store.save(progress, state(0.25), {"outer_iter": 4})
    latest, problems = store.latest()
    assert latest is not None and problems == []
    assert latest.progress == progress
    assert np.array_equal(latest.parameters, vector(0.25))
    assert np.array_equal(latest.buffers["momentum"], vector(-0.25))
    assert latest.numbers == {"eta": 0.5}
    assert latest.commit == {"outer_iter": 4, "model": saved.model_sha256} and saved.model_sha256 == latest.model_sha256


def test_only_the_newest_are_kept(store: CheckpointStore) -> None:
    for outer_iter in range(12):
        store.save(at(outer_iter), state(outer_iter))
    assert [path.name for path in sorted(store.directory.iterdir())] == ["iter-000010", "iter-000011"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "broken manifest", "no outer state"])
def test_a_damaged_checkpoint_is_passed_over_and_named(store: CheckpointStore, damage: str) -> None:
    store.save(at(0), state(0))
    store.save(at(1), state(1))
    newest = store.directory / "iter-000001"
    content = (newest / "model.safetensors").read_bytes()
    if damage == "truncate":
        (newest / "model.safetensors").write_bytes(content[:-4])
    elif damage == "flip":
        (newest / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no outer state":
        (newest / "outer.safetensors").unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    latest, problems = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0
    assert len(problems) == 1 and "iter-000001 is damaged" in problems[0]


def test_a_checkpoint_of_another_model_is_refused(store: CheckpointStore) -> None:
    store.save(at(0), state(0))
    other = CheckpointStore(store.directory, Layout.of(torch.nn.Linear(2, 3)), 2)
    with pytest.raises(CheckpointError, match="other layers"):
        other.load(store.directory / "iter-000000")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_is_told_and_leaves_nothing_half_written(
        store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.save(at(0), state(0))

    def fails(path: Path) -> None:
        raise OSError(code, "No space left on device")
    monkeypatch.setattr(files, "fsync", fails)
    with pytest.raises(CheckpointError, match=r"outer iteration 2 could not be saved .*No space left on device"):
        store.save(at(1), state(1))
    assert [path.name for path in store.directory.iterdir()] == ["iter-000000"]
    latest, _ = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0


def test_models_for_the_final_combination_outlive_their_checkpoints(store: CheckpointStore) -> None:
    store.candidates = (1, 3)
    for outer_iter in range(6):
        store.save(at(outer_iter), state(outer_iter))
    assert store.kept() == [3, 1]
    assert np.array_equal(store.load_model(1), vector(1))
    (store.directory / "iter-000005" / "model.safetensors").write_bytes(b"no")
    store.candidates = (1, 3, 5)
    store.save(at(5), state(7))  # done again
    assert np.array_equal(store.load_model(5), vector(7))
    (store.models / "iter-000003.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"iter-000003\.safetensors is damaged"):
        store.load_model(3)
