"""The `ngsgd` command: one function per command; errors become messages and exit codes.

Heavy packages are imported by the commands, which keeps `ngsgd --help` fast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from ngsgd.errors import EXIT_BROKEN_PIPE, EXIT_OK
from ngsgd.interface import command_line
from ngsgd.launcher import registry
from ngsgd.launcher.console import drop, replace_closed_streams, report_lost_output, run_guarded, version
from ngsgd.launcher.screen import SCREEN

_HELP = ("-h", "--help", "help")

@command_line()
def main(argv: Sequence[str] | None = None) -> int:
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

        def keep(error: BaseException) -> None:
            # for `ngsgd why`
            from ngsgd.launcher.why import failed_commands
            failed_commands.keep(rest, error)

        # a sweep handles the errors of its runs
        more = ["--debug"] if debug and rest[:1] == ["train"] else []
        code = run_guarded(lambda: _dispatch([*rest[:1], *more, *rest[1:]]), debug=debug, on_error=keep)
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


def _dispatch(arguments: list[str]) -> int:
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
    return registry.find(command).run(rest)
