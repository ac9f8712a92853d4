"""The reference pages that are made from the code: `python -m ngsgd.launcher.reference docs/reference` writes them.

They are kept in the repository, so that a change of an option is seen as a change of a page; a test compares.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ngsgd import errors
from ngsgd.config import REMOVED, RENAMED
from ngsgd.launcher import cli
from ngsgd.launcher import help as texts
from ngsgd.launcher.config import compose, describe


def pages() -> dict[str, str]:
    """File name -> its text."""
    return {"settings.md": "\n".join(settings()), "commands.md": "\n".join(commands()), "errors.md": "\n".join(error_codes())}


def settings() -> Iterator[str]:
    """Every option with its default, its values and its help text."""
    yield "# Settings\n"
    yield ("Made from `ngsgd/config` by `make reference`. On the command line: `ngsgd train "
           "KEY=VALUE`; "
           "`ngsgd settings PATTERN` prints the same. Learning rates are per frame, on the "
           "objective function summed over "
           "the minibatch; section numbers are those of arXiv 1410.7455. An option that is given "
           "and not used, by the "
           "column `used with`, is an error.\n")
    yield "## Groups\n"
    yield "A group sets several of the options below: `ngsgd train GROUP=CHOICE`.\n"
    yield "| group | choices |\n|---|---|"
    for group, choices in compose.groups().items():
        yield f"| `{group}` | {', '.join(f'`{choice}`' for choice in choices)} |"
    for section, found in itertools.groupby(describe.options(), key=lambda one: one.section):
        title = f"{section}\n\n{_cell(describe.section_help(section))}" if section else "The run itself"
        yield f"\n## {title}\n"
        yield "| option | default | values | used with | |\n|---|---|---|---|---|"
        for one in found:
            yield (f"| `{one.path}` | `{one.default}` | {_cell(one.values)} | {_cell(one.used)} | "
                   f"{_cell(one.about)} |")
    yield "\n## Old names\n"
    yield "Options of earlier versions; the old name still works and is reported.\n"
    yield "| old | new |\n|---|---|"
    for old, new in RENAMED.items():
        if new not in REMOVED:
            yield f"| `{old}` | `{new}` |"
    yield "\n## Removed options\n"
    yield "These are constants now. Files that set the constant still load; another value is an error.\n"
    yield "| option | constant |\n|---|---|"
    for path, removed in REMOVED.items():
        yield f"| `{path}` | `{str(removed.value).lower()}` |"
    yield ""


def _cell(text: str) -> str:
    # a bar would end the cell, and <...> is a tag to a browser
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def commands() -> Iterator[str]:
    """What each command says of itself."""
    yield "# Commands\n"
    yield "Made from the commands' own `--help` by `make reference`.\n"
    yield "```text\n" + texts.top().rstrip() + "\n```"
    for command in texts.COMMANDS:
        yield f"\n## ngsgd {command}\n"
        yield "```text\n" + help_of(command).rstrip() + "\n```"
    yield ""


def help_of(command: str) -> str:
    """As on a terminal of 110 columns, without what belongs to this machine."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            cli.main([command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return said.getvalue()


def error_codes() -> Iterator[str]:
    """The error tree with its exit codes."""
    yield "# Errors and exit codes\n"
    yield ("Made from `ngsgd/errors.py` by `make reference`. Every error is a sentence on stderr "
           "beginning with `ngsgd:` that says "
           "what to do next; `--debug` adds the traceback. Scripts can rely on the codes.\n")
    yield "| exit code | error | meaning |\n|---|---|---|"
    yield "| 0 | | all is well; for `ngsgd doctor`: nothing fails |"
    tree = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.NgsgdError)]
    for kind in sorted(tree, key=lambda kind: (kind.exit_code, kind.__name__)):
        about = (inspect.getdoc(kind) or "").partition("\n")[0]
        yield f"| {kind.exit_code} | `{kind.__name__}` | {_cell(about)} |"
    yield "| 141 | | the reader of a pipe went away (`ngsgd ... \\| head`) |"
    yield ""


def main(folder: Path) -> None:
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
