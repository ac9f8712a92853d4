"""Fetched archives: the cache of a node, damage, eviction, full disks and two processes."""

from __future__ import annotations

import errno
import gc
import hashlib
import multiprocessing
import os
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from ngsgd.data.archives import archive_name
from ngsgd.data.fetching.files import FetchedFiles, LocalFiles, RemoteData, SharedFolder, offer_of
from ngsgd.data.fetching.node_cache import NodeCache
from ngsgd.data.fetching.source import FetchError, StoreSource, UnsoundFileError
from ngsgd.data.reader import EgsReader, opened
from ngsgd.data.storage import ArrayFile, FormatError, write_arrays
from ngsgd.errors import DamagedArchiveError, DataError, NodeCacheError, ObjectStorageError
from ngsgd.object_storage.client import ObjectStore
from ngsgd.schedules import Shard
from tests.tiers import HANGS_S
from tests.toy import Run

LARGE = 1 << 40
silent = object


class FolderSource:
    where = "the coordinator"

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self.asked: list[str] = []
        # changes the content of a file in transit
        self.damage: Callable[[bytes], bytes] | None = None

    def size(self, digest: str) -> int | None:
        return self.paths[digest].stat().st_size if digest in self.paths else None

    def parts(self, digest: str, size: int) -> Iterator[bytes]:
        self.asked.append(digest)
        content = self.paths[digest].read_bytes()
        if self.damage is not None:
            content = self.damage(content)
        yield from (content[at:at + 1000] for at in range(0, len(content), 1000))


def source_of(*contents: bytes, folder: Path) -> tuple[FolderSource, list[str]]:
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    for digest, content in zip(digests, contents, strict=True):
        (folder / digest).write_bytes(content)
    return FolderSource({digest: folder / digest for digest in digests}), digests


def array_file(folder: Path, size: int, value: int) -> bytes:
    write_arrays(folder / "made", "features", (size,), [np.full(size, value, np.float32)], {})
    return (folder / "made").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Run(tmp_path)


def remote_of(run: Run, max_bytes: int = LARGE) -> tuple[RemoteData, FolderSource]:
    offers = run.spec.offers()
    source = FolderSource({digest: path for offer in offers for digest, path in offer.paths.items()})
    return RemoteData(tuple(offer.folder for offer in offers), source, max_bytes), source


def reader_of(run: Run, max_bytes: int = LARGE) -> tuple[EgsReader, FolderSource]:
    remote, source = remote_of(run, max_bytes)
    return run.spec.fetching(remote).frames(), source


def files_of(reader: EgsReader) -> FetchedFiles:
    assert isinstance(reader.files, FetchedFiles)
    return reader.files


def minibatches(reader: EgsReader, archive: int) -> list[np.ndarray]:
    return [batch.x_ND.numpy() for batch in reader.minibatches(Shard(archive, 0), 64, seed=0, outer_iter=0, job=0)]


def test_a_reader_fetches_only_what_it_reads_and_yields_identical_minibatches(run: Run, tmp_path: Path) -> None:
    here, (fetched, source) = EgsReader(run.egs), reader_of(run)
    assert fetched.info == here.info
    for one, other in zip(minibatches(here, 1), minibatches(fetched, 1), strict=True):
        np.testing.assert_array_equal(one, other)
    assert here.diagnostic("valid").x_ND.equal(fetched.diagnostic("valid").x_ND)
    assert source.asked == [files_of(fetched).folder.roots["info.json"], here.info.sha256[archive_name(1)],
                            here.info.sha256["valid_diagnostic.safetensors"]]
    # the next one finds them
    minibatches(reader_of(run)[0], 1)
    assert {path.name for path in (tmp_path / "cache/ngsgd/archives").iterdir()} == {".lock", *source.asked}


