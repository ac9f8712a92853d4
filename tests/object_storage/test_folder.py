"""A folder is published and fetched again: equal bytes, verified, without objects left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from ngsgd.errors import CheckpointError
from ngsgd.object_storage import folder as stored_folder
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.folder import Manifest, StoredFolder, fetch, newest_manifest
from ngsgd.object_storage.lease import HEAD, Lease

obstore = pytest.importorskip("obstore")


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore("s3://tests/run", store=obstore.store.MemoryStore())


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def newest(store: ObjectStore) -> Manifest:
    manifest = newest_manifest(store)
    assert manifest
    return manifest


def fill(folder: Path, step: int) -> None:
    """Change the folder as an outer iteration does."""
    for old in folder.glob("checkpoints/iter-*"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    checkpoint = folder / f"checkpoints/iter-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes([step]) * 10_000)
    (checkpoint / "manifest.json").write_text(f'{{"step": {step}}}')
    (folder / "config.yaml").write_text("seed: 0\n")
    with (folder / "events.jsonl").open("a") as log:
        log.write(f'{{"outer_iter": {step}}}\n')


def test_each_commit_is_fetched_with_equal_bytes(store: ObjectStore, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, ours, lease)
        for step in range(20):
            fill(ours, step)
            folder.publish()
            fetch(store, newest(store), theirs, remove_others=True)
            assert content(theirs) == content(ours)
    assert len(newest(store).logs["events.jsonl"]) < 10


def test_unused_objects_are_removed(store: ObjectStore, tmp_path: Path) -> None:
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, tmp_path, lease)
        for step in range(10):
            fill(tmp_path, step)
            folder.publish()
        num_objects = len(list(store.keys("objects")))
    # those of the newest two commits
    assert num_objects <= 2 * 3 + 6
    assert len(list(store.keys("manifests"))) <= 3


def test_a_reader_whose_commit_was_removed_reads_the_next_one(store: ObjectStore, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(store, "train") as lease:
        folder, tries = StoredFolder(store, tmp_path, lease), list[str]()
        folder.publish()
        read = stored_folder.read_manifest

        def removed_once(store: ObjectStore, key: str, digest: str) -> Manifest:
            tries.append(key)
            if len(tries) == 1:
                folder.publish()
                raise CheckpointError("it does not exist")
            return read(store, key, digest)
        monkeypatch.setattr(stored_folder, "read_manifest", removed_once)
        assert newest(store).number == 2
        assert len(tries) == 2


def test_equal_files_are_stored_once(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("a", "models/b", "models/c"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    with Lease(store, "train") as lease:
        StoredFolder(store, tmp_path, lease).publish()
    assert len(list(store.keys("objects"))) == 1


def test_the_next_holder_continues_and_removes_what_a_killed_one_left(store: ObjectStore, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, first, lease)
        fill(first, 0)
        folder.publish()
        before = newest(store)
        fill(first, 1)
        folder.publish()
        store.put(f"objects/{lease.fence:06d}-{'0' * 64}", b"not committed")
    with Lease(store, "resume") as lease:
        fetch(store, newest(store), second)
        folder = StoredFolder(store, second, lease)
        folder.remove_abandoned()
        # a process that began to read the commit before the newest one finds its objects
        fetch(store, before, tmp_path / "reader")
        fill(second, 2)
        folder.publish()
        assert not any(key.endswith("0" * 64) for key in store.keys("objects"))
        assert not before.keys() & set(store.keys("objects")) - newest(store).keys()
    fetch(store, newest(store), tmp_path / "third")
    assert content(tmp_path / "third") == content(second)


def test_a_log_that_was_rewritten_is_stored_again(store: ObjectStore, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, ours, lease)
        for text in ("1\n2\n", "1\n2\n3", "5\n6\n7\n8\n", "5\n"):
            (ours / "a.log").write_text(text)
            folder.publish()
            fetch(store, newest(store), tmp_path / "theirs")
            # an incomplete line is not stored
            assert (tmp_path / "theirs" / "a.log").read_text() == text[:text.rfind("\n") + 1]


@pytest.mark.parametrize("prefix", ["objects/", "manifests/", HEAD])
def test_each_damaged_object_is_rejected(store: ObjectStore, tmp_path: Path, prefix: str) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    fill(ours, 3)
    with Lease(store, "train") as lease:
        StoredFolder(store, ours, lease).publish()
    for key in list(store.keys()):
        if key.startswith(prefix):
            found = store.get(key)
            assert found
            store.put(key, bytes([found[0][0] ^ 1]) + found[0][1:])
            with pytest.raises(CheckpointError):
                fetch(store, newest(store), tmp_path / key.replace("/", "-"))
            store.put(key, found[0])
    fetch(store, newest(store), tmp_path / "theirs")
    assert content(tmp_path / "theirs") == content(ours)


def test_files_of_one_machine_are_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    for name in ("lock", "process.json", ".a.tmp", "config.yaml"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("/etc/hostname")
    with Lease(store, "train") as lease:
        StoredFolder(store, tmp_path, lease).publish()
    assert set(newest(store).files) == {"config.yaml"}
