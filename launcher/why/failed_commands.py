"""Records commands that end with an error outside of a run, for `ngsgd why`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import ConfigError, MissingExtraError
from ngsgd.object_storage.urls import is_url, local_root

# commands that only read, whose errors explain nothing
_SILENT = ("why", "status", "info", "logs", "settings", "help", "completion", "--help", "-h", "--version")


def keep(arguments: Sequence[str], error: BaseException) -> None:
    """Record the error of a command line, unless a run contains it that `ngsgd why` finds."""
    from ngsgd.runs.failure_record import keep_failed_command, recorded_in
    if not arguments or arguments[0] in _SILENT:
        return
    run = _run_of(arguments)
    about = run or _output_dir(arguments)
    if any(folder.resolve() == about.resolve() or folder.resolve().parent == about.resolve() for folder in recorded_in(error)):
        return
    # a command explains the state of a run if it would have continued it, with the right arguments
    is_refused = isinstance(error, ConfigError) and not isinstance(error, MissingExtraError)
    is_note = run is not None and (is_refused or arguments[0] != "resume")
    keep_failed_command(about, error, ["ngsgd", *arguments], "note" if is_note else "")


def _run_of(arguments: Sequence[str]) -> Path | None:
    from ngsgd.runs import stored_run
    from ngsgd.runs.run_folder import known_run
    words = [word for word in arguments[1:] if not word.startswith("-") and "=" not in word]
    if not words or arguments[0] == "train":
        return None
    # after an error of the object storage, nothing is fetched
    found = stored_run.known_folder(words[0]) if is_url(words[0]) else known_run(words[0])
    # as `ngsgd why`
    return stored_run.with_newest_events(found) if found else None


def _output_dir(arguments: Sequence[str]) -> Path:
    words = list(arguments)
    given = [word.partition("=")[2] for word in words if word.startswith(("output_dir=", "--output-dir="))]
    # ngsgd ui FOLDER
    given += [word for word in words[1:2] if words[0] == "ui" and not word.startswith("-")]
    given += [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--output-dir"]
    return local_root(given[-1] if given else "runs")
