"""Non-blocking start of worker processes by the fork server of multiprocessing.

A thread requests processes from the fork server, because the answer may never arrive. Callers
continue meanwhile, and kill a fork server that does not answer.

The kernel ends all processes of a run when the coordinator is killed, also if they are stopped:

- The fork server gets SIGKILL when the coordinator ends, and workers when the fork server ends
  (PR_SET_PDEATHSIG, which each sets first). The resource tracker of multiprocessing gets SIGCONT,
  and ends when its clients are gone.
- The fork server and the tracker lead separate process groups from before their first instruction.
  The kernel sends SIGHUP and SIGCONT to a group that is orphaned and has a stopped member. So a
  process that was stopped before it could set anything ends as well.
"""

from __future__ import annotations

import contextlib
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

from ngsgd.ops.kernels import native

_PRELOAD = ["ngsgd.cluster.newborn", "__main__", "ngsgd.cluster.worker_process", "ngsgd.cluster.preloaded"]
_PACKAGE = "ngsgd."
# variables by which a fork server finds or compiles the kernels that it loads for its workers
_READ_AT_START = (native.VARIABLE, "CXX", "PATH", "HOME", "XDG_CACHE_HOME", "TMPDIR")
_GONE_S = 0.5  # time in which a killed fork server ends
# by process, because a fork inherits this module, and by the values of `_READ_AT_START`
_servers: dict[tuple[int | str, ...], ForkServer] = {}


class ForkedProcess:
    """A process requested from the fork server; it has a `pid` once it exists."""

    def __init__(self, process: ForkServerProcess, theirs: socket.socket | connection.Connection) -> None:
        self.pid: int | None = None
        self.failure = ""  # reason why it could not be started
        # the fork server ended before it could report how this process ended
        self.is_orphan = False
        self._process = process
        self._theirs = theirs  # the child's end of the connection; closed here after the start
        self._popen: Popen | None = None
        self._code: int | None = None
        self._is_unwanted = False
        self._is_settled = threading.Event()  # set when the process has started or failed to start

    def begin(self, server: forkserver.ForkServer) -> None:
        """Send the request to the fork server and wait for the answer."""
        try:
            if not self._is_unwanted:
                with _only_from(server):
                    self._popen = Popen(self._process)
                self.pid = self._popen.pid
        except Exception as error:
            # on any error, this thread continues with the next request
            self.failure = f"could not be started ({type(error).__name__}: {error})"
        finally:
            self._is_settled.set()
            self._theirs.close()
        # killed after the request
        if self._is_unwanted:
            _kill(self.pid)

    def kill(self) -> None:
        """Send SIGKILL now, or as soon as the process exists."""
        self._is_unwanted = True
        # after waitpid the process id may belong to another process
        if self._is_settled.is_set() and self.exit_code(0.0) is None:
            _kill(self.pid)

    def exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code from the fork server; None if there is none within the time."""
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
    """Starts processes in a thread that lives as long as this process.

    The kernel ends the fork server together with the thread that started it. It is not the fork
    server of `multiprocessing.get_context`, which a program of a user may have started without the
    modules and the kernels of this package, and in another environment.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[ForkedProcess] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_begun = 0
        self._num_done = 0
        self._served = 0  # process id of the fork server that answered last
        self._lock = threading.Lock()
        self._server = forkserver.ForkServer()

    def launch(self, target: Any, arguments: Sequence[Any], theirs: socket.socket | connection.Connection, name: str,
               modules: Sequence[str] = ()) -> ForkedProcess:
        """Begin to start a process; takes ownership of `theirs`, which is one of the arguments.

        A new fork server first imports the modules. The process has the present environment.
        """
        self._server.set_forkserver_preload([*_PRELOAD, *modules])
        arguments = (dict(os.environ), target, *arguments)
        found = ForkedProcess(get_context("forkserver").Process(target=_run, args=arguments, name=name, daemon=True), theirs)
        self._requests.put(found)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ngsgd-fork-server", daemon=True)
                self._thread.start()
        return found

    @property
    def under_way(self) -> int | None:
        """Number of the pending start; None if there is none."""
        return self._num_begun if self._num_begun > self._num_done else None

    @property
    def is_warm(self) -> bool:
        """Whether the running fork server has started a process, and so has imported torch."""
        return self._served != 0 and self._served == self.process_id

    @property
    def process_id(self) -> int:
        """Process id of the running fork server; 0 if there is none."""
        return int(getattr(self._server, "_forkserver_pid", None) or 0)

    def end(self) -> None:
        """Kill the fork server and all its workers; the next start creates a new one."""
        _kill(self.process_id)

    def _serve(self) -> None:
        while True:
            one = self._requests.get()
            self._num_begun += 1
            try:
                one.begin(self._server)
            finally:
                self._num_done += 1
            if one.pid is not None:
                self._served = self.process_id
            elif one.failure and (process_id := self.process_id):
                # otherwise the next request may go to a fork server that is about to end;
                # multiprocessing still collects its exit status
                deadline, how = time.monotonic() + _GONE_S, os.WEXITED | os.WNOWAIT | os.WNOHANG
                with contextlib.suppress(ChildProcessError):
                    while os.waitid(os.P_PID, process_id, how) is None and time.monotonic() < deadline:
                        time.sleep(0.01)
            # closes its descriptors if nothing else uses them
            del one


def modules_of(*objects: object) -> list[str]:
    """Modules of this package that define the objects, for `ForkServer.launch`.

    Modules of users may start threads or a GPU, which do not survive a fork.
    """
    return sorted({name for one in objects if (name := str(getattr(one, "__module__", ""))).startswith(_PACKAGE)})


def fork_server() -> ForkServer:
    """The fork server of this process, shared by all pools because it imports torch."""
    return _servers.setdefault((os.getpid(), *(os.environ.get(name, "") for name in _READ_AT_START)), ForkServer())


def _run(environment: dict[str, str], target: Any, *arguments: Any) -> None:
    """Call the target in the environment of the process that asked for it.

    That of the fork server is as old as the fork server.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    target(*arguments)


def _kill(process_id: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process_id:
            os.kill(process_id, signal.SIGKILL)


@contextlib.contextmanager
def _only_from(server: forkserver.ForkServer) -> Iterator[None]:
    """Let multiprocessing use this fork server, and start programs that end with this process."""
    before = util.spawnv_passfds, forkserver.connect_to_new_process
    # it is given fewer types than it declares
    util.spawnv_passfds = _spawn_guarded  # type: ignore[assignment]
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        util.spawnv_passfds, forkserver.connect_to_new_process = before


def _spawn_guarded(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Replacement of multiprocessing.util.spawnv_passfds: the program ends with this process."""
    *words, program = [os.fsdecode(word) for word in arguments]
    # the resource tracker cleans up and ends after all its clients; it must only not be stopped
    is_tracker = "resource_tracker" in program
    guard = (f"import ctypes, os, signal; ctypes.CDLL(None).prctl(1, {int(signal.SIGCONT if is_tracker else signal.SIGKILL)}); "
             f"os.getppid() == {os.getpid()} or os._exit(1); ")
    guard += "signal.signal(signal.SIGHUP, signal.SIG_IGN); " if is_tracker else ""
    process = subprocess.Popen([*words, guard + program], executable=path, pass_fds=[int(one) for one in descriptors],
                               restore_signals=False, process_group=0)
    # multiprocessing waits for it; Popen must neither warn nor wait
    process.returncode = 0
    return process.pid
