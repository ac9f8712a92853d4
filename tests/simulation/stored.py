"""Runs in object storage under simulated faults: two trainers, readers, and a store with a clock.

`Lease`, `StoredFolder` and `fetch` are production code. A seed draws how long each request takes,
which answers are lost, and which machines are killed or suspended.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from unittest.mock import patch

from ngsgd import process_identity
from ngsgd.errors import CheckpointError, ObjectStorageError, RunLockedError
from ngsgd.object_storage import folder as stored_folder
from ngsgd.object_storage import lease as leases
from ngsgd.object_storage.client import Version, WriteConflictError
from ngsgd.object_storage.folder import StoredFolder, fetch, newest_manifest, read_manifest
from ngsgd.object_storage.lease import HEAD, LEASE_S, Head, Lease, LeaseClock, read_head
from tests.simulation.machines import Machine, Machines

_LIMIT_S = 20_000.0
# of a request: most are fast; the slowest is a renewal interval of a lease
_SECONDS = (0.01,) * 12 + (0.5, 2.0, LEASE_S / 4)
_COMMITS = 4
_T = TypeVar("_T")


class SimulatedStore:
    """Objects of one URL; every request takes time, and an answer may be lost."""

    url = "s3://simulated/run"

    def __init__(self, machines: Machines, chance: random.Random, lost: float) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self._machines, self._chance, self._lost = machines, chance, lost
        self.loses_answers = lost > 0.0
        self._number = 0
        # manifests of all commits, also those whose process died before it had the answer
        self.commits: list[str] = []

    def get(self, key: str) -> tuple[bytes, Version] | None:
        return self._request(lambda: (self.objects[key][0], self._version(key)) if key in self.objects else None)

    def create(self, key: str, content: bytes) -> Version:
        return self._request(lambda: self._write(key, content, is_allowed=key not in self.objects))

    def replace(self, key: str, content: bytes, version: Version) -> Version:
        return self._request(lambda: self._write(key, content, is_allowed=key in self.objects and self._version(key) == version))

    def put(self, key: str, content: bytes) -> None:
        self._request(lambda: self._write(key, content, is_allowed=True))

    def upload(self, key: str, file: BinaryIO) -> None:
        self.put(key, file.read())

    def download(self, key: str, path: Path) -> str:
        found = self.get(key)
        if found is None:
            raise ObjectStorageError(f"{self.url}/{key} does not exist")
        path.write_bytes(found[0])
        return hashlib.sha256(found[0]).hexdigest()

    def keys(self, prefix: str = "") -> Iterator[str]:
        yield from self._request(lambda: [key for key in self.objects if key.startswith(prefix)])

    def delete(self, keys: Sequence[str]) -> None:
        self._request(lambda: [self.objects.pop(key, None) for key in keys])

    def _version(self, key: str) -> Version:
        return Version(str(self.objects[key][1]), None)

    def _write(self, key: str, content: bytes, *, is_allowed: bool) -> Version:
        if not is_allowed:
            raise WriteConflictError(key)
        self._number += 1
        self.objects[key] = content, self._number
        if key == HEAD:
            manifest = getattr(read_head(_Direct(self)), "manifest", "")  # type: ignore[arg-type]
            self.commits += [manifest] if manifest and manifest not in self.commits else []
        return self._version(key)

    def _request(self, effect: Callable[[], _T]) -> _T:
        """Do something at a time within the request."""
        seconds = self._chance.choice(_SECONDS)
        share = self._chance.random()
        self._machines.sleep(share * seconds)
        found = effect()
        self._machines.sleep((1.0 - share) * seconds)
        if self._chance.random() < self._lost:
            raise ObjectStorageError("the answer was lost")
        return found


class Inline(Executor):
    """Runs the functions of a pool of threads one after another."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def submit(self, function: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future = Future[_T]()
        future.set_result(function(*arguments, **named))
        return future


