"""The state of a run, from the files of its folder."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd import process_identity
from ngsgd.config import TaskConfig
from ngsgd.files import read_json, read_regular_text, verified
from ngsgd.pipeline.runs import stored_run
from ngsgd.pipeline.runs.run_folder import RunFolder, resume_command
from ngsgd.training.storage.event_log import read_events
from ngsgd.training.storage.lock import holder_of

# MLflow's state of a run -> that of a Ray job
_STATES = {"FINISHED": "SUCCEEDED", "FAILED": "FAILED", "KILLED": "STOPPED"}
# a run of another machine counts as lost after this time without an event
_ALIVE_S = 600.0


def state_of(run_dir: Path) -> dict[str, Any]:
    """Return state and progress of a run from the files in its folder; unknown figures are None."""
    folder = RunFolder(run_dir)
    events = read_events(folder.events)
    nothing: dict[str, Any] = {}
    last = next((event for event in reversed(events) if event.get("event") == "outer_iteration"),
                nothing)
    end = next((event for event in reversed(events) if event.get("event") == "finished"), nothing)
    incidents = [str(event.get("message")) for event in events if event.get("event") == "incident"]
    valid, task = last.get("valid", {}), _task_of(folder)
    return {
        "run": folder.address, "state": _state(folder, events), "process": _process(folder),
        "silent_s": _silent_s(folder),
        "outer_iter": last["outer_iter"] + 1 if last else 0,
        "num_outer_iters": last.get("num_outer_iters"),
        "epoch": last.get("epoch", 0.0), "num_epochs": last.get("num_epochs"),
        "frames_processed": last.get("frames_processed", 0),
        "metrics": end.get("metrics") or None, "is_speech": not task._target_,
        "valid_objf": valid.get("objf"), "valid_accuracy": valid.get("accuracy"),
        "left_s": last.get("left_s"),
        "wer": end.get("wer") or None,
        "wer_percent": end.get("wer_percent") if end.get("wer") else None,
        "fingerprint": _fingerprint(folder),
        "error": _error_of(folder), "resume": resume_command(task, run_dir),
        "is_finished": bool(end), "examples": _examples_of(folder),
        "num_incidents": len(incidents), "incidents": incidents[-5:]}


def _error_of(folder: RunFolder) -> dict[str, Any] | None:
    """Exit code and message of the last error; `ngsgd why` reads the rest."""
    about = folder.last_error()
    return {name: about[name] for name in ("exit_code", "message")} if about else None


def _task_of(folder: RunFolder) -> TaskConfig:
    """The custom task of a run; config.yaml is not parsed completely, which is slow."""
    try:
        text = read_regular_text(folder.config)
    except (OSError, ValueError):
        return TaskConfig()
    found = re.search(r"^task:\n  _target_: (?:''|[\"']?([^\"'\n]*)[\"']?)$", text, re.MULTILINE)
    return TaskConfig(_target_=found[1] or "") if found else TaskConfig()


def _state(folder: RunFolder, events: Sequence[Mapping[str, Any]]) -> str:
    """The state in Ray's terms; LOST: the process ended without a final event; UNKNOWN: unclear."""
    process = _process(folder)
    if process_identity.is_alive(process):
        has_begun = any(event["event"] != "opened" for event in events)
        return "RUNNING" if has_begun else "PENDING"
    if not events:
        return ("UNKNOWN"
                if may_be_alive(process) else "LOST") if folder.process.exists() else "PENDING"
    status = events[-1].get("status")
    if status in _STATES:
        return _STATES[status]
    if _silent_s(folder) <= _ALIVE_S:
        if is_elsewhere(process):
            return "RUNNING"
        if may_be_alive(process):
            return "UNKNOWN"
    return "LOST"


def _process(folder: RunFolder) -> dict[str, Any]:
    """The identity of the process that trains; empty if there is none."""
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
    return (process_identity.is_complete(process)
            and process["boot_id"] == process_identity.current()["boot_id"]
            and not process_identity.is_here(process))


def may_be_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process of this machine has the id of a record without a start time.

    It may be another process.
    """
    process_id = process.get("process_id")
    if not process or is_elsewhere(process) or process_identity.is_complete(process) or type(process_id) is not int:
        return False
    return process_id > 1 and process_identity.exists(process_id)


def _silent_s(folder: RunFolder) -> float:
    return max(0.0, time.time() - folder.events.stat().st_mtime) if folder.events.is_file() else 0.0


def _examples_of(folder: RunFolder) -> str | None:
    try:
        return str(read_json(folder.data)["egs"])
    except (OSError, ValueError, KeyError, TypeError):
        # the run has not started
        return None


def _fingerprint(folder: RunFolder) -> dict[str, Any] | None:
    """The stored numeric fingerprint; the module that compares it imports torch."""
    try:
        return dict(verified(read_json(folder.fingerprint))["history"][-1]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        # the run has not started, or the file is damaged
        return None
