"""The `ngsgd` command: one function per command; errors become messages and exit codes.

Heavy packages are imported by the commands, which keeps `ngsgd --help` fast.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Sequence
from functools import partial

from ngsgd.errors import EXIT_BROKEN_PIPE, EXIT_OK, ConfigError
from ngsgd.interface import command_line
from ngsgd.launcher.console import drop, replace_closed_streams, report_lost_output, run_guarded, version
from ngsgd.launcher.screen import SCREEN

_HELP = ("-h", "--help", "help")

# command -> "module:function" of ngsgd.launcher.commands; the function is `command` by default
_COMMANDS = {
    "resume": "hydra_app:resume", "stop": "cluster.jobs:stop", "tune": "tune", "align": "align",
    "transcribe": "transcribe", "decode": "decode:decode", "evaluate": "decode:evaluate",
    "status": "cluster.jobs:status", "logs": "cluster.jobs:logs", "report": "report", "compare": "compare", "ui": "ui",
    "info": "info", "why": "why", "verify": "verify", "settings": "settings",
    "submit": "cluster.submit", "doctor": "cluster.doctor", "plan": "cluster.plan", "simulate": "cluster.simulate",
    "export": "kaldi:export", "import": "kaldi:import_",
}


@command_line()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    replace_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # words after -- belong to another command
    own = arguments[:arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    # a captured stream cannot be reconfigured
    with contextlib.suppress(ValueError, AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        rest = [word for word in own if word != "--debug"] + arguments[len(own):]
        code = run_guarded(lambda: _dispatch(rest, debug), debug=debug, on_error=partial(_keep_error, rest))
        SCREEN.close()
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of a pipe ended (`| head`); flushing at exit must not raise again
        drop(sys.stdout)
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # a full disk behind `> FILE`, or a terminal that is gone
        return report_lost_output(error)
    return code


def _keep_error(arguments: Sequence[str], error: BaseException) -> None:
    """Record the error of a command for `ngsgd why`."""
    from ngsgd.launcher.why import failed_commands

    failed_commands.keep(arguments, error)


def _dispatch(arguments: list[str], debug: bool) -> int:
    from ngsgd.launcher import help as texts

    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if command in _HELP and rest and not rest[0].startswith("-"):
        # ngsgd help train optimizer
        command, rest = rest[0], ["--help", *rest[1:]]
    if command in _HELP:
        print(texts.top(), end="")
        return EXIT_OK
    if command == "--version":
        print(f"ngsgd {version('ngsgd')}")
        return EXIT_OK
    if command in ("completion", "-sc", "--shell-completion"):
        from ngsgd.launcher import completion

        return completion.command(rest, lambda name: main([name, "--help"]))
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
    raise ConfigError(f"{command!r} is not a command. {hint}")
