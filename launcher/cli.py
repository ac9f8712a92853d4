"""The `ngsgd` command: reads the arguments, calls one function, turns errors into sentences and exit codes.

Nothing heavy is imported at the top, so that `ngsgd --help` answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.console import run_guarded, version
from ngsgd.launcher.screen import SCREEN

# 128 + SIGPIPE, the shell's own convention
_EXIT_BROKEN_PIPE = 141

# command -> "module" of ngsgd.launcher.commands whose `command(arguments)` it is, or
# "module:function"
_COMMANDS = {
    "resume": "run_commands:resume", "evaluate": "decode:evaluate",
    "decode": "decode:decode", "align": "run_commands:align", "report": "report",
    "compare": "compare", "plan": "plan", "simulate": "simulate", "submit": "submit", "tune": "tune",
    "status": "jobs:status", "logs": "jobs:logs", "stop": "jobs:stop", "ui": "ui",
    "settings": "settings", "doctor": "doctor", "info": "info", "export": "kaldi:export", "transcribe": "transcribe",
    "import": "kaldi:import_",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # what follows is for another command
    own = arguments[:arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    # a captured stream cannot be reconfigured, and need not be
    with contextlib.suppress(ValueError, AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        rest = [word for word in own if word != "--debug"] + arguments[len(own):]
        code = run_guarded(lambda: _dispatch(rest, debug), debug=debug)
        SCREEN.close()
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has gone (`| head`); what is still buffered must not raise again when the
        # interpreter ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def _dispatch(arguments: list[str], debug: bool) -> int:
    from ngsgd.launcher import help as texts

    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help", "help"):
        print(texts.top(), end="")
        return EXIT_OK
    if command == "--version":
        print(f"ngsgd {version('ngsgd')}")
        return EXIT_OK
    if command in ("-sc", "--shell-completion"):
        from ngsgd.launcher import completion

        return completion.complete(rest, lambda name: main([name, "--help"]))
    if command == "train":
        if "--help" in rest or "-h" in rest:
            sections = [word for word in rest if not word.startswith("-") and "=" not in word]
            print(texts.train(sections[0] if sections else ""), end="")
            return EXIT_OK
        from ngsgd.launcher.commands import hydra_app

        return hydra_app.train(rest, debug=debug)
    if command in _COMMANDS:
        module, _, function = _COMMANDS[command].partition(":")
        code: int = getattr(importlib.import_module(f"ngsgd.launcher.commands.{module}"), function or "command")(rest)
        return code
    near = difflib.get_close_matches(command, texts.COMMANDS, n=1)
    hint = f"Did you mean ngsgd {near[0]}?" if near else f"Choose one of {', '.join(texts.COMMANDS)}; see ngsgd --help."
    raise ConfigError(f"{command!r} is not a command. {hint}" if command else "No command was given. " + hint)