def test_training_on_fetched_data_is_bitwise_identical(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.spec = run.spec.fetching(remote_of(run)[0])
    assert other.train().model_sha256 == run.train().model_sha256


def test_access_is_picklable_and_small(run: Run) -> None:
    folders = remote_of(run)[0].folders
    spec = run.spec.fetching(RemoteData(folders, StoreSource("s3://bucket/data"), 7, lambda: None))
    again = pickle.loads(pickle.dumps(spec)).remote
    assert again.folders == folders and again.max_bytes == 7 and again.source.url == "s3://bucket/data"


def test_statistics_next_to_the_archives_are_fetched(run: Run) -> None:
    (run.egs / "statistics-abc.safetensors").write_bytes(b"figures")
    fetched, _ = reader_of(run)
    assert fetched.files.root("statistics-abc.safetensors").read_bytes() == b"figures"
    with pytest.raises(UnsoundFileError):
        fetched.files.root("../../etc/passwd")


def test_a_damaged_file_of_the_cache_is_fetched_again(run: Run) -> None:
    fetched, source = reader_of(run)
    expected = minibatches(fetched, 0)
    digest = fetched.info.sha256[archive_name(0)]
    path = files_of(fetched).cache.folder / digest
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    for one, other in zip(expected, minibatches(fetched, 0), strict=True):
        np.testing.assert_array_equal(one, other)
    assert source.asked.count(digest) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content + b"x",
                                    lambda content: content[:-1] + bytes([content[-1] ^ 1]), lambda _: b""])
def test_a_file_that_always_arrives_damaged_or_is_missing_is_an_error_with_its_number(
        run: Run, damage: Callable[[bytes], bytes]) -> None:
    fetched, source = reader_of(run)
    source.damage = damage
    with pytest.raises(DamagedArchiveError) as caught:
        minibatches(fetched, 2)
    assert caught.value.archive == 2
    assert source.asked.count(fetched.info.sha256[archive_name(2)]) == 2
    assert not [path for path in files_of(fetched).cache.folder.iterdir() if path.name.endswith(".tmp")]
    fetched, source = reader_of(run)
    del source.paths[fetched.info.sha256[archive_name(2)]]
    with pytest.raises(DamagedArchiveError):
        minibatches(fetched, 2)
    minibatches(fetched, 1)


@pytest.mark.parametrize(("name", "digest"), [("../x", "0" * 64), ("a/b", "0" * 64), (".x", "0" * 64), ("x", "../" + "0" * 61),
                                              ("x", 3)])
def test_an_index_with_paths_is_not_offered(run: Run, name: str, digest: str) -> None:
    with pytest.raises(DataError):
        offer_of(run.egs, ["info.json"], {name: digest})


@pytest.mark.parametrize("digest", ["", "../../x", "A" * 64, "0" * 63])
def test_a_digest_is_never_a_path(folder: Path, digest: str) -> None:
    cache = NodeCache(folder, LARGE)
    with pytest.raises(UnsoundFileError):
        cache.fetch(digest, FolderSource({}), silent)
    with pytest.raises(UnsoundFileError):
        cache.found(digest)


@pytest.mark.parametrize(("is_denied", "expected"), [(False, FetchError), (True, ObjectStorageError)])
def test_a_bucket_that_does_not_answer_is_not_an_error_of_the_data(is_denied: bool, expected: type[Exception]) -> None:
    class Store:
        def size(self, key: str) -> int:
            raise ObjectStorageError("no answer", is_denied=is_denied)

        def parts(self, key: str) -> Iterator[bytes]:
            yield b"a"
            raise ObjectStorageError("no answer", is_denied=is_denied)
    source = StoreSource("s3://bucket/data", cast("ObjectStore", Store()))
    with pytest.raises(expected):
        source.size("0" * 64)
    with pytest.raises(expected):
        list(source.parts("0" * 64, 2))


def test_the_least_recently_used_files_are_removed(tmp_path: Path, folder: Path) -> None:
    source, digests = source_of(b"a" * 400, b"b" * 400, b"c" * 400, b"d" * 2000, folder=folder)
    cache = NodeCache(tmp_path / "cache", 1000)
    for digest in digests[:2]:
        cache.fetch(digest, source, silent)
    assert cache.found(digests[0])
    cache.fetch(digests[2], source, silent)
    assert [cache.found(digest) is not None for digest in digests[:3]] == [True, False, True]
    # larger than the limit
    with pytest.raises(NodeCacheError):
        cache.fetch(digests[3], source, silent)
    assert cache.found(digests[0])


