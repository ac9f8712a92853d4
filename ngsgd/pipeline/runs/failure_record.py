"""Records of errors: in the folder of a run, and of commands that failed before a run existed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_RUN_FAILED, DamagedArchiveError
from ngsgd.files import make_directories, read_json, sealed, unsealed, write_text
from ngsgd.masking import masked
from ngsgd.pipeline.runs import stored_run

# environment variable of a scheduler's job -> name of the scheduler
_SCHEDULERS = {"SLURM_JOB_ID": "Slurm job", "KUBERNETES_SERVICE_HOST": "Kubernetes, API at"}


def describe(error: BaseException, signal_name: str = "") -> dict[str, Any]:
    """Return an error as plain values: class, exit code, message and, where known, the cause.

    Args:
        error: the error.
        signal_name: signal that requested the end, such as "SIGTERM"; empty if unknown.

    Returns:
        "kind", "exit_code" and "message"; "errno" (such as "ENOSPC"), "signal", "scheduler" and
        "archive" where they apply.
    """
    about: dict[str, Any] = {
        "kind": type(error).__name__, "exit_code": getattr(error, "exit_code", EXIT_RUN_FAILED),
        "message": masked(str(error) or type(error).__name__)}
    for one in _causes(error):
        if isinstance(one, OSError) and one.errno:
            about.setdefault("errno", errno.errorcode.get(one.errno, str(one.errno)))
        if isinstance(one, KeyboardInterrupt):
            signal_name = signal_name or str(one) or "SIGINT"
        if isinstance(one, DamagedArchiveError):
            about["archive"] = one.archive
    if signal_name:
        about["signal"] = signal_name
        found = [f"{name} {os.environ[variable]}" for variable, name in _SCHEDULERS.items() if os.environ.get(variable)]
        about |= {"scheduler": found[0]} if found else {}
    return about


def mark_recorded(error: BaseException) -> None:
    """Mark an error that the folder of its run contains."""
    error.__dict__["is_recorded_in_run"] = True


def is_recorded(error: BaseException) -> bool:
    """Whether the folder of a run contains the error, or one that it was raised from."""
    return any("is_recorded_in_run" in one.__dict__ for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def write_record(path: Path, about: Mapping[str, Any]) -> None:
    """Write a record with its checksum; a full or failing disk is ignored.

    The error that is recorded has been reported already.
    """
    with contextlib.suppress(OSError):
        write_text(path, json.dumps(sealed(about), indent=1))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; empty if it is missing or damaged."""
    try:
        about = unsealed(read_json(path))
    except (OSError, ValueError):
        return {}
    is_valid = type(about.get("exit_code")) is int and isinstance(about.get("message"), str)
    return about if is_valid else {}


# Commands that failed outside of a run ------------------------------------------------------------


def state_folder() -> Path:
    """Folder of this user's state: $XDG_STATE_HOME/ngsgd, or ~/.local/state/ngsgd."""
    root = os.environ.get("XDG_STATE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".local" / "state") / "ngsgd"


def failed_command_path(about: Path) -> Path:
    """File of the last failed command about a run, or about a folder of runs."""
    # a run in object storage has one record, although commands use several folders for it
    name = hashlib.sha256(os.fsencode(stored_run.address(about.absolute()))).hexdigest()[:32]
    return state_folder() / "failed" / f"{name}.json"


def keep_failed_command(about: Path, error: BaseException, command: str, num_starts: int = 0) -> None:
    """Record a command that ended with an error outside of a run, such as a rejected setting.

    Args:
        about: folder of the run that the command names, or the folder of runs.
        error: its error.
        command: the command line, without passwords.
        num_starts: starts of the run so far; a later start makes the record irrelevant.
    """
    path = failed_command_path(about)
    with contextlib.suppress(OSError):
        make_directories(path.parent)
    write_record(path, {**describe(error), "command": masked(command), "num_starts": num_starts})
