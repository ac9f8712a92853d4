"""Records commands that end with an error outside of a run, for `ngsgd why`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ngsgd.object_storage.urls import is_url, local_root

# commands that only read, whose errors explain nothing
_SILENT = ("why", "status", "info", "logs", "settings", "help", "completion", "--help", "-h", "--version")


def keep(arguments: Sequence[str], error: BaseException) -> None:
    """Record the error of a command line, unless the folder of a run contains it."""
    from ngsgd.pipeline.runs.failure_record import is_recorded, keep_failed_command

    if not arguments or arguments[0] in _SILENT or is_recorded(error):
        return
    command = " ".join(["ngsgd", *arguments])
    run = _run_of(arguments)
    if run is not None:
        from ngsgd.launcher.why.facts import lines_of
        from ngsgd.pipeline.runs.run_folder import RunFolder

        num_starts = sum(line.event == "opened" for line in lines_of(RunFolder(run).events))
        keep_failed_command(run, error, command, num_starts)
        return
    output_dir = _output_dir(arguments)
    # as explain.num_runs, whose module takes longer to import
    keep_failed_command(output_dir, error, command, sum(1 for _ in output_dir.glob("*/config.yaml")))


def _run_of(arguments: Sequence[str]) -> Path | None:
    """The run that a command line names."""
    from ngsgd.pipeline.runs import stored_run
    from ngsgd.pipeline.runs.run_folder import known_run

    words = [word for word in arguments[1:] if not word.startswith("-") and "=" not in word]
    if not words or arguments[0] == "train":
        return None
    # after an error of the object storage, nothing is fetched
    return stored_run.known_folder(words[0]) if is_url(words[0]) else known_run(words[0])


def _output_dir(arguments: Sequence[str]) -> Path:
    """The folder of runs that a command line names."""
    words = list(arguments)
    given = [word.partition("=")[2] for word in words if word.startswith(("output_dir=", "--output-dir="))]
    # ngsgd ui FOLDER
    given += [word for word in words[1:2] if words[0] == "ui" and not word.startswith("-")]
    given += [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--output-dir"]
    return local_root(given[-1] if given else "runs")
