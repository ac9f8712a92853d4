"""Properties after every case, checked from outside: the files of the run, the processes and the
memory of this machine.

I1 to I7 and I10 are read from the ledger, most of them by the audit program; numbers as in
docs/fault-tests.md.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from ngsgd.files import read_json_lines
from ngsgd.models import build_model
from ngsgd.training.storage.audit import audit, read
from tests import judge
from tests.recomputation import Line, Recomputation, Start, Trained
from tests.toy import Run

# environment variable that marks programs started by a case, and with them all their children
TAG = "NGSGD_CHAOS"
# for processes that end, and without progress, on a busy machine; a death that nobody notices
# lasts `trials.PATIENT_S`
_BUSY_S = 300.0


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def tagged(tag: str) -> list[int]:
    """The processes of a case."""
    found = []
    for process in psutil.pids():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            found += [process] if f"{TAG}={tag}".encode() in variables else []
    return found


def _once_settled(look: Callable[[], list[str]]) -> list[str]:
    """Processes that remain after they have had time to end."""
    deadline = time.monotonic() + _BUSY_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _shared_objects() -> set[str]:
    """Names in /dev/shm of the kinds that multiprocessing and torch make, which others do not use.

    Programs that run at the same time, such as other tests, have files there, too.
    """
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # the process may have ended
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text())) if maps.parent.name != str(os.getpid()) else set()
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.mp-", "torch_"))} - used


def _shared_memory() -> Counter[str]:
    """Shared vectors that this process holds open, and those that it has mapped."""
    open_files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                  if os.path.lexists(f"/proc/self/fd/{name}")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counter({"open shared memory": sum("memfd:ngsgd" in name for name in open_files),
                    "mapped shared memory": sum("memfd:ngsgd" in line for line in maps)})


def _listening() -> set[int]:
    return {connection.laddr.port for connection in psutil.Process().net_connections("inet") if connection.status == "LISTEN"}


@dataclass
class Surroundings:
    """The state before a case; `problems()` lists the leftovers (I8)."""

    tag: str = ""
    processes: set[int] = field(default_factory=_children)
    shared: set[str] = field(default_factory=_shared_objects)
    memory: Counter[str] = field(default_factory=_shared_memory)
    ports: set[int] = field(default_factory=_listening)

    def problems(self, folder: Path) -> list[str]:
        gc.collect()
        found = [f"process {process} is left" for process in _once_settled(self._processes_left)]
        found += [f"/dev/shm/{name} is left" for name in _once_settled(lambda: sorted(_shared_objects() - self.shared))]
        found += [f"{name}: {count} more than before" for name, count in (_shared_memory() - self.memory).items()]
        found += [f"port {port} is open" for port in _listening() - self.ports]
        return [*found, *judge.temporary_files(folder)]

    def _processes_left(self) -> list[str]:
        found = []
        for process in (_children() - self.processes) | set(tagged(self.tag) if self.tag else ()):
            command, parent = "(gone)", 0
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(process)
                command, parent = " ".join(one.cmdline()), one.ppid()
            # the fork server and the resource tracker of this process end with it
            if parent != os.getpid() or "multiprocessing" not in command:
                found.append(f"{process} {command[:80]}")
        return found


def problems(run: Run, *, pause_s: float | None = None, within: str = "") -> list[str]:
    """All problems of a finished run, except for remaining resources.

    `pause_s` is the longest time without progress that was seen; `within` the hash that the final
    model must have.
    """
    # I1 to I3, I5 to I7, I10
    found = audit(run.ledger_path)
    found += _models_that_cannot_be_recomputed(run)                                          # I4
    found += list(_too_many_lines(run))                                                      # I11
    if pause_s is not None and pause_s > _BUSY_S:                                   # I9
        found.append(f"nothing happened for {pause_s:.1f} s")
    if within and final_hash(run) != within:                                                 # I12
        found.append(f"the final model is {final_hash(run)[:12]}, without faults it is {within[:12]}")
    return found


def final_hash(run: Run) -> str:
    """Of the model that was committed last."""
    return str(read(run.ledger_path)[-1].commit["model"])


def num_recomputed(run: Run) -> Counter[int]:
    """How often the work of each outer iteration was begun again; plans cost nothing."""
    begun = Counter(line["outer_iter"] for line in read_json_lines(run.ledger_path)
                    if line["event"] == "submitted" and (line["job"], line["attempt"]) == (0, 1))
    return begun - Counter(dict.fromkeys(begun, 1))


def _models_that_cannot_be_recomputed(run: Run) -> list[str]:
    """Every committed model must follow from the start and the accepted vectors of the ledger."""
    info, layout = run.reader.info, run.store.layout
    fresh = build_model(run.config.model, info.num_inputs, info.num_classes, run.config.seed)
    schedule = run.schedule

    def kept(line: Line, _start: Start) -> Trained:
        return Trained(np.load(run.folder / "kept" / f"{line['digest']}.npy"))
    recomputed = Recomputation(run.config, (schedule.num_archives, schedule.frames_per_eg), layout.flatten(fresh.state_dict()),
                               list(layout.by_name().items()), kept)
    return recomputed.read((0, line) for line in read_json_lines(run.ledger_path))


def _too_many_lines(run: Run) -> Iterator[str]:
    """One line for each outer iteration and event; a pool wrapper must not add its own."""
    events = Counter(line["event"] for line in read_json_lines(run.ledger_path))
    num_events = sum(events[name] for name in ("failed", "rejected", "rolled_back", "discarded"))
    # the others have no line in the ledger: no job was concerned
    of_jobs = [one for one in run.recorder.incidents if one.what not in ("worker_replaced", "checkpoint_skipped", "job_continued")]
    if len(of_jobs) > num_events:
        yield f"{len(of_jobs)} incidents were reported for {num_events} events"
    for incident in of_jobs:
        first_line = incident.message.split("\n", 1)[0]
        if "worker" not in first_line or "outer iteration" not in first_line:
            yield f"a message does not say who or when: {first_line!r}"
