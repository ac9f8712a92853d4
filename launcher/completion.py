"""Shell completion: commands, their flags, runs and Hydra's settings."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

from ngsgd.errors import EXIT_OK
from ngsgd.launcher import help as texts

_TAKE_A_RUN = ("resume", "evaluate", "decode", "report", "compare", "status", "logs", "stop", "info")
_TAKE_SETTINGS = ("train", "align", "plan", "simulate", "submit", "tune")


def complete(arguments: list[str], print_help: Callable[[str], object]) -> int:
    """Answers the shell: the command's name first; then Hydra's completion of settings, or flags and runs."""
    program, _, typed = os.environ.get("COMP_LINE", "").partition(" ")
    command, space, rest = typed.lstrip().partition(" ")
    query = arguments[0] if arguments else ""
    is_flag = rest.rpartition(" ")[2].startswith("-")
    is_setting = bool(space) and command in _TAKE_SETTINGS and (command == "train" or not is_flag)
    if query.startswith("query=") and not is_setting:
        words = words_after(command, rest, print_help) if space else [name for name in texts.COMMANDS if name.startswith(command)]
        print("\n".join(words) if "fish" in query or "zsh" in query else " ".join(words))
        return EXIT_OK
    # Hydra knows nothing of our subcommand
    os.environ["COMP_LINE"] = f"{program} {rest}"
    from ngsgd.launcher.commands import hydra_app

    return hydra_app.complete(arguments)


def words_after(command: str, typed: str, print_help: Callable[[str], object]) -> list[str]:
    """What may stand where the last word of `typed` stands."""
    last = typed.rpartition(" ")[2]
    offered = _flags(command, print_help) if last.startswith("-") else _runs() if command in _TAKE_A_RUN else []
    return [word for word in offered if word.startswith(last)]


def _flags(command: str, print_help: Callable[[str], object]) -> list[str]:
    """Those that the command's own help names, so that there is no second list."""
    if command not in texts.COMMANDS:
        return []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        print_help(command)
    return sorted(set(re.findall(r"--[a-z][a-z-]+", said.getvalue())))


def _runs() -> list[str]:
    """Newest first."""
    found = sorted(Path("runs").glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in found]
