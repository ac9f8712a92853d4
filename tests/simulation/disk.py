"""The simulated disk: a directory in memory below a layer that injects faults.

The layer replaces the calls of this process that change files, for paths below one directory. Each
call has a number. Before the call it may be slow, fail, write a part of its data, or the process
may end. If a trial cuts the power, the calls are recorded, and the cut leaves only the synced data.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import io
import os
import secrets
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from ngsgd import process_identity
from ngsgd.training.diagnostics import deferred
from tests.simulation.durability import Disk, Operation
from tests.simulation.world import MAX_OPERATIONS, Fault, Killed, NoProgressError, World

_CREATE = os.O_CREAT | os.O_TRUNC
_ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
# part of a path -> step of the coordinator that writes it
_PHASES = (("/checkpoints/", "commits"), ("/models/", "keeps a model"), ("final", "ends"), ("/lock", "takes or leaves the lock"))
# calls that need no space, and succeed on a full disk
_FREE = ("unlink", "rmdir", "rename", "sync")
_REAL: Mapping[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in ("open", "close", "write", "pwrite", "ftruncate", "fsync", "rename", "replace",
                                         "link", "unlink", "remove", "rmdir", "mkdir")}
_OPEN = io.open
_FLOCK = fcntl.flock


class SimulatedDisk:
    """Files below `root`; use `installed` around all simulated code."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._prefix = self.root + os.sep
        self.world, self.has_locks = World(), True
        # descriptor -> path
        self.open_files: dict[int, str] = {}
        # called after a checkpoint got its name, and after a folder was synced, with the path
        self.on_rename: Callable[[str], None] = lambda path: None
        self.on_sync: Callable[[str], None] = lambda path: None
        self._record: Disk | None = None
        # calls that still fail because the disk is full, and temporary names so far
        self._full_for = self._names = 0
        self._host = "host-1"

    def begin(self, world: World, *, records: bool, has_locks: bool) -> None:
        """Empty the disk for a new trial."""
        with contextlib.suppress(FileNotFoundError):
            _remove_tree(self.root)
        _REAL["mkdir"](self.root)
        self.world, self.has_locks = world, has_locks
        self.open_files = {}
        self._full_for, self._names = 0, 0
        self._record = Disk(Path(self.root)) if records else None

    def new_process(self, host: str) -> None:
        """Start a simulated process: the disk has room again."""
        self._full_for, self._host = 0, host

    def end_process(self, keep: Mapping[int, str]) -> list[str]:
        """Close what the ended process had open, except for files of another one; return paths."""
        left = []
        for descriptor, path in list(self.open_files.items()):
            if descriptor in keep:
                continue
            del self.open_files[descriptor]
            # a file object may have closed the descriptor since
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._prefix):
                    left.append(path)
                    _REAL["close"](descriptor)
        return left

    def cut_power(self, kind: str) -> None:
        """Keep only durable files and names."""
        assert self._record is not None
        content = self._record.state(kind)
        for name in self._record.incomplete(content):
            self.world.report(f"{os.path.basename(name)} was complete before a power cut, and is not after it")
        _remove_tree(self.root)
        _REAL["mkdir"](self.root)
        for name in sorted(content):
            data, path = content[name], os.path.join(self.root, name)
            if data is None:
                _REAL["mkdir"](path)
            else:
                with _OPEN(path, "wb") as file:
                    file.write(data)
        self._record = Disk.of(Path(self.root))

    def _enter(self, kind: str, path: str) -> bool:
        """Count a call that changes files; return True if it may do only a part of its work."""
        world = self.world
        if world.is_dead:
            raise Killed
        if world.counts["operation"] > MAX_OPERATIONS:
            raise NoProgressError(f"the run did not end within {MAX_OPERATIONS} file operations")
        world.note(kind, path[len(self.root):])
        world.phase = next((phase for name, phase in _PHASES if name in path), world.phase)
        is_part = False
        for fault in world.due("operation"):
            is_part |= self._happen(fault, path)
        if kind == "sync":
            for fault in world.due("sync"):
                self._happen(fault, path)
        if self._full_for and kind not in _FREE:
            self._full_for -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return is_part

    def _happen(self, fault: Fault, path: str) -> bool:
        if fault.what == "kill":
            self.world.kill()
        elif fault.what.startswith("power cut"):
            self.world.kill(fault.what.removeprefix("power cut "))
        elif fault.what == "slow":
            self.world.advance(fault.value)
        elif fault.what == "full":
            self._full_for = int(fault.value)
        elif fault.what == "torn":
            self._full_for = 3
            return True
        elif fault.what in _ERRORS:
            code = _ERRORS[fault.what]
            raise OSError(code, os.strerror(code))
        return False

    def _did(self, kind: str, path: str, second: str = "", *, inode: int = 0, offset: int = 0, data: bytes = b"") -> None:
        if self._record is not None:
            self._record.apply(Operation(0, kind, inode, offset, data, path, second))

    def _below(self, path: Any, dir_fd: int | None = None) -> str:
        """Absolute path if it is below the root, else an empty string."""
        if isinstance(path, int):
            return self.open_files.get(path, "")
        name = os.fspath(path)
        if isinstance(name, bytes):
            return ""
        if dir_fd is not None:
            folder = self.open_files.get(dir_fd)
            return os.path.join(folder, name) if folder else ""
        return name if name.startswith(self._prefix) else ""

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self._below(path, dir_fd)
        if not name or flags & os.O_TMPFILE == os.O_TMPFILE:
            descriptor = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
            if isinstance(path, (str, Path)) and str(path) == self.root:
                self.open_files[descriptor] = self.root
            return int(descriptor)
        existed = os.path.lexists(name)
        changes = (flags & os.O_CREAT and not existed) or (flags & os.O_TRUNC and existed and os.path.getsize(name))
        if changes:
            self._enter("create", name)
        elif self.world.is_dead:
            raise Killed
        elif flags & (os.O_WRONLY | os.O_RDWR) == 0 and not os.path.isdir(name):
            for fault in self.world.due("read"):
                self._happen(fault, name)
        descriptor = int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))
        self.open_files[descriptor] = name
        if changes and self._record is not None:
            self._did("truncate" if existed else "create", name, inode=os.fstat(descriptor).st_ino)
        return descriptor

    def close(self, descriptor: int) -> None:
        self.open_files.pop(descriptor, None)
        _REAL["close"](descriptor)

    def write(self, descriptor: int, data: Any, offset: int | None = None) -> int:
        name = self.open_files.get(descriptor)
        if name is not None:
            if self._enter("write", name):
                data = bytes(data)[:len(data) // 2]
            if self._record is not None:
                about = os.fstat(descriptor)
                is_appending = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
                place = (about.st_size if is_appending else os.lseek(descriptor, 0, os.SEEK_CUR)) if offset is None else offset
                self._did("write", name, inode=about.st_ino, offset=place, data=bytes(data))
        if offset is None:
            return int(_REAL["write"](descriptor, data))
        return int(_REAL["pwrite"](descriptor, data, offset))

    pwrite = write

    def ftruncate(self, descriptor: int, size: int) -> None:
        name = self.open_files.get(descriptor)
        if name is not None:
            self._enter("truncate", name)
            if self._record is not None:
                self._did("truncate", name, inode=os.fstat(descriptor).st_ino, offset=size)
        _REAL["ftruncate"](descriptor, size)

    def fsync(self, descriptor: int) -> None:
        name = self.open_files.get(descriptor)
        if name is None:
            _REAL["fsync"](descriptor)
            return
        self._enter("sync", name)
        if self._record is not None and os.path.lexists(name):
            self._did("sync", name, inode=os.fstat(descriptor).st_ino)
        self.on_sync(name)

    def rename(self, old: Any, new: Any, **others: Any) -> None:
        name, target = self._below(old), self._below(new)
        if name:
            self._enter("rename", target)
        _REAL["rename"](old, new, **others)
        if name:
            self._did("rename", name, target)
            self.on_rename(target)

    def link(self, old: Any, new: Any, **others: Any) -> None:
        name = self._below(new)
        if name:
            self._enter("link", name)
        _REAL["link"](old, new, **others)
        if name:
            self._did("link", self._below(old), name)

    def _remove(self, kind: str, path: Any, *, dir_fd: int | None = None) -> None:
        name = self._below(path, dir_fd)
        is_there = bool(name) and os.path.lexists(name)
        if is_there:
            self._enter(kind, name)
        _REAL[kind](path, dir_fd=dir_fd)
        if is_there:
            self._did(kind, name)

    unlink = partialmethod(_remove, "unlink")
    rmdir = partialmethod(_remove, "rmdir")

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = self._below(path, dir_fd)
        if name and not os.path.lexists(name):
            self._enter("mkdir", name)
        _REAL["mkdir"](path, mode, dir_fd=dir_fd)
        if name:
            self._did("mkdir", name)

    def open_file(self, file: Any, mode: str = "r", *arguments: Any, **others: Any) -> Any:
        """`open` of Python: a file that is written gets its content when it is closed."""
        is_other = isinstance(file, int) or "opener" in others
        name = "" if is_other or set(mode).isdisjoint("wxa+") else self._below(file)
        if not name:
            return _OPEN(file, mode, *arguments, **others)
        return _Written(self, name) if "b" in mode else _WrittenText(self, name)

    def put(self, path: str, content: bytes) -> None:
        """Create a file with a content."""
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            while content:
                content = content[self.write(descriptor, content):]
        finally:
            self.close(descriptor)

    def flock(self, descriptor: Any, how: int) -> None:
        if not self.has_locks and isinstance(descriptor, int) and descriptor in self.open_files:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        _FLOCK(descriptor, how)

    def _uuid(self) -> uuid.UUID:
        self._names += 1
        # the first digits become a part of temporary names
        return uuid.UUID(int=self._names << 96)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the calls of this process."""
        with contextlib.ExitStack() as stack:
            def replace(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, value))
            for name in _REAL:
                method = {"replace": "rename", "remove": "unlink"}.get(name, name)
                replace(os, name, getattr(self, method))
            replace(io, "open", self.open_file)
            replace(builtins, "open", self.open_file)
            replace(fcntl, "flock", self.flock)
            for module in (safetensors.torch, safetensors.numpy):
                replace(module, "serialize_file", self._serialize_file)
            replace(uuid, "uuid4", self._uuid)
            replace(secrets, "token_hex", lambda size=16: f"{self._uuid().hex:.{2 * size}}")
            replace(time, "time", lambda: 1.7e9 + self.world.now)
            replace(time, "strftime", lambda form, *moment: "20260101-000000")
            # the world of the present trial
            replace(time, "sleep", lambda seconds: self.world.advance(seconds))  # noqa: PLW0108
            replace(process_identity, "current", lambda: {
                "host": self._host, "boot_id": "boot", "pid_namespace": "namespace", "user": 0,
                "process_id": 100, "start_time": 1})
            # averaging of twelve parameters needs no threads
            replace(os, "cpu_count", lambda: 1)
            # queues a stack trace for CUDA in each call otherwise
            replace(torch, "manual_seed", torch.default_generator.manual_seed)
            replace(deferred, "ThreadPoolExecutor", lambda *arguments, **others: _InlineExecutor(self.world))
            yield

    def _serialize_file(self, tensors: Any, filename: Any, metadata: Any = None) -> None:
        try:
            self.put(os.fspath(filename), safetensors.torch.serialize(tensors, metadata=metadata))
        except OSError as error:
            # the message of the Rust library
            raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})") from error


class _Written(io.BytesIO):
    """A binary file whose content is written when it is closed."""

    def __init__(self, disk: SimulatedDisk, name: str) -> None:
        super().__init__()
        self._disk, self._name = disk, name

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._disk.put(self._name, content)


class _WrittenText(io.StringIO):
    """A text file whose content is written when it is closed."""

    def __init__(self, disk: SimulatedDisk, name: str) -> None:
        super().__init__()
        self._disk, self._name = disk, name

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue().encode()
            super().close()
            self._disk.put(self._name, content)


class _InlineExecutor:
    """Runs a function when it is submitted; its result is available a moment later."""

    # simulated seconds of an evaluation
    _SECONDS = 0.3

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future = _LaterFuture(self._world, self._world.now + self._SECONDS)
        future.set_result(function())
        return future

    def shutdown(self) -> None:
        pass


class _LaterFuture(Future[Any]):
    def __init__(self, world: World, ready_at: float) -> None:
        super().__init__()
        self._world, self._ready_at = world, ready_at

    def done(self) -> bool:
        return self._world.now >= self._ready_at

    def result(self, timeout: float | None = None) -> Any:
        if not self._world.is_dead:
            self._world.now = max(self._world.now, self._ready_at)
        return super().result(timeout)


def _remove_tree(path: str) -> None:
    """Remove a directory, whatever is installed."""
    for entry in os.scandir(path):
        if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
            _remove_tree(entry.path)
        else:
            _REAL["unlink"](entry.path)
    _REAL["rmdir"](path)
