"""Worker processes from multiprocessing's fork server, without waiting for it; no process outlives the coordinator.

A thread asks the fork server for processes, because the answer may never come: a fork server can be stopped or starved like
any other process.  Whoever needs a worker goes on meanwhile, and ends a fork server that does not answer.

The kernel ends all processes of a run when the coordinator is killed, running or stopped, at whatever instruction each is:

- The fork server gets SIGKILL when the coordinator ends, and workers when the fork server ends (PR_SET_PDEATHSIG, the first
  thing that each of them sets).  multiprocessing's resource tracker gets SIGCONT, and ends when it finds its clients gone.
- The fork server and the tracker lead process groups of their own from before their first instruction.  When the coordinator
  ends, these groups are orphaned, and the kernel sends SIGHUP and SIGCONT to an orphaned group that has a stopped member.
  So a process that was stopped before it could set anything ends as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection, forkserver, get_context, util
from multiprocessing.context import ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from typing import Any

_PRELOAD = ["ngsgd.cluster.newborn", "__main__", "ngsgd.cluster.worker_process",
            "ngsgd.cluster.preloaded"]
# in which a fork server that was killed has ended
_GONE_S = 0.5


class ForkedProcess:
    """A process that the fork server was asked for.  `kill` and `exit_code` work at any time, `pid` once it is there."""

    def __init__(self, process: ForkServerProcess, theirs: socket.socket) -> None:
        self.pid: int | None = None
        # why it could not be started
        self.failure = ""
        # its fork server ended before it could report how this process ended
        self.is_orphan = False
        self._process = process
        # its end of the connection; closed here once it has it
        self._theirs = theirs
        self._popen: Popen | None = None
        self._code: int | None = None
        self._is_unwanted = False
        # started, or failed to
        self._is_settled = threading.Event()

    def begin(self) -> None:
        """Asks the fork server, and waits for its answer."""
        try:
            if not self._is_unwanted:
                with _own_process_groups():
                    self._popen = Popen(self._process)
                self.pid = self._popen.pid
        except Exception as error:
            # whatever it is, this thread serves the next one
            self.failure = f"could not be started ({type(error).__name__}: {error})"
        finally:
            self._is_settled.set()
            self._theirs.close()
        # since it was asked for
        if self._is_unwanted:
            _kill(self.pid)

    def kill(self) -> None:
        """SIGKILL now, or as soon as it is there."""
        self._is_unwanted = True
        # a process that was waited for is gone, and its number may be another's
        if self._is_settled.is_set() and self.exit_code(0.0) is None:
            _kill(self.pid)

    def exit_code(self, timeout_s: float) -> int | None:
        """As the fork server reported it; None if it has not within the time, or never will."""
        deadline = time.monotonic() + timeout_s
        if not self._is_settled.wait(timeout_s):
            return None
        if self._code is None and self._popen is not None and not self.is_orphan:
            sentinel = self._popen.sentinel
            if connection.wait([sentinel], max(0.0, deadline - time.monotonic())):
                try:
                    self._code = forkserver.read_signed(sentinel)
                except (OSError, EOFError):
                    self.is_orphan = True
        return self._code


class ForkServer:
    """Starts processes one after the other, in a thread that lives as long as this process.

    The thread starts the fork server itself: the kernel ends the fork server with the thread that started it.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[ForkedProcess] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_begun = 0
        self._num_done = 0
        # process id of the fork server that answered last
        self._served = 0
        self._lock = threading.Lock()
        self._context = get_context("forkserver")

    def launch(self, target: Any, arguments: Sequence[Any], theirs: socket.socket, name: str) -> ForkedProcess:
        """Begins to start a process; takes `theirs`, which is one of the arguments."""
        self._context.set_forkserver_preload(_PRELOAD)
        found = ForkedProcess(self._context.Process(target=target, args=tuple(arguments), name=name, daemon=True), theirs)
        self._requests.put(found)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ngsgd-fork-server", daemon=True)
                self._thread.start()
        return found

    @property
    def under_way(self) -> int | None:
        """The number of the start that is under way; None when there is none."""
        return self._num_begun if self._num_begun > self._num_done else None

    @property
    def is_warm(self) -> bool:
        """Whether the fork server that runs now has started a process before, so that it has imported torch."""
        return self._served != 0 and self._served == read_process_id()

    def end(self) -> None:
        """Kills the fork server, and with it all its workers; the next start has a new one."""
        _kill(read_process_id())

    def _serve(self) -> None:
        while True:
            one = self._requests.get()
            self._num_begun += 1
            try:
                one.begin()
            finally:
                self._num_done += 1
            if one.pid is not None:
                self._served = read_process_id()
            elif one.failure:
                # else the next start may ask a fork server that is about to end
                _wait_until_gone(read_process_id())
            # with its descriptors, once nobody else needs it
            del one


@functools.cache
def _of_process(process_id: int) -> ForkServer:
    return ForkServer()


def fork_server() -> ForkServer:
    """The one of this process, for all its pools: to import torch takes seconds."""
    return _of_process(os.getpid())


def read_process_id() -> int:
    """Of multiprocessing's fork server; 0 when there is none."""
    return int(getattr(forkserver._forkserver, "_forkserver_pid", None) or 0)


def _kill(process_id: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process_id:
            os.kill(process_id, signal.SIGKILL)


def _wait_until_gone(process_id: int) -> None:
    """Waits for a moment whether the fork server ends; leaves its exit status to multiprocessing."""
    deadline = time.monotonic() + _GONE_S
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    with contextlib.suppress(ChildProcessError):
        while process_id and os.waitid(os.P_PID, process_id, how) is None and time.monotonic() < deadline:
            time.sleep(0.01)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Meanwhile multiprocessing's helper programs start as leaders of process groups, and end with this process."""
    original = util.spawnv_passfds
    util.spawnv_passfds = _spawn_guarded  # type: ignore[assignment]  # it is given fewer types than it declares
    try:
        yield
    finally:
        util.spawnv_passfds = original


def _spawn_guarded(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """multiprocessing.util.spawnv_passfds, but for a program that ends with this process."""
    *words, program = [os.fsdecode(word) for word in arguments]
    # the resource tracker ends by itself once all its clients have, and cleans up first: it only
    # must not be stopped
    is_tracker = "resource_tracker" in program
    guard = (f"import ctypes, os, signal; ctypes.CDLL(None).prctl(1, {int(signal.SIGCONT if is_tracker else signal.SIGKILL)}); "
             f"os.getppid() == {os.getpid()} or os._exit(1); ")
    guard += "signal.signal(signal.SIGHUP, signal.SIG_IGN); " if is_tracker else ""
    process = subprocess.Popen([*words, guard + program], executable=path, pass_fds=[int(one) for one in descriptors],
                               restore_signals=False, process_group=0)
    # multiprocessing waits for it; Popen must neither warn nor wait
    process.returncode = 0
    return process.pid
