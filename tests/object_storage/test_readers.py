"""Commands that only read a run in object storage, between any two operations of its training."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError, RunLockedError
from ngsgd.launcher import cli
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.folder import StoredFolder, newest_manifest
from ngsgd.object_storage.lease import Lease
from ngsgd.object_storage.urls import local_root
from ngsgd.runs import config_file, stored_run
from ngsgd.runs.run_folder import RunFolder, find_run
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.storage.ledger import Ledger
from tests.launcher.records import outer_iteration

obstore = pytest.importorskip("obstore")

URL = "s3://tests/runs"
NUM_COMMITS = 4
# command lines of a run, which must leave everything as it is; those that need a final model end
# with an error
COMMANDS = (["status", "RUN"], ["status", URL], ["logs", "RUN"], ["info", "RUN"], ["why", "RUN"], ["why", "--output-dir", URL],
            ["report", "RUN", "--quiet"], ["compare", "RUN", "RUN", "--output", "OUT"],
            ["transcribe", "RUN", "OUT"], ["decode", "RUN", "--frames"], ["evaluate", "RUN"], ["export", "RUN", "OUT"],
            ["export", "--format", "bundle", "RUN", "OUT"])


class Bucket:
    """Objects in memory by URL; `before` is called before each request."""

    def __init__(self) -> None:
        self.stores: dict[str, Any] = {}
        self.before: Callable[[], None] = _nothing

    def store(self, url: str, *_options: Any, **_more: Any) -> ObjectStore:
        bucket, url = self, url.rstrip("/")

        class Hooked(ObjectStore):
            def _typed(self, done: str, key: str) -> Any:
                # threads of a commit and of a lease make requests, too
                if threading.current_thread() is threading.main_thread():
                    bucket.before()
                return super()._typed(done, key)

            def folders(self) -> list[str]:
                return [one.rpartition("/")[2] for one in bucket.stores if one.rpartition("/")[0] == self.url]
        return Hooked(url, store=self.stores.setdefault(url, obstore.store.MemoryStore()))


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    found = Bucket()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stored_run, "ObjectStore", found.store)
    return found


class Training:
    """A run in object storage that trains step by step: commits, and all in between."""

    def __init__(self, name: str = "one") -> None:
        config = RunConfig(output_dir=URL, name=name)
        config = replace(config, tracking=replace(config.tracking, kind="none"))
        self.folder = RunFolder.create(config, config_file.to_yaml(config))
        self.url = stored_run.url_of(self.folder.path)
        self.steps = self._trained()

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            next(self.steps, None)

    def end(self) -> None:
        for _ in self.steps:
            pass

    def resumed(self) -> Iterator[None]:
        """The steps of a later process: five commits, each of which replaces a file."""
        with self.folder.locked("resume", print) as lock:
            for number in range(5):
                (self.folder.path / f"more-{number}").write_text(str(number))
                (self.folder.path / "newest.safetensors").write_text(str(number))
                yield
                lock.committed()
                yield

    def _trained(self) -> Iterator[None]:
        folder = self.folder
        with folder.locked("train", print) as lock:
            ledger = Ledger(folder.ledger, lock.fence)
            events = EventLog(folder.events, lock=lock)
            events.opened("train")
            yield
            for number in range(NUM_COMMITS):
                events.outer_iteration(outer_iteration(number))
                yield
                checkpoint = folder.checkpoints / f"iter-{number:06d}"
                checkpoint.mkdir()
                (checkpoint / "model.safetensors").write_bytes(bytes([number]) * 1000)
                (checkpoint / "manifest.json").write_text(str(number))
                yield
                ledger.committed({"outer_iter": number, "fence": lock.fence})
                lock.committed()
                yield
                if number > 1:
                    old = folder.checkpoints / f"iter-{number - 2:06d}"
                    for file in old.iterdir():
                        file.unlink()
                    old.rmdir()
            events.close("FINISHED")
            ledger.close()


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run; two runs differ in the process and in the times."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "process.json")}


def committed(training: Training, store: ObjectStore) -> dict[str, list[str]]:
    """The digests of all files of the newest commit."""
    manifest = newest_manifest(store)
    assert manifest
    return {**{name: [part.sha256] for name, part in manifest.files.items()},
            **{name: [part.sha256 for part in parts] for name, parts in manifest.logs.items()}}


def run(command: list[str], training: Training, out: Path) -> None:
    """Run a command line; a bug is an exception or a traceback."""
    words = [training.url if word == "RUN" else str(out) if word == "OUT" else word for word in command]
    assert cli.main(words) in (0, 2, 3, 6, 7), words


def is_complete(training: Training, bucket: Bucket) -> bool:
    """Whether folder and bucket have what an undisturbed training leaves."""
    lines = training.folder.events.read_text().splitlines()
    assert [line.count('"outer_iteration"') for line in lines] == [0, *[1] * NUM_COMMITS, 0]
    wanted = {f"checkpoints/iter-{number:06d}/{name}" for number in (NUM_COMMITS - 2, NUM_COMMITS - 1)
              for name in ("model.safetensors", "manifest.json")}
    wanted |= {"config.yaml", "run_id", "events.jsonl", "ledger.jsonl"}
    stored = committed(training, bucket.store(training.url))
    return {name for name in content(training.folder.path) if not name.startswith(".")} == wanted == set(stored)


@pytest.mark.entry("At6", "look at a run in object storage (`status`, `report`, `info`, `why`, `decode --frames` ...) while this "
                   "machine begins to train it", "works",
                   "A command that only reads has its own copy below `~/.cache/ngsgd/object-storage-copies`: it can undo no "
                   "commit.")
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_that_reads_changes_nothing_while_training_goes_on_at_its_requests(
        bucket: Bucket, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training begins at each request of the command, and makes commits until its next request."""
    # the figure takes longest, and needs no file
    monkeypatch.setattr("ngsgd.launcher.reports.figures.png", lambda _figure: b"")
    monkeypatch.setattr("ngsgd.launcher.reports.figures.run_figure", lambda *_arguments: None)
    # more than all requests before the files
    assert [_is_harmless_at(number, bucket, tmp_path / "out", command) for number in range(8)][:3] == [True] * 3