def test_a_file_in_use_is_not_removed_until_it_is_freed(tmp_path: Path) -> None:
    content = array_file(tmp_path, 100, 1)
    source, digests = source_of(content, b"b" * len(content), folder=tmp_path)
    cache = NodeCache(tmp_path / "cache", len(content) + 100)
    files = FetchedFiles(SharedFolder("/data", {"info.json": digests[0]}), source, cache)
    arrays = files.arrays("one", digests[0])
    with pytest.raises(NodeCacheError):
        cache.fetch(digests[1], source, silent)
    assert cache.found(digests[0])
    np.testing.assert_array_equal(arrays["features"], np.ones(100, np.float32))
    del arrays
    gc.collect()
    cache.fetch(digests[1], source, silent)
    assert cache.found(digests[0]) is None


def test_the_rest_of_a_killed_process_is_removed(tmp_path: Path, folder: Path) -> None:
    source, digests = source_of(b"a" * 400, folder=folder)
    cache = NodeCache(tmp_path / "cache", 1000)
    cache.folder.mkdir()
    (cache.folder / f".{'0' * 64}.tmp").write_bytes(b"x" * 900)
    (cache.folder / f".{digests[0]}.tmp").write_bytes(b"y" * 50)
    assert cache.fetch(digests[0], source, silent).read_bytes() == b"a" * 400
    assert [path.name for path in cache.folder.iterdir() if path.name != ".lock"] == digests


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, digests = source_of(b"a" * 400, folder=folder)
    cache = NodeCache(tmp_path / "cache", LARGE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(NodeCacheError) as caught:
        cache.fetch(digests[0], source, silent)
    assert str(cache.folder) in str(caught.value)
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]
    # no folder can be made
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeCacheError):
        NodeCache(tmp_path / "file" / "cache", LARGE).fetch(digests[0], source, silent)


def test_unused_files_make_room_on_a_disk_with_less_space_than_the_limit(
        tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, digests = source_of(b"a" * 400, b"b" * 400, folder=folder)
    cache = NodeCache(tmp_path / "cache", LARGE)
    cache.fetch(digests[0], source, silent)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=1))
    cache.fetch(digests[1], source, silent)
    assert cache.found(digests[0]) is None
    large, [digest] = source_of(b"z" * 5000, folder=folder)
    with pytest.raises(NodeCacheError):
        cache.fetch(digest, large, silent)


def test_the_memory_of_a_fetch_does_not_depend_on_the_size_of_the_file(tmp_path: Path) -> None:
    part = bytes(1 << 20)

    class Large(FolderSource):
        def size(self, digest: str) -> int | None:
            return 32 * len(part)

        def parts(self, digest: str, size: int) -> Iterator[bytes]:
            for _ in range(32):
                yield part
    digest = hashlib.sha256(part * 32).hexdigest()
    tracemalloc.start()
    try:
        NodeCache(tmp_path / "cache", LARGE).fetch(digest, Large({}), silent)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(part)
    finally:
        tracemalloc.stop()


def fetch_all(folder: Path, limit: int, source: FolderSource, digests: list[str], rounds: int) -> None:
    files = FetchedFiles(SharedFolder("/data", {"info.json": digests[0]}), source, NodeCache(folder, limit))
    for digest in digests * rounds:
        assert len(files.arrays("one", digest)["features"]) > 0


def in_processes(count: int, *arguments: object) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch_all, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_S)
    assert [process.exitcode for process in processes] == [0] * count


def test_two_workers_of_a_node_fetch_a_file_once(tmp_path: Path, folder: Path) -> None:
    class Logging(FolderSource):
        def parts(self, digest: str, size: int) -> Iterator[bytes]:
            with (tmp_path / "log").open("a") as file:
                file.write(f"{digest}\n")
            yield from super().parts(digest, size)
    source, digests = source_of(*(array_file(folder, 50_000, number) for number in range(5)), folder=folder)
    in_processes(3, tmp_path / "cache", LARGE, Logging(source.paths), digests, 2)
    assert sorted((tmp_path / "log").read_text().split()) == sorted(digests)


