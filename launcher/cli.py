"""The `ngsgd` command: reads the arguments, calls one function, turns errors into sentences and exit codes.

Nothing heavy is imported at the top, so that `ngsgd --help` answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.console import Parser, run_guarded, version
from ngsgd.errors import EXIT_OK, ConfigError

_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, the shell's own convention


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    with contextlib.suppress(ValueError, AttributeError):  # a captured stream cannot be reconfigured, and need not be
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        code = run_guarded(lambda: _dispatch([word for word in arguments if word != "--debug"], debug), debug=debug)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader has gone (`| head`); what is still buffered must not raise again when the interpreter ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code


def _dispatch(arguments: list[str], debug: bool) -> int:
    from launcher import help as texts

    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help", "help"):
        print(texts.top(), end="")
        return EXIT_OK
    if command == "--version":
        print(f"ngsgd {version('ngsgd')}")
        return EXIT_OK
    if command == "train" or command in ("-sc", "--shell-completion"):
        from launcher import hydra_app

        if command == "train" and ("--help" in rest or "-h" in rest):
            print(texts.train(), end="")
            return EXIT_OK
        return hydra_app.train(rest, debug=debug) if command == "train" else hydra_app.complete(rest)
    if command in texts.COMMANDS:
        return _COMMANDS[command](rest)
    near = difflib.get_close_matches(command, texts.COMMANDS, n=1)
    hint = f"Did you mean ngsgd {near[0]}?" if near else f"Choose one of {', '.join(texts.COMMANDS)}; see ngsgd --help."
    raise ConfigError(f"{command!r} is not a command. {hint}" if command else "No command was given. " + hint)


def _resume(arguments: list[str]) -> int:
    run_dir, quiet = _run_arguments("resume", arguments)
    from launcher import train as service

    return service.resume(run_dir, quiet=quiet)


def _decode(arguments: list[str]) -> int:
    run_dir, quiet = _run_arguments("decode", arguments)
    from launcher import train as service

    return service.decode(run_dir, quiet=quiet)


def _align(arguments: list[str]) -> int:
    from launcher import align

    return align.command(arguments)


def _ui(arguments: list[str]) -> int:
    parser = Parser("ui")
    parser.add_argument("output_dir", nargs="?", default="runs", help="holds mlflow.db (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=int, default=5000, help="default: %(default)s")
    options = parser.parse_args(arguments)
    from launcher import ui

    return ui.serve(Path(options.output_dir), host=options.host, port=options.port)


def _plan(arguments: list[str]) -> int:
    from launcher import plan

    return plan.command(arguments)


def _simulate(arguments: list[str]) -> int:
    from launcher import simulate

    return simulate.command(arguments)


def _tune(arguments: list[str]) -> int:
    from launcher import tune

    return tune.command(arguments)


def _info(arguments: list[str]) -> int:
    parser = Parser("info")
    parser.add_argument("run", nargs="?", help="a run folder, or its name under runs/; or a folder of examples, runs/data/egs-...")
    run = parser.parse_args(arguments).run
    from launcher import info

    if run and (Path(run) / "info.json").is_file():
        lines = info.describe_examples(Path(run))
    else:
        lines = info.describe_run(find_run(run)) if run else info.versions()
    print("\n".join(lines))
    return EXIT_OK


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "resume": _resume, "decode": _decode, "align": _align, "plan": _plan, "simulate": _simulate, "tune": _tune, "ui": _ui,
    "info": _info}


def _run_arguments(command: str, arguments: list[str]) -> tuple[Path, bool]:
    parser = Parser(command)
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument("--quiet", "-q", action="store_true", help="only incidents and the result")
    options = parser.parse_args(arguments)
    return find_run(options.run), options.quiet


def find_run(run: str) -> Path:
    """The folder of a run given as a path, or by its name under runs/."""
    for folder in (Path(run), Path("runs") / run):
        if (folder / "config.yaml").is_file():
            return folder.resolve()
    existing = [folder.parent.name for folder in Path("runs").glob("*/config.yaml")]
    near = difflib.get_close_matches(Path(run).name, existing, n=1)
    hint = f"Did you mean {Path('runs') / near[0]}?" if near else "Give the folder that ngsgd train printed at its end."
    raise ConfigError(f"{run} is not a run folder (it has no config.yaml). {hint}")