@pytest.mark.entry("At6")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_status_changes_nothing_while_training_goes_on(bucket: Bucket, tmp_path: Path, number: int) -> None:
    assert _is_harmless_at(number, bucket, tmp_path / "out", COMMANDS[0])


def _is_harmless_at(number: int, bucket: Bucket, out: Path, command: list[str]) -> bool:
    """Begin training at a request of a command, and step at each later one; False if too few."""
    bucket.stores.clear()
    training = Training(f"run{number}")
    training.end()
    resumed, requests = training.resumed(), 0

    def advance() -> None:
        nonlocal requests
        requests += 1
        bucket.before = _nothing
        for _ in range(0 if requests <= number else 2 if requests == number + 1 else 1):
            next(resumed, None)
        bucket.before = advance
    bucket.before = advance
    run(command, training, out)
    bucket.before = _nothing
    assert ("more-0" in content(training.folder.path)) == (requests > number)
    for _ in resumed:
        pass
    after = content(training.folder.path)
    assert {f"more-{one}" for one in range(5)} <= set(after)
    assert set(committed(training, bucket.store(training.url))) == {name for name in after if not name.startswith(".")}
    return requests > number


def _nothing() -> None:
    pass


@pytest.mark.entry("At6")
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:5], ids=" ".join)
def test_a_command_that_reads_changes_nothing_between_any_two_requests_of_training(
        bucket: Bucket, tmp_path: Path, command: list[str]) -> None:
    assert all(_is_harmless_to_training_at(number, bucket, tmp_path / "out", command) for number in range(3 * NUM_COMMITS))


def _is_harmless_to_training_at(number: int, bucket: Bucket, out: Path, command: list[str]) -> bool:
    """Run a command at a request of training; False if training makes fewer requests."""
    bucket.stores.clear()
    training, requests = Training(f"run{number}"), 0

    def look() -> None:
        nonlocal requests
        requests += 1
        if requests == number + 1:
            bucket.before = _nothing
            run(command, training, out)
            bucket.before = look
    bucket.before = look
    training.end()
    bucket.before = _nothing
    assert is_complete(training, bucket)
    return requests > number


def test_a_command_that_continues_a_run_does_not_change_the_folder_of_another_process(bucket: Bucket) -> None:
    training = Training()
    training.step(6)
    before = content(training.folder.path)
    assert "checkpoints/iter-000001/model.safetensors" in before
    with pytest.raises(RunLockedError):
        find_run(training.url, to_write=True)
    assert content(training.folder.path) == before
    training.end()
    assert find_run(training.url, to_write=True) == training.folder.path
    assert is_complete(training, bucket)


def test_two_processes_that_read_have_different_folders_while_they_live(bucket: Bucket, tmp_path: Path) -> None:
    training = Training()
    training.end()
    copies = stored_run.copies_of(URL)
    code = ("import sys; from pathlib import Path; from ngsgd.runs import stored_run; "
            "folder = stored_run.copies_of(sys.argv[1]); (folder / 'one').mkdir(exist_ok=True); print(folder)")

    def of_another_process() -> Path:
        done = subprocess.run([sys.executable, "-c", code, URL], check=True, capture_output=True, text=True)
        return Path(done.stdout.strip())
    other = of_another_process()
    assert other != copies and other.parent == copies.parent and (other / "one").is_dir()
    # that process has ended; the lock of the first folder is still held by this one
    assert of_another_process() == other
    assert find_run(training.url).parent == copies


