"""Checkpoints are complete or absent."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ngsgd import files
from ngsgd.errors import CheckpointError, DataError, RunLockedError
from ngsgd.files import require_room
from ngsgd.launcher.why.causes import of_error
from ngsgd.runs.failure_record import describe
from ngsgd.schedules import Shard
from ngsgd.training.job import WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.planning import Progress
from ngsgd.training.storage import checkpoint
from ngsgd.training.storage.checkpoint import CheckpointStore, JobStates
from ngsgd.training.storage.lock import RunLock


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", FlatLayout.of(torch.nn.Linear(3, 2)), num_to_keep=2)


def vector(value: float) -> np.ndarray:
    return np.full(8, value, np.float32)


def state(value: float) -> dict[str, Any]:
    """Of an outer optimizer with momentum."""
    return {"arrays": {"model": vector(value), "momentum": vector(-value)}, "numbers": {"eta": 0.5}}


def at(outer_iter: int) -> Progress:
    return Progress(outer_iter, passes_done=2 * outer_iter, frames_processed=100, elapsed_s=1.5)


def test_saved_data_is_loaded_again(store: CheckpointStore) -> None:
    late = WorkItem(Shard(3, 1), outer_iter=2, job=0, first=4, stop=9)
    progress = replace(at(4), pending=(late,), quarantined=(replace(late, stop=None),), lr_scale=0.5)
    saved = store.save(progress, state(0.25), {"outer_iter": 4})
    latest, problems = store.latest()
    assert latest is not None and problems == []
    assert latest.progress == progress
    assert np.array_equal(latest.parameters, vector(0.25))
    assert np.array_equal(latest.buffers["momentum"], vector(-0.25))
    assert latest.numbers == {"eta": 0.5}
    assert latest.commit == {"outer_iter": 4, "model": saved.model_sha256} and saved.model_sha256 == latest.model_sha256


def test_the_model_of_an_outer_iteration_is_found_by_its_number(store: CheckpointStore) -> None:
    for number in range(3):
        store.save(at(number), state(number))
    assert np.array_equal(store.model_after(1), vector(1.0))
    assert np.array_equal(store.model_after(2), vector(2.0))
    with pytest.raises(CheckpointError, match="not kept"):
        store.model_after(0)


@pytest.fixture
def seldom(store: CheckpointStore) -> CheckpointStore:
    """A store with checkpoints of outer iterations 0 to 7; those of 0, 3 and 6 had job states."""
    store.jobs_interval, store.num_to_keep = 3, 1
    for number in range(8):
        store.save(at(number), state(number), jobs=JobStates({0: vector(number)}) if store.wants_jobs(number) else None)
    return store


def without_reading(store: CheckpointStore, numbers: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files of these outer iterations unreadable."""
    def load(path: Path) -> Any:
        if int(path.parent.name[-6:]) in numbers:
            raise OSError(errno.EIO, "Input/output error")
        return load_file(path)
    monkeypatch.setattr(checkpoint, "load_file", load)


