"""The lease: one holder, rising fencing numbers, lost answers, expiry without a common clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ngsgd import process_identity
from ngsgd.errors import CheckpointError, ObjectStorageError, RunLockedError
from ngsgd.object_storage.client import ObjectStore, Version, WriteConflictError
from ngsgd.object_storage.lease import HEAD, Lease, LeaseClock, read_head, request_stop

obstore = pytest.importorskip("obstore")


class Time:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.at: dict[float, Any] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for due in [due for due in self.at if due <= self.now_s]:
            self.at.pop(due)()

    def clock(self) -> LeaseClock:
        return LeaseClock(lambda: self.now_s, self.sleep)


class Faulty(ObjectStore):
    """Loses the answers of conditional writes, or the writes themselves."""

    def __init__(self) -> None:
        super().__init__("s3://tests/run", store=obstore.store.MemoryStore())
        self.faults: list[str] = []

    def create(self, key: str, content: bytes) -> Version:
        return self._after_fault(key, lambda: super(Faulty, self).create(key, content))

    def replace(self, key: str, content: bytes, version: Version) -> Version:
        return self._after_fault(key, lambda: super(Faulty, self).replace(key, content, version))

    def _after_fault(self, key: str, write: Callable[[], Version]) -> Version:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost":
            raise ObjectStorageError("timeout")
        version = write()
        if fault == "answer lost":
            raise ObjectStorageError("timeout")
        if fault == "repeated":
            # the library repeats a request whose answer was lost, and is refused
            raise WriteConflictError(key)
        return version


@pytest.fixture
def store() -> Faulty:
    return Faulty()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this test count as those of another machine."""
    monkeypatch.setattr(process_identity, "is_here", lambda identity: False)


def test_fencing_numbers_rise(store: Faulty) -> None:
    fences = []
    for _ in range(3):
        with Lease(store, "train") as lease:
            fences.append(lease.fence)
    assert fences == [1, 2, 3]


@pytest.mark.usefixtures("elsewhere")
def test_a_renewed_lease_is_not_taken(store: Faulty) -> None:
    time = Time()
    with Lease(store, "train") as lease:
        time.at = {10.0: lease.renew}
        with pytest.raises(RunLockedError):
            Lease(store, "resume", clock=time.clock()).acquire()
        lease.commit("manifests/000001-00000001.json", "0" * 64)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("tick_s", [-1.0, 0.0, 1.0])
def test_a_lease_renewed_around_its_end_has_one_holder(store: Faulty, tick_s: float) -> None:
    time, old = Time(), Lease(store, "train")
    old.acquire()
    new = Lease(store, "resume", clock=time.clock())
    renewals = []

    def renew() -> None:
        with contextlib.suppress(RunLockedError):
            old.renew()
            renewals.append(time.now_s)
    time.at = {old.duration_s + tick_s: renew}
    if tick_s > 0.0:
        new.acquire()
        time.sleep(2.0 * tick_s)
    else:
        with pytest.raises(RunLockedError):
            new.acquire()
    assert len(renewals) == (tick_s <= 0.0)
    head = read_head(store)
    assert head and head.fence == (1 if renewals else 2)
    for one in (old, new):
        one.release()


@pytest.mark.usefixtures("elsewhere")
def test_an_expired_lease_is_taken_and_its_holder_ends_with_a_message(store: Faulty) -> None:
    old, new = Lease(store, "train"), Lease(store, "resume", clock=Time().clock())
    old.acquire()
    old.commit("manifests/000001-00000001.json", "0" * 64)
    new.acquire()
    assert new.fence == 2
    assert new.head.manifest == "manifests/000001-00000001.json"
    with pytest.raises(RunLockedError):
        old.commit("manifests/000001-00000002.json", "1" * 64)
    with pytest.raises(RunLockedError):
        old.require_held()
    old.release()
    head = read_head(store)
    assert head and (head.fence, bool(head.holder), head.manifest_sha256) == (2, True, "0" * 64)
    new.release()


def test_a_dead_process_of_this_machine_needs_no_wait(store: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    Lease(store, "train").acquire()
    monkeypatch.setattr(process_identity, "is_alive", lambda identity: False)
    time = Time()
    with Lease(store, "resume", clock=time.clock()) as lease:
        assert (lease.fence, time.now_s) == (2, 0.0)


@pytest.mark.parametrize("fault", ["answer lost", "repeated"])
def test_a_write_whose_answer_was_lost_counts(store: Faulty, fault: str) -> None:
    store.faults = [fault]
    with Lease(store, "train") as lease:
        assert lease.fence == 1
        store.faults = [fault]
        lease.commit("manifests/000001-00000001.json", "0" * 64)
        store.faults = [fault]
        lease.renew()
    head = read_head(store)
    assert head and (head.fence, head.manifest_sha256, head.holder) == (1, "0" * 64, {})


def test_a_lost_write_is_an_error_and_can_be_repeated(store: Faulty) -> None:
    with Lease(store, "train") as lease:
        store.faults = ["lost"]
        with pytest.raises(ObjectStorageError):
            lease.commit("manifests/000001-00000001.json", "0" * 64)
        lease.commit("manifests/000001-00000001.json", "0" * 64)


def test_a_write_that_arrives_late_does_not_lose_the_lease(store: Faulty) -> None:
    with Lease(store, "train") as lease:
        before = lease.head
        store.faults = ["lost"]
        with pytest.raises(ObjectStorageError):
            lease.commit("manifests/000001-00000001.json", "0" * 64)
        late = type(before)(**{**vars(before), "manifest_sha256": "0" * 64, "nonce": "late"})
        assert before.version
        store.replace(HEAD, late.content(), before.version)
        lease.commit("manifests/000001-00000002.json", "2" * 64)
        assert lease.head.manifest_sha256 == "2" * 64


def test_one_of_many_processes_takes_a_new_lease(store: Faulty) -> None:
    holders: list[Lease] = []

    def compete(_number: int) -> None:
        lease = Lease(store, "train", duration_s=0.4)
        with contextlib.suppress(RunLockedError):
            lease.acquire()
            holders.append(lease)
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(compete, range(5)))
    (holder,) = holders
    holder.release()


@pytest.mark.usefixtures("elsewhere")
def test_a_request_to_stop_reaches_the_holder_and_is_no_sign_of_life(store: Faulty) -> None:
    assert not request_stop(store)
    old = Lease(store, "train")
    old.acquire()
    assert request_stop(store)
    assert not old.stop_requested()
    old.renew()
    assert old.stop_requested()
    # the holder dies; another process waits, and a third one asks it to stop again
    time = Time()
    time.at = {20.0: lambda: request_stop(store)}
    with Lease(store, "resume", clock=time.clock()) as new:
        assert not new.stop_requested()
    assert not request_stop(store)


def test_a_damaged_head_is_rejected(store: Faulty) -> None:
    for content in (b"", b"{}", b"[" * 100_000, b'{"format": 1, "fence": -1}'):
        store.put(HEAD, content)
        with pytest.raises(CheckpointError):
            read_head(store)
