"""The lease of a stored folder: one writer at a time, and the pointer to its committed content.

Both are in one object, `head.json`, which is only changed by conditional writes. A process that was
replaced can therefore neither commit nor renew. The lease ends when its holder releases it, or when
it was not renewed for its duration by the monotonic clock of the process that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ngsgd import process_identity
from ngsgd.errors import CheckpointError, ObjectStorageError, RunLockedError
from ngsgd.files import parse_json, sealed, unsealed
from ngsgd.object_storage.client import ObjectStore, Version, WriteConflictError

HEAD = "head.json"
LEASE_S = 60.0
_LONGEST_LEASE_S = 3600.0  # of a lease written by another process, which is not trusted
_RENEWALS_PER_LEASE, _POLLS_PER_LEASE = 4, 12


@dataclass(frozen=True)
class Head:
    """The content of head.json and its version."""

    fence: int = 0
    holder: Mapping[str, Any] = field(default_factory=dict)  # empty after a release
    purpose: str = ""
    lease_s: float = LEASE_S
    manifest: str = ""  # key and SHA-256 of the newest manifest; empty before the first commit
    manifest_sha256: str = ""
    stop_fence: int = 0  # a request to stop, by its fencing number: it ends with the lease
    renewal: int = 0  # number of writes by the holder: each is a sign of life
    # distinguishes this write from all others, so that a lost answer can be recognized
    nonce: str = ""
    version: Version | None = None

    def content(self) -> bytes:
        fields = {name: value for name, value in vars(self).items() if name != "version"}
        return json.dumps(sealed("lease", fields), indent=1).encode()


@dataclass(frozen=True)
class LeaseClock:
    """Time for the lease; replaced in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def read_head(store: ObjectStore) -> Head | None:
    """Return the current head, None if there is none; raise CheckpointError if it is damaged."""
    if (found := store.get(HEAD)) is None:
        return None
    content, version = found
    try:
        about = unsealed("lease", parse_json(content.decode("utf-8")))
        head = Head(**about, version=version)
        if type(head.fence) is not int or head.fence < 0 or not isinstance(head.holder, dict):
            raise ValueError("it has no valid fencing number or holder")
        if not (type(head.lease_s) in (int, float) and math.isfinite(head.lease_s) and type(head.renewal) is int
                and isinstance(head.manifest, str) and isinstance(head.manifest_sha256, str)):
            raise ValueError("an entry has another type")
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{store.url}/{HEAD} is damaged ({error}); restore an earlier version of this object, or start "
                              "a new run.") from error
    return head