def test_a_reader_finds_the_objects_of_a_commit_although_training_removes_them(bucket: Bucket) -> None:
    training = Training()
    training.end()
    more = training.resumed()

    def commit() -> None:
        bucket.before = _nothing
        for _ in range(3):
            next(more, None)
        bucket.before = commit
    bucket.before = commit
    copy = find_run(training.url)
    bucket.before = _nothing
    for _ in more:
        pass
    assert copy != training.folder.path and (copy / "config.yaml").read_bytes() == training.folder.config.read_bytes()
    assert (copy / "newest.safetensors").read_text() in set("01234")


# Files that another thread writes -----------------------------------------------------------------


@pytest.mark.entry("Nc3", "store a run in object storage while another thread writes a file of it (`tracking.json` of MLflow)",
                   "works", "The commit contains the file as it was at one time; the next commit the later content.")
@pytest.mark.parametrize("change", ["replaced", "rewritten", "removed", "replaced each time", "new each time"])
def test_a_file_that_another_thread_writes_is_published_as_it_was(tmp_path: Path, change: str) -> None:
    ours, number = tmp_path / "ours", 0
    ours.mkdir()
    path = ours / "tracking.json"

    def write() -> None:
        nonlocal number
        number += 1
        if change == "removed":
            path.unlink(missing_ok=True)
        elif change == "rewritten":
            path.write_text(f"{number:0100d}")
        else:
            (ours / ".new").write_text(f"{number:0100d}")
            (ours / ".new").rename(path)

    class Store(ObjectStore):
        """The other thread writes before and after each upload."""

        def upload(self, key: str, file: Any) -> None:
            if is_disturbed and (number < 2 or change.endswith("each time")):
                write()
            super().upload(key, file)
            if is_disturbed and change.endswith("each time"):
                write()
    store, is_disturbed = Store("s3://tests/run", store=obstore.store.MemoryStore()), False
    (ours / "config.yaml").write_text("seed: 0\n")
    if change != "new each time":
        path.write_text("0" * 100)
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, ours, lease)
        folder.publish()
        (ours / "config.yaml").write_text("seed: 1\n")
        path.write_text("1" * 100)
        is_disturbed = True
        folder.publish()
        assert number > 0
        _require_whole(store)
        is_disturbed = False
        folder.publish()
        _require_whole(store)
        manifest = newest_manifest(store)
        assert manifest and ("tracking.json" in manifest.files) == path.exists()
        for name, part in manifest.files.items():
            assert store.get(part.key)[0] == (ours / name).read_bytes()  # type: ignore[index]


def _require_whole(store: ObjectStore) -> None:
    """Each object of the newest commit has its digest."""
    manifest = newest_manifest(store)
    assert manifest and "config.yaml" in manifest.files
    for part in manifest.files.values():
        found = store.get(part.key)
        assert found and hashlib.sha256(found[0]).hexdigest() == part.sha256


@pytest.mark.entry("Nc3")
def test_a_content_that_returns_is_stored_in_the_commit(tmp_path: Path) -> None:
    store = ObjectStore("s3://tests/run", store=obstore.store.MemoryStore())
    with Lease(store, "train") as lease:
        folder = StoredFolder(store, tmp_path, lease)
        for text in ("one", "other", "one", "one"):
            (tmp_path / "config.yaml").write_text(text)
            folder.publish()
            _require_whole(store)


def test_copies_are_used_where_the_file_system_has_no_locks(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.end()

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(45, "no locks")
    monkeypatch.setattr(fcntl, "flock", refused)
    before = content(training.folder.path)
    copy = find_run(training.url)
    assert copy != training.folder.path and content(training.folder.path) == before
    assert os.path.samefile(copy, find_run(training.url))


@pytest.mark.entry("Nc14")
def test_a_run_is_found_without_its_time_stamp(bucket: Bucket) -> None:
    newest = ""
    for name, when in (("obj-20261101-101010", 1), ("obj-20261129-101010", 2), ("obj-2-20261130-101010", 3), ("obj-more", 4)):
        folder = local_root(URL) / name
        folder.mkdir(parents=True)
        assert stored_run.reserved(folder, URL)
        config = RunConfig(output_dir=URL)
        (folder / "config.yaml").write_text(config_file.to_yaml(config))
        (folder / "number").write_text(str(when))
        with RunFolder(folder).locked("train", print) as lock:
            lock.committed()
        newest = name if when == 2 else newest
    for words in ({}, {"with_models": False}, {"to_write": True}):
        for name in ("obj", newest):
            assert find_run(f"{URL}/{name}", **words).name == newest
        assert find_run(f"{URL}/obj-2/", **words).name == "obj-2-20261130-101010"
        for name in ("ob", "obj-", "obj-20261129", "none"):
            with pytest.raises(ConfigError):
                find_run(f"{URL}/{name}", **words)
    # a bucket has no name
    with pytest.raises(ConfigError):
        find_run("s3://tests")
    assert cli.main(["status", f"{URL}/obj"]) == 0