def test_two_checkpoints_with_job_states_are_kept(seldom: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seldom.outer_iters() == [3, 6, 7]
    found, problems = seldom.latest()
    assert found is not None and found.progress.outer_iter == 6 and problems == []
    (seldom.directory / "iter-000006" / "model.safetensors").unlink()
    found, problems = seldom.latest()
    assert found is not None and found.progress.outer_iter == 3 and len(problems) == 1


def test_after_a_return_to_an_earlier_state_new_checkpoints_outlive_the_later_ones(seldom: CheckpointStore) -> None:
    # of a run that continues after outer iteration 3
    saved = seldom.save(at(4), state(9.0))
    assert seldom.outer_iters() == [3, 4, 6]
    again = seldom.load(seldom.directory / "iter-000004")
    assert again.model_sha256 == saved.model_sha256 and np.array_equal(again.parameters, vector(9.0))


@pytest.mark.parametrize("number", [6, 7])
def test_a_checkpoint_that_cannot_be_read_ends_the_resumption(seldom: CheckpointStore, monkeypatch: pytest.MonkeyPatch,
                                                              number: int) -> None:
    without_reading(seldom, {number}, monkeypatch)
    with pytest.raises(CheckpointError, match=f"iter-{number:06d}"):
        seldom.latest()


def test_without_undamaged_job_states_the_newest_checkpoint_is_used(seldom: CheckpointStore) -> None:
    for number in (3, 6):
        (seldom.directory / f"iter-{number:06d}" / "model.safetensors").unlink()
    found, problems = seldom.latest()
    assert found is not None and found.progress.outer_iter == 7
    assert len(problems) == 3 and "bitwise" in problems[-1]


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
    other = CheckpointStore(store.directory, FlatLayout.of(torch.nn.Linear(2, 3)), 2)
    with pytest.raises(CheckpointError, match=r"weight.*\(2, 3\)"):
        other.load(store.directory / "iter-000000")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_is_reported_without_partial_files(
        store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.save(at(0), state(0))

    def fails(path: Path) -> None:
        raise OSError(code, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync", fails)
        with pytest.raises(CheckpointError, match="iteration 2"):
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


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all leaves of a JSON value."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in _leaves(inner, (*path, index))]
    return [path]


def test_any_changed_value_of_a_manifest_is_damage(store: CheckpointStore) -> None:
    late = WorkItem(Shard(3, 1), outer_iter=2, job=0, first=4, stop=9)
    store.save(replace(at(1), pending=(late,)), state(1), {"outer_iter": 1, "numbers": {"lr": 0.1}})
    path = store.directory / "iter-000001" / "manifest.json"
    whole = json.loads(path.read_text())
    for leaf in _leaves(whole):
        others: tuple[Any, ...] = (7, -1000, "x", None, [], {}, 1.5)
        for value in others:
            changed = json.loads(path.read_text())
            inner = changed
            for key in leaf[:-1]:
                inner = inner[key]
            if inner[leaf[-1]] == value:
                continue
            inner[leaf[-1]] = value
            path.write_text(json.dumps(changed))
            assert store.latest()[0] is None, (leaf, value)
            path.write_text(json.dumps(whole))
    assert store.latest()[0] is not None


@pytest.mark.parametrize("content", ["", "5", "null", "[]", "{}", '{"format": 4}', '{"format": 2, "files": {}}',
                                     "[" * 50_000, "\xff"])
def test_a_manifest_of_any_other_shape_is_damage_and_the_one_before_is_used(store: CheckpointStore, content: str) -> None:
    store.save(at(0), state(0))
    store.save(at(1), state(1))
    (store.directory / "iter-000001" / "manifest.json").write_text(content, encoding="latin-1")
    latest, problems = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0 and len(problems) == 1


@pytest.mark.parametrize("name", ["iter-000002.bak", "iter-000002 (copy)", "iter-x", "iter-2"])
def test_copies_with_other_names_are_no_checkpoints(store: CheckpointStore, name: str) -> None:
    store.save(at(1), state(1))
    shutil.copytree(store.directory / "iter-000001", store.directory / name)
    latest, problems = store.latest()
    assert latest is not None and latest.progress.outer_iter == 1 and problems == []


def test_a_checkpoint_under_the_name_of_another_is_damage(store: CheckpointStore) -> None:
    store.save(at(1), state(1))
    shutil.copytree(store.directory / "iter-000001", store.directory / "iter-000005")
    latest, problems = store.latest()
    assert latest is not None and latest.progress.outer_iter == 1 and len(problems) == 1


@pytest.mark.parametrize("how", ["flipped bit", "other model", "truncated"])
def test_a_damaged_candidate_for_the_final_combination_is_refused(store: CheckpointStore, how: str) -> None:
    store.candidates = (0, 1)
    for outer_iter in range(4):
        store.save(at(outer_iter), state(outer_iter))
    first, second = (store.models / f"iter-00000{number}.safetensors" for number in range(2))
    assert np.array_equal(store.load_model(0), vector(0)) and store.missing_candidates(3) == []
    content = first.read_bytes()
    damaged = {"flipped bit": content[:-1] + bytes([content[-1] ^ 64]), "other model": second.read_bytes(),
               "truncated": content[:-4]}
    first.write_bytes(damaged[how])
    with pytest.raises(CheckpointError, match=r"iter-000000\.safetensors is damaged"):
        store.load_model(0)
    first.unlink()
    assert store.missing_candidates(3) == [0]


def test_a_checkpoint_is_not_saved_by_a_process_that_lost_the_lock(store: CheckpointStore, tmp_path: Path) -> None:
    with RunLock(tmp_path / "lock", "train") as store.lock:
        assert store.save(at(0), state(0)).commit["fence"] == 1
        (tmp_path / "lock").write_text('{"fence": 2}')
        with pytest.raises(RunLockedError):
            store.save(at(1), state(1))
    latest, _ = store.latest()
    assert latest is not None and latest.progress.outer_iter == 0


def test_the_model_of_a_new_checkpoint_is_kept_without_reading_it(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = CheckpointStore(store.directory, store.layout, 1, candidates=(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "load", _unreadable)
        for outer_iter in range(3):
            keeps.save(at(outer_iter), state(outer_iter))
    assert keeps.kept() == [1, 0] and np.array_equal(keeps.load_model(1), vector(1))


def _unreadable(*_: object) -> None:
    raise CheckpointError("Input/output error")


@pytest.mark.parametrize("kind", [CheckpointError, DataError])
def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    kind: type[Exception]) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 300 * 10**6))
    require_room(tmp_path, 300e6, "files", "output_dir", kind)
    with pytest.raises(kind, match=r"300 MB.*303 MB") as caught:
        require_room(tmp_path, 303e6, "files", "output_dir", kind)
    # of small disks, too
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 0))
    with pytest.raises(kind, match=r"2\.5 MB"):
        require_room(tmp_path, 2.5e6, "files", "output_dir", kind)
    assert of_error(describe(caught.value)).culprit == "disk"
