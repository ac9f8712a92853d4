"""The reference pages written from the code: `python -m tools.reference docs/reference`.

They are kept in the repository, where a change of an option shows as a change of a page; a test
compares them with the code.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ngsgd import errors
from ngsgd.launcher import cli
from ngsgd.launcher import help as texts
from ngsgd.launcher.config import compose, describe
from ngsgd.launcher.registry import COMMANDS
from tools import python_reference


def pages() -> dict[str, str]:
    """Return the text of each file by name."""
    return {"settings.md": "\n".join(settings()), "commands.md": "\n".join(commands()), "errors.md": "\n".join(error_codes())}


def settings() -> Iterator[str]:
    """All settings with default, values, condition and help text."""
    yield "# Settings\n"
    yield _wrapped(
        "Every setting of `ngsgd train`, written as `ngsgd train KEY=VALUE`. `ngsgd settings "
        "PATTERN` searches this list, and "
        "`ngsgd train --help GROUP` prints one section. Learning rates are per frame, on the "
        "objective summed over the "
        "minibatch. Sections and equations in parentheses are those of arXiv 1410.7455. A "
        "setting that is given without "
        "effect, by the column *used with*, is an error. The page is written by `make "
        "reference` from `ngsgd/config`.\n")
    about = {one.path: one for one in describe.options()}
    yield "## Most used\n"
    yield textwrap.fill(
        ", ".join(f"[`{path}`](#{path})" for path in texts.MOST_USED) + ".", 100,
        break_long_words=False, break_on_hyphens=False)
    yield "\n## Groups\n"
    yield "A group sets several of the settings below: `ngsgd train GROUP=CHOICE`.\n"
    yield "| group | choices |\n|---|---|"
    for group, choices in compose.groups().items():
        yield f"| `{group}` | {', '.join(f'`{choice}`' for choice in choices)} |"
    for section, found in itertools.groupby(about.values(), key=lambda one: one.section):
        yield f"\n## {section or 'Run'}\n"
        if section:
            yield _wrapped(_cell(describe.section_help(section)))
        yield "| setting | default | values | used with | description |\n|---|---|---|---|---|"
        for one in found:
            yield (f"| `{one.path}` | `{one.default}` | {_cell(one.values)} | {_cell(one.used)} | "
                   f'<a id="{one.path}"></a>{_cell(one.about)} |')
    yield ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def _cell(text: str) -> str:
    # a bar would end the cell, and <...> is a tag to a browser
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def commands() -> Iterator[str]:
    """The help of every command, by group."""
    yield "# Commands\n"
    yield _wrapped(
        "The output of `--help` of every command, written by `make reference`. Exit codes are "
        "those of [errors.md](errors.md). "
        "Every command that prints a table also prints JSON with `--json`, and then nothing "
        "else on stdout.\n")
    yield "```text\n" + help_of().rstrip() + "\n```"
    for group, found in itertools.groupby(COMMANDS, key=lambda one: one.group):
        yield f"\n## {group}"
        for command in found:
            yield f"\n### ngsgd {command.name}\n"
            yield "```text\n" + help_of(command.name).rstrip() + "\n```"
    yield ""


def help_of(*command: str) -> str:
    """Return the help of a command, or of ngsgd, as on a terminal of 100 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cli.main([*command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return printed.getvalue()


def error_codes() -> Iterator[str]:
    """The error classes with their exit codes."""
    yield "# Errors and exit codes\n"
    yield _wrapped(
        "Every error is a message on stderr that begins with `ngsgd:` and ends with the next "
        "step. Several errors have a line "
        "each. `--debug` adds the traceback. Scripts can rely on the exit codes. [Wrong "
        "command lines](mistakes.md) lists "
        "common mistakes. The table is written by `make reference` from `ngsgd/errors.py`.\n")
    yield "| exit code | error | meaning |\n|---|---|---|"
    yield "| 0 | | success; for `ngsgd doctor`: no check failed |"
    tree = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.NgsgdError)]
    for kind in sorted(tree, key=lambda kind: (kind.exit_code, kind.__name__)):
        about = (inspect.getdoc(kind) or "").partition("\n")[0]
        yield f"| {kind.exit_code} | `{kind.__name__}` | {_cell(about)} |"
    yield ("| 1, 137, 143 | | The process was ended from outside: Ray ends it with 1 after the loss of its raylet, the system "
           "with 137 (SIGKILL, no memory). |")
    yield "| 141 | | the reader of a pipe ended (`ngsgd ... \\| head`) |"
    yield ""


def main(folder: Path) -> None:
    for name, text in {**pages(), **python_reference.pages(folder)}.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
