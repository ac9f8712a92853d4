"""The state of a run, from the files of its folder."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngsgd import process_identity
from ngsgd.config import TaskConfig
from ngsgd.files import read_json, unsealed
from ngsgd.runs import stored_run
from ngsgd.runs.run_folder import RunFolder, resume_command
from ngsgd.training.storage.event_log import newest_events
from ngsgd.training.storage.lock import holder_of
from ngsgd.word_errors import WordErrors
from ngsgd.yaml_text import read_entry

# MLflow's state of a run -> that of a Ray job
_STATES = {"FINISHED": "SUCCEEDED", "FAILED": "FAILED", "KILLED": "STOPPED"}
# a run of another machine counts as lost after this time without an event
_ALIVE_S = 600.0
# of the end of an event log: some outer iterations of 64 jobs, or all of a short run
_END_BYTES = 1 << 20
_NUM_INCIDENTS = 5


def state_of(run_dir: Path) -> dict[str, Any]:
    """Return state and progress of a run from the files in its folder; unknown figures are None."""
    folder = RunFolder(run_dir)
    log = _LogEnd.of(folder.events)
    last, end = log.outer_iteration, log.finished
    valid = last.get("valid", {})
    target = read_entry(folder.config, "task", "_target_")
    task = TaskConfig(_target_=target if isinstance(target, str) else "")
    # `ngsgd why` reads the rest of it
    error = folder.last_error()
    errors = WordErrors.of_json(end["test_errors"]) if end.get("test_errors") else None
    return {
        "run": folder.address, "state": _state(folder, log), "process": _process(folder), "silent_s": _silent_s(folder),
        "outer_iter": last["outer_iter"] + 1 if last else 0, "num_outer_iters": last.get("num_outer_iters"),
        "epoch": last.get("epoch", 0.0), "num_epochs": last.get("num_epochs"),
        "frames_processed": last.get("frames_processed", 0),
        "metrics": end.get("metrics") or None, "is_speech": not task._target_,
        "valid_objf": valid.get("objf"), "valid_accuracy": valid.get("accuracy"), "left_s": last.get("left_s"),
        "wer": str(errors) if errors else None, "wer_percent": errors.wer if errors else None,
        # the module that compares fingerprints imports torch
        "fingerprint": _stored(lambda: dict(unsealed("fingerprint", read_json(folder.fingerprint))
                                            ["history"][-1]["fingerprint"])),
        "error": {name: error[name] for name in ("exit_code", "message")} if error else None,
        "resume": resume_command(task, run_dir),
        "is_finished": bool(end), "examples": _stored(lambda: str(read_json(folder.data)["egs"]) or None),
        "num_incidents": log.num_incidents, "incidents": log.incidents[::-1],
        # those of a long log are counted in its end only
        "incidents_since_outer_iter": log.since}


@dataclass
class _LogEnd:
    """The end of an event log: the newest events of each kind, and the incidents of that part."""

    newest: dict[str, Any] = field(default_factory=dict)
    outer_iteration: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] = field(default_factory=dict)
    # whether there is an event after those of the start
    has_begun: bool = False
    num_incidents: int = 0
    # messages, newest first
    incidents: list[str] = field(default_factory=list)
    # the first outer iteration of the part that was read, 0-based
    since: int = 0

    @classmethod
    def of(cls, path: Path) -> _LogEnd:
        found = cls()
        for event, num_bytes in newest_events(path):
            kind, found.newest = event["event"], found.newest or event
            found.has_begun |= kind != "opened"
            if kind == "outer_iteration":
                found.outer_iteration, found.since = found.outer_iteration or event, event["outer_iter"]
                if num_bytes > _END_BYTES:
                    return found
            elif kind == "finished":
                found.finished = found.finished or event
            elif kind == "incident":
                found.num_incidents += 1
                found.incidents += [str(event.get("message"))] if found.num_incidents <= _NUM_INCIDENTS else []
        found.since = 0
        return found


def _state(folder: RunFolder, log: _LogEnd) -> str:
    """The state in Ray's terms; LOST: the process ended without a final event; UNKNOWN: unclear."""
    process = _process(folder)
    if process_identity.is_alive(process):
        return "RUNNING" if log.has_begun else "PENDING"
    if not log.newest:
        return ("UNKNOWN" if may_be_alive(process) else "LOST") if folder.process.exists() else "PENDING"
    status = log.newest.get("status")
    if status in _STATES:
        return _STATES[status]
    if _silent_s(folder) <= _ALIVE_S:
        if is_elsewhere(process):
            return "RUNNING"
        if may_be_alive(process):
            return "UNKNOWN"
    return "LOST"


def _process(folder: RunFolder) -> dict[str, Any]:
    held = holder_of(folder.lock)
    if held and held.get("purpose") != "decode":
        return _as_identity(held.get("holder"))
    if stored_run.url_of(folder.path):
        # a holder that died without a release writes no more renewals
        holder, silent_s, purpose = stored_run.holder(folder.path)
        return _as_identity(dict(holder)) if silent_s < _ALIVE_S and purpose != "decode" else {}
    try:
        return _as_identity(read_json(folder.process))
    except (OSError, ValueError):
        return {}


def _as_identity(stored: object) -> dict[str, Any]:
    return stored if isinstance(stored, dict) and stored.keys() >= {"host", "process_id"} else {}


def is_elsewhere(process: Mapping[str, Any]) -> bool:
    """Return whether a process belongs to another machine or container."""
    if not process:
        return False
    if process["host"] != socket.gethostname():
        return True
    # a container on this machine; a process of another boot has ended
    return (process_identity.is_complete(process) and process["boot_id"] == process_identity.current()["boot_id"]
            and not process_identity.is_here(process))


def may_be_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process here, perhaps another, has the id of a record without start time."""
    process_id = process.get("process_id")
    if not process or is_elsewhere(process) or process_identity.is_complete(process) or type(process_id) is not int:
        return False
    return process_id > 1 and process_identity.exists(process_id)


def _silent_s(folder: RunFolder) -> float:
    return max(0.0, time.time() - folder.events.stat().st_mtime) if folder.events.is_file() else 0.0


def _stored(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        # the run has not started, or the file is damaged
        return None