def test_workers_share_a_cache_that_is_smaller_than_their_data(tmp_path: Path, folder: Path) -> None:
    source, digests = source_of(*(array_file(folder, 5000, number) for number in range(6)), folder=folder)
    in_processes(3, tmp_path / "cache", 90_000, source, digests, 5)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 90_000


def test_progress_is_reported_while_another_process_fetches(tmp_path: Path, folder: Path) -> None:
    source, digests = source_of(b"a" * 5000, folder=folder)
    cache, seen = NodeCache(tmp_path / "cache", LARGE), threading.Event()
    began, ended = threading.Event(), threading.Event()

    class Gate(FolderSource):
        def parts(self, digest: str, size: int) -> Iterator[bytes]:
            for part in super().parts(digest, size):
                began.set()
                yield part
                # the other thread waits meanwhile
                seen.wait(1.0)

    def fetch() -> None:
        cache.fetch(digests[0], Gate(source.paths), silent)
        ended.set()
    thread = threading.Thread(target=fetch)
    thread.start()
    assert began.wait(HANGS_S)
    cache.fetch(digests[0], source, seen.set)
    thread.join(HANGS_S)
    assert ended.is_set() and seen.is_set() and source.asked == []


def wait_for_prefetch() -> None:
    for thread in threading.enumerate():
        if thread.name == "ngsgd-fetch":
            thread.join(HANGS_S)


def test_the_archive_of_the_next_job_is_there_before_it_starts(run: Run) -> None:
    fetched, source = reader_of(run)
    fetched.prefetch([2, 0])
    wait_for_prefetch()
    minibatches(fetched, 2)
    assert source.asked[1:] == [fetched.info.sha256[archive_name(number)] for number in (2, 0)]


def test_a_prefetch_without_room_is_no_error(run: Run) -> None:
    fetched, source = reader_of(run, 2 * max(path.stat().st_size for path in run.egs.iterdir()))
    batches = fetched.minibatches(Shard(0, 0), 64, seed=0, outer_iter=0, job=0)
    next(batches)
    source.damage = lambda _: b""
    fetched.prefetch([1, 2])
    wait_for_prefetch()
    assert len(list(batches)) > 0


def test_a_job_passes_its_next_work_to_the_task(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    remote, source = remote_of(run)
    other.spec = run.spec.fetching(remote)
    other.train()
    listed = run.reader.info.sha256
    fetched = [name for digest in source.asked for name in listed if listed[name] == digest and name.startswith("egs.")]
    # the third archive is fetched while a job on another one runs
    assert sorted(fetched) == sorted(name for name in listed if name.startswith("egs."))


@pytest.mark.parametrize(("raised", "reported"), [
    (NodeCacheError("there is no room"), NodeCacheError), (FetchError("no answer"), FetchError),
    (UnsoundFileError("it arrived damaged"), DamagedArchiveError), (FormatError("truncated"), DamagedArchiveError),
    (OSError(errno.EIO, "it fails"), DamagedArchiveError)])
def test_only_a_file_at_fault_is_a_damaged_archive(tmp_path: Path, raised: Exception, reported: type[Exception]) -> None:
    """Damage is quarantined, while the other failures are those of this node or of the source."""
    class Failing(LocalFiles):
        def arrays(self, name: str, digest: str) -> ArrayFile:
            raise raised
    with pytest.raises(reported) as caught:
        opened(Failing(tmp_path), tmp_path, "egs.0003.safetensors", "", archive=3)
    assert type(caught.value) is reported
    if isinstance(caught.value, DamagedArchiveError):
        assert caught.value.archive == 3
        with pytest.raises(DataError) as of_file:
            opened(Failing(tmp_path), tmp_path, "train_diagnostic.safetensors", "")
        assert type(of_file.value) is DataError
