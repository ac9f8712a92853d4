"""Simulated machines that run production code with threads on one clock, one at a time.

Each process is a thread of this program. Only one runs at any time: a call of `sleep` hands over to
the process that wakes first. So a seed determines every order of events.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.simulation.world import Killed, NoProgressError

# simulated seconds between two looks at a lock, an event or a thread
_TICK_S = 0.05


class Machine:
    """A machine with its processes; a suspended one does nothing while its clock runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.suspended_until = 0.0


class Machines:
    """The scheduler, and the clock of all machines."""

    def __init__(self, limit_s: float) -> None:
        self.now, self.limit_s = 0.0, limit_s
        self.problems: list[str] = []
        # (time, number, thread that wakes)
        self._asleep: list[tuple[float, int, threading.Semaphore]] = []
        self._numbers = itertools.count()
        self._machines: dict[int, Machine] = {}
        self._is_over = threading.Semaphore(0)
        self._num_left = 0

    @property
    def machine(self) -> Machine:
        """The machine of the running process."""
        return self._machines[threading.get_ident()]

    def start(self, machine: Machine, work: Callable[[], object], at: float = 0.0) -> None:
        """Run a process on a machine from a time on."""
        turn = threading.Semaphore(0)

        def run() -> None:
            turn.acquire()
            self._machines[threading.get_ident()] = machine
            try:
                work()
            except Killed:
                pass
            except BaseException as error:
                self.problems.append(f"a process on {machine.name} ended with {type(error).__name__}: {error}")
            self._num_left -= 1
            self._wake_next()
        self._num_left += 1
        heapq.heappush(self._asleep, (max(at, self.now), next(self._numbers), turn))
        threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Run until all processes have ended."""
        self._wake_next()
        self._is_over.acquire()

    def sleep(self, seconds: float) -> None:
        """Let others run; raise Killed if the machine is dead by then."""
        machine, turn = self.machine, threading.Semaphore(0)
        until = self.now + seconds
        while True:
            heapq.heappush(self._asleep, (until, next(self._numbers), turn))
            self._wake_next()
            turn.acquire()
            if self.now > self.limit_s:
                raise NoProgressError(f"{machine.name} did not end within {self.limit_s:g} s")
            if machine.is_dead:
                raise Killed
            if self.now >= machine.suspended_until:
                return
            until = machine.suspended_until

    def _wake_next(self) -> None:
        if not self._num_left:
            self._is_over.release()
            return
        at, _, turn = heapq.heappop(self._asleep)
        self.now = max(self.now, at)
        turn.release()

    def threads(self) -> Any:
        """A stand-in for the module `threading`."""
        machines = self

        class Event:
            def __init__(self) -> None:
                self._is_set = False

            def set(self) -> None:
                self._is_set = True

            def clear(self) -> None:
                self._is_set = False

            def wait(self, timeout: float) -> bool:
                until = machines.now + timeout
                while not self._is_set and machines.now < until:
                    machines.sleep(min(1.0, until - machines.now))
                return self._is_set

        class Lock:
            def __init__(self) -> None:
                self._is_held = False

            def __enter__(self) -> None:
                while self._is_held:
                    machines.sleep(_TICK_S)
                self._is_held = True

            def __exit__(self, *_error: object) -> None:
                self._is_held = False

        class Thread:
            def __init__(self, target: Callable[[], object], **_more: object) -> None:
                self._target, self._has_ended = target, False

            def start(self) -> None:
                machines.start(machines.machine, self._run)

            def _run(self) -> None:
                try:
                    self._target()
                finally:
                    self._has_ended = True

            def join(self) -> None:
                while not self._has_ended:
                    machines.sleep(_TICK_S)
        return SimpleNamespace(Event=Event, Lock=Lock, Thread=Thread)