class Lease:
    """Exclusive permission to write to a stored folder; a context manager.

    Args:
        store: the objects of the folder.
        purpose: command of the holder, for the message of another process ("train", "resume").
        duration_s: time without a renewal after which another process may take the lease.
        clock: time.
        report: receives one message if the lease of another process must expire first.
    """

    def __init__(self, store: ObjectStore, purpose: str, duration_s: float = LEASE_S,
                 clock: LeaseClock | None = None, report: Callable[[str], None] = lambda message: None) -> None:
        self.store, self.purpose, self.duration_s = store, purpose, duration_s
        self._clock, self._report = clock or LeaseClock(), report
        # the last one that this process wrote
        self.head = Head()
        self._lost = ""
        self._changes = threading.Lock()
        self._ended = threading.Event()
        self._renewals: threading.Thread | None = None

    @property
    def fence(self) -> int:
        """The fencing number; larger than that of each earlier holder."""
        return self.head.fence

    def __enter__(self) -> Lease:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lease, or wait for its end; RunLockedError if a living process holds it."""
        is_taken = False
        while not is_taken:
            before = read_head(self.store)
            # a process of this machine may be known to be dead
            if before and before.holder and (not process_identity.is_here(before.holder)
                                             or process_identity.is_alive(before.holder)):
                before = self._expired(before)
            last = before or Head()
            wanted = Head(last.fence + 1, process_identity.current(), self.purpose, self.duration_s,
                          last.manifest, last.manifest_sha256)
            # otherwise another process was faster
            with contextlib.suppress(WriteConflictError):
                self.head = self._written(wanted, last.version)
                is_taken = True
        self._ended.clear()
        self._renewals = threading.Thread(target=self._renew_until_ended, name="ngsgd-lease", daemon=True)
        self._renewals.start()

    def commit(self, manifest: str, manifest_sha256: str) -> None:
        """Make a manifest the content of the folder; RunLockedError if the lease was taken.

        After an ObjectStorageError the commit may or may not be there.
        """
        self._change(manifest=manifest, manifest_sha256=manifest_sha256)

    def renew(self) -> None:
        """Extend the lease by its duration; raises as `commit`."""
        self._change()

    def require_held(self) -> None:
        """Raise RunLockedError if it is known that another process took the lease."""
        if self._lost:
            raise RunLockedError(self._lost)

    def stop_requested(self) -> bool:
        """Whether a `request_stop` was seen at the last renewal or commit."""
        return self.head.stop_fence == self.head.fence

    def release(self) -> None:
        """End the lease, so that the next process need not wait; a failure is ignored."""
        self._ended.set()
        if self._renewals:
            self._renewals.join()
        with contextlib.suppress(ObjectStorageError, RunLockedError, CheckpointError):
            self._change(holder={})

    def _expired(self, head: Head) -> Head | None:
        """Wait until the lease expires; raise RunLockedError if it is renewed meanwhile."""
        lease_s = min(max(float(head.lease_s), 0.0), _LONGEST_LEASE_S)
        self._report(f"{self.store.url}: the lease of {_who(head)} was not released; waiting up to {lease_s:g} s for it to expire")
        seen = self._clock.now()
        while self._clock.now() - seen < lease_s:
            self._clock.sleep(lease_s / _POLLS_PER_LEASE)
            now = read_head(self.store)
            if now is None or not now.holder:
                return now
            if (now.fence, now.renewal) != (head.fence, head.renewal):
                raise RunLockedError(f"{self.store.url} is in use by {_who(now)}; wait until it ends, or end it with: "
                                     f"ngsgd stop {self.store.url}")
            # a third process may have asked the holder to stop, which is no sign of life
            head = now
        return head

    def _change(self, **fields: Any) -> None:
        with self._changes:
            self.require_held()
            while True:
                wanted = replace(self.head, **fields, renewal=self.head.renewal + 1)
                try:
                    self.head = self._written(wanted, self.head.version)
                    return
                except WriteConflictError:
                    now = read_head(self.store)
                if now is None or now.fence != self.head.fence or not now.holder:
                    self._lost = (f"{self.store.url} " + (f"was taken over by {_who(now)}" if now else "has no head.json any more")
                                  + f"; this process stops writing. Follow the run with: ngsgd status {self.store.url}")
                    raise RunLockedError(self._lost)
                # a request to stop: keep it, and write again
                self.head = now

    def _written(self, wanted: Head, version: Version | None) -> Head:
        """Write conditionally; an answer that was lost is recognized by the nonce."""
        wanted = replace(wanted, nonce=secrets.token_hex(16))
        content = wanted.content()
        try:
            return replace(wanted, version=self.store.create(HEAD, content) if version is None
                           else self.store.replace(HEAD, content, version))
        except (WriteConflictError, ObjectStorageError):
            # the write may have been done, and only its answer lost
            now = read_head(self.store)
            if now and now.nonce == wanted.nonce:
                return now
            raise

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self.duration_s / _RENEWALS_PER_LEASE):
            try:
                self.renew()
            except RunLockedError:
                return
            except (ObjectStorageError, CheckpointError):
                # the next renewal or commit tries again; conditional writes stay safe meanwhile
                continue


def request_stop(store: ObjectStore) -> bool:
    """Ask the holder of the lease to stop; False if no process holds it."""
    while True:
        head = read_head(store)
        if head is None or not head.holder or head.version is None:
            return False
        wanted = replace(head, stop_fence=head.fence, nonce=secrets.token_hex(16))
        with contextlib.suppress(WriteConflictError):
            store.replace(HEAD, wanted.content(), head.version)
            return True


def _who(head: Head) -> str:
    if not head.holder:
        return "a process that ended"
    return f"process {head.holder.get('process_id')} on {head.holder.get('host')} (ngsgd {head.purpose})"


def reserve(store: ObjectStore) -> bool:
    """Create the head of a new folder; False if there is one already."""
    try:
        store.create(HEAD, Head(nonce=secrets.token_hex(16)).content())
        return True
    except WriteConflictError:
        return False