class StoredTrial:
    """One seed."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance, self.root = random.Random(f"stored {seed}"), root
        self.machines = Machines(_LIMIT_S)
        self.store: Any = SimulatedStore(self.machines, self.chance, self.chance.choice((0.0, 0.0, 0.03)))
        self.problems = self.machines.problems
        # machine that holds the lease; its fencing numbers and manifests, in order
        self.holder: Machine | None = None
        self.fences: list[int] = []
        self.manifests: list[tuple[str, str]] = []
        # manifest -> content of the folder
        self.contents: dict[str, dict[str, bytes]] = {}

    def run(self) -> list[str]:
        """Return the problems."""
        with patch.object(leases, "threading", self.machines.threads()), \
                patch.object(stored_folder, "ThreadPoolExecutor", Inline), \
                patch.object(process_identity, "current", lambda: {"host": self.machines.machine.name}), \
                patch.object(process_identity, "is_here", lambda identity: False):
            trainers = [Machine("first"), Machine("second")]
            for number, machine in enumerate(trainers):
                self.machines.start(machine, lambda machine=machine: self._train(machine),  # type: ignore[misc]
                                    at=number * self.chance.choice((0.0, 5.0, 100.0)))
            for number in range(2):
                reader = Machine(f"reader {number}")
                self.machines.start(reader, lambda reader=reader: self._read(reader))  # type: ignore[misc]
            if self.chance.random() < 0.5:
                self.machines.start(Machine("operator"), lambda: self._disturb(self.chance.choice(trainers)))
            self.machines.run()
            # a last process takes over, and finds everything
            self.machines.start(Machine("third"), lambda: self._train(Machine("third"), is_last=True), at=self.machines.now)
            self.machines.run()
        shutil.rmtree(self.root, ignore_errors=True)
        return self.problems

    def _disturb(self, machine: Machine) -> None:
        """Kill a machine, or suspend it for some time."""
        self.machines.sleep(self.chance.uniform(0.0, 300.0))
        if self.chance.random() < 0.5:
            machine.is_dead = True
        else:
            machine.suspended_until = self.machines.now + self.chance.choice((1.0, LEASE_S - 1.0, LEASE_S + 1.0, 1000.0))

    def _train(self, machine: Machine, *, is_last: bool = False) -> None:
        """Take the lease, retry while another process has it, and commit."""
        path = self.root / machine.name
        clock = LeaseClock(lambda: self.machines.now, self.machines.sleep)
        # each try waits for the end of a lease
        for _ in range(60):
            lease = Lease(self.store, "train", clock=clock)
            try:
                lease.acquire()
            except RunLockedError:
                self.machines.sleep(self.chance.choice((1.0, 30.0, 200.0)))
                continue
            except ObjectStorageError:
                continue
            self._acquired(machine, lease)
            try:
                self._commits(lease, path, is_last=is_last)
            except (RunLockedError, ObjectStorageError) as error:
                if isinstance(error, RunLockedError) and self.holder is machine:
                    self.problems.append(f"{machine.name} lost its lease, and no other process took it: {error}")
            finally:
                if not machine.is_dead:
                    if self.holder is machine:
                        self.holder = None
                    lease.release()
            return
        self.problems.append(f"{machine.name} could not take the lease in 60 tries")

    def _acquired(self, machine: Machine, lease: Lease) -> None:
        other = self.holder
        was_away = other is not None and (other.is_dead or self.machines.now < other.suspended_until + LEASE_S)
        if other is not None and not was_away and not self.store.loses_answers:
            self.problems.append(f"{machine.name} took the lease of {other.name}, which is alive")
        if self.fences and lease.fence <= max(self.fences):
            self.problems.append(f"fencing number {lease.fence} after {max(self.fences)}")
        self.holder = machine
        self.fences.append(lease.fence)

    def _commits(self, lease: Lease, path: Path, *, is_last: bool) -> None:
        folder = StoredFolder(self.store, path, lease)
        if lease.head.manifest:
            fetch(self.store, folder.manifest, path, remove_others=True)
            self._compare(lease.head.manifest, path, lease.purpose)
            folder.remove_abandoned()
        path.mkdir(parents=True, exist_ok=True)
        for number in range(1 if is_last else _COMMITS):
            self.machines.sleep(self.chance.choice((0.0, 10.0, 100.0)))
            name = f"{lease.fence}-{number}"
            (path / f"model-{number % 2}.safetensors").write_text(name)
            with (path / "events.jsonl").open("a") as log:
                log.write(f"{name}\n")
            content = {one.name: one.read_bytes() for one in path.iterdir()}
            folder.publish()
            self.contents[lease.head.manifest] = content
            self.manifests.append((lease.head.manifest, lease.head.manifest_sha256))
        if is_last:
            folder.remove_abandoned()
            used = folder.manifest.keys()
            if missing := sorted(used - self.store.objects.keys()):
                self.problems.append(f"the newest manifest names objects that were removed: {missing}")

    def _compare(self, manifest: str, path: Path, what: str) -> None:
        """Compare a folder with a commit; a commit whose answer was lost is not known."""
        found = {one.name: one.read_bytes() for one in path.iterdir() if not one.name.startswith(".")}
        if manifest in self.contents and found != self.contents[manifest]:
            self.problems.append(f"a process that began to {what} found another content of {manifest}")

    def _read(self, machine: Machine) -> None:
        """Read the newest commit again and again; two later ones may remove its objects."""
        for number in range(8):
            self.machines.sleep(self.chance.choice((0.1, 20.0, 60.0)))
            path, head = self.root / f"{machine.name} {number}", Head()
            try:
                if newest_manifest(self.store) is None:
                    continue
                head = read_head(self.store) or head
                manifest = read_manifest(self.store, head.manifest, head.manifest_sha256)
                fetch(self.store, manifest, path)
                self._compare(head.manifest, path, "read")
            except ObjectStorageError as error:
                later = self._number_of_commits_after(head.manifest) if "does not exist" in str(error) else 2
                if later < 2:
                    self.problems.append(f"{machine.name} did not find an object, and {later} later commits were made: {error}")
            except CheckpointError:
                # the manifest was removed by two later commits
                if self._number_of_commits_after(head.manifest) < 2:
                    self.problems.append(f"{machine.name} did not find a manifest, and one later commit was made")

    def _number_of_commits_after(self, manifest: str) -> int:
        commits = self.store.commits
        return len(commits) - 1 - commits.index(manifest) if manifest in commits else 0


class _Direct:
    """The objects without requests, for checks."""

    def __init__(self, store: SimulatedStore) -> None:
        self.url, self._store = store.url, store

    def get(self, key: str) -> tuple[bytes, Version] | None:
        found = self._store.objects.get(key)
        return found and (found[0], Version(str(found[1]), None))
