"""Which attempt gets which shared memory, and settings that have no snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.exchange.shared_memory import SharedSnapshotMemory, SharedSnapshotStore
from ngsgd.config import FailureConfig
from ngsgd.config.rules import check
from ngsgd.errors import ClusterError
from ngsgd.schedules import Shard
from ngsgd.training.job import Job, JobFailure, JobInit, LocalRef, WorkItem
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.book import SnapshotBook, takes_snapshots
from ngsgd.training.snapshots.packing import Packed, unpack
from tests import toy

JOB = Job(0, 0, 1, (WorkItem(Shard(0, 0), 0, 0),), JobInit(LocalRef(np.zeros(1, np.float32))), 0.1, 1.0)
RETRY = replace(JOB, attempt=2)


@pytest.fixture
def store() -> Iterator[SharedSnapshotStore]:
    made = SharedSnapshotStore()
    yield made
    made.close()


def write(memory: SharedSnapshotMemory | None, num_minibatches: int) -> None:
    assert memory is not None
    packed = Packed.of({"number": num_minibatches})
    packed.write(memory.room(num_minibatches % 2, packed.num_bytes), b"i" * 16, num_minibatches)


def test_a_retry_on_another_worker_gets_the_snapshot(store: SharedSnapshotStore) -> None:
    book = SnapshotBook(store)
    memory = book.lend(JOB, worker=0)
    write(memory, 6)
    book.failed(JOB, 0)
    again = book.lend(RETRY, worker=1)
    assert again is not None
    assert again == memory
    assert unpack(again.block(0)) == {"number": 6}


def test_two_workers_with_the_same_job_share_no_memory(store: SharedSnapshotStore) -> None:
    book = SnapshotBook(store)
    memory = book.lend(JOB, worker=0)
    write(memory, 6)
    assert book.lend(JOB, worker=1) is None
    # the copy without memory ends
    book.ended(JobFailure(JOB, 1, "", True))
    assert memory is not None and store.newest(memory) == 6


def test_a_snapshot_without_progress_is_not_used_again(store: SharedSnapshotStore) -> None:
    book = SnapshotBook(store)
    write(book.lend(JOB, worker=0), 6)
    book.failed(JOB, 0)
    book.lend(RETRY, worker=1)
    book.failed(RETRY, 1)
    memory = book.lend(replace(JOB, attempt=3), worker=0)
    assert memory is not None and store.newest(memory) == 0


def test_memory_of_a_worker_that_may_still_write_is_not_reused(store: SharedSnapshotStore) -> None:
    book = SnapshotBook(store)
    memory = book.lend(JOB, worker=0)
    write(memory, 6)
    book.failed(JOB, 0, is_gone=False)
    assert book.lend(RETRY, worker=1) != memory
    assert memory is not None
    with pytest.raises(ClusterError):
        memory.block(0)


def test_a_block_that_is_cut_or_altered_anywhere_is_not_used() -> None:
    packed = Packed.of({"number": list(range(100))})
    block = np.zeros(packed.num_bytes, np.uint8)
    packed.write(block, b"i" * 16, 3)
    assert unpack(block) is not None
    # the header ends before the bytes up to 128, which are not used
    for place in (0, 10, 30, 50, 128, 200, len(block) - 1):
        damaged = block.copy()
        damaged[place] ^= 1
        assert unpack(damaged) is None
        assert unpack(np.concatenate([block[:place], np.zeros(len(block) - place, np.uint8)])) is None or place == len(block) - 1
    assert unpack(block[:-1]) is None


UNSUPPORTED: dict[str, dict[str, dict[str, Any]]] = {
    "one process": {"cluster": {"kind": "in_process"}},
    "defer": {"failure": {"policy": "defer"}}, "groups": {"cluster": {"ranks_per_worker": 2}}}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_snapshots_on_is_an_error_where_there_are_none(name: str) -> None:
    config = toy.config(failure=FailureConfig(snapshots="on"),
                        cluster=replace(toy.config().cluster, kind="local"))
    assert check(config) == []
    for section, changes in UNSUPPORTED[name].items():
        config = replace(config, **{section: replace(getattr(config, section), **changes)})
    assert any("failure.snapshots" in message for message in check(config))


@pytest.mark.parametrize(("failure", "expected"), [
    (FailureConfig(), True), (FailureConfig(snapshots="off"), False),
    (FailureConfig(policy="drop"), False)])
def test_snapshots_depend_on_the_policy(failure: FailureConfig, expected: bool) -> None:
    assert takes_snapshots(EngineSettings.of(toy.config(failure=failure))) is expected
