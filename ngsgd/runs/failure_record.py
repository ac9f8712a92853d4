"""Records of errors: in the folder of a run, and of commands that failed before a run existed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_RUN_FAILED, ClusterError, DamagedArchiveError, FailureKind, MissingExtraError, failure_kind
from ngsgd.files import make_directories, read_json, sealed, unsealed, write_text
from ngsgd.masking import masked
from ngsgd.runs import stored_run

# environment variable of a scheduler's job -> name of the scheduler
_SCHEDULERS = {"SLURM_JOB_ID": "Slurm job", "KUBERNETES_SERVICE_HOST": "Kubernetes, API at"}


def describe(error: BaseException, signal_name: str = "") -> dict[str, Any]:
    """Return an error as plain values: class, exit code, message and, where known, the cause.

    Returns:
        "kind", "exit_code" and "message"; "errno" (such as "ENOSPC"), "signal" (that requested the
        end), "scheduler", "archive", "install" and "failure" (a `FailureKind`) where they apply.
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
        if isinstance(one, MissingExtraError):
            about["install"] = one.install
        if isinstance(one, ClusterError) and one.failure:
            about.setdefault("failure", one.failure)
    if failure_kind(about["kind"], about["message"]) is FailureKind.MEMORY:
        about.setdefault("failure", FailureKind.MEMORY)
    if signal_name:
        about["signal"] = signal_name
        found = [f"{name} {os.environ[variable]}" for variable, name in _SCHEDULERS.items() if os.environ.get(variable)]
        about |= {"scheduler": found[0]} if found else {}
    return about


def mark_recorded(error: BaseException, folder: Path) -> None:
    """Mark an error that the folder of a run contains."""
    error.__dict__.setdefault("recorded_in", []).append(folder)


def recorded_in(error: BaseException) -> list[Path]:
    """The folders of runs that contain the error, or one that it was raised from."""
    return [folder for one in _causes(error) for folder in one.__dict__.get("recorded_in", ())]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def write_record(path: Path, about: Mapping[str, Any]) -> None:
    """Write a record with its checksum; a failing disk is ignored, as the error was reported."""
    with contextlib.suppress(OSError):
        write_text(path, json.dumps(sealed("error", about), indent=1))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; empty if it is missing or damaged."""
    try:
        about = unsealed("error", read_json(path))
    except (OSError, ValueError):
        return {}
    is_valid = type(about.get("exit_code")) is int and isinstance(about.get("message"), str)
    return about if is_valid else {}


def state_folder() -> Path:
    """Folder of this user's state: $XDG_STATE_HOME/ngsgd, or ~/.local/state/ngsgd."""
    root = os.environ.get("XDG_STATE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".local" / "state") / "ngsgd"


def failed_command_path(about: Path, kind: str = "") -> Path:
    """File of the last failed command about a run or a folder of runs; "note": wrong steps."""
    # a run in object storage has one record, although commands use several folders for it
    name = hashlib.sha256(os.fsencode(stored_run.address(about.absolute()))).hexdigest()[:32]
    return state_folder() / "failed" / f"{name}{kind}.json"


def keep_failed_command(about: Path, error: BaseException, command: Sequence[str], kind: str = "") -> None:
    """Record a command about a run, or runs, that ended with an error outside of a run."""
    path = failed_command_path(about, kind)
    with contextlib.suppress(OSError):
        make_directories(path.parent)
        # older
        failed_command_path(about, "note").unlink(missing_ok=True)
    # such as the run of a first network, in the cache
    runs = [masked(str(folder)) for folder in recorded_in(error)]
    write_record(path, {**describe(error), "command": masked(shlex.join(command)), "words": [masked(word) for word in command],
                        "runs": runs, "mark": _mark(about)})


def failed_command(about: Path, kind: str = "") -> dict[str, Any]:
    """The last failed command, or wrong step ("note"), unless a run started or failed since."""
    record = read_record(failed_command_path(about, kind))
    return record if record and record.get("mark") == _mark(about) else {}


def _mark(about: Path) -> str:
    """A text that another start or error of a run changes; for a single run, each event does."""
    if (about / "config.yaml").is_file():
        events = about / "events.jsonl"
        found: list[object] = [events.stat().st_size if events.is_file() else 0, read_record(about / "error.json")]
    else:
        found = []
        for run in sorted(config.parent for config in about.glob("*/config.yaml")):
            # the number of processes that held its lock so far
            fence: object = None
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                fence = read_json(run / "lock")["fence"]
            found.append((run.name, fence, read_record(run / "error.json")))
    return hashlib.sha256(repr(found).encode()).hexdigest()
