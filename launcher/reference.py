"""The reference pages that are made from the code: `python -m ngsgd.launcher.reference docs/reference` writes them.

They are kept in the repository, so that a change of an option is seen as a change of a page; a test compares.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ngsgd import config as knobs
from ngsgd import errors
from ngsgd.config import RunConfig
from ngsgd.launcher import cli
from ngsgd.launcher import help as texts
from ngsgd.launcher.config import compose

_TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}


def pages() -> dict[str, str]:
    """File name -> its text."""
    return {"settings.md": "\n".join(settings()), "commands.md": "\n".join(commands()), "errors.md": "\n".join(error_codes())}


def settings() -> Iterator[str]:
    """Every option with its default, its range and what the source says of it."""
    yield "# Settings\n"
    yield ("Made from `ngsgd/config.py` by `make reference`. On the command line: `ngsgd train KEY=VALUE`. Learning rates are per "
           "frame, on the objective summed over the minibatch; section numbers are those of arXiv 1410.7455. A setting that is "
           "given and not used, by the column `used with`, is an error.\n")
    yield "## Groups\n"
    yield "A group sets several of the options below: `ngsgd train GROUP=CHOICE`.\n"
    yield "| group | choices |\n|---|---|"
    for group, choices in compose.groups().items():
        yield f"| `{group}` | {', '.join(f'`{choice}`' for choice in choices)} |"
    yield "\n## The run itself\n"
    comments = texts.knob_comments()
    yield from _table(RunConfig(), "", comments)
    yield from _sections(RunConfig(), "", comments)
    yield ""


def _sections(above: Any, prefix: str, comments: dict[str, str]) -> Iterator[str]:
    for spec in fields(above):
        section, name = getattr(above, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(section):
            about = (inspect.getdoc(type(section)) or "").replace("\n", " ").replace("  ", " ")
            yield f"\n## {name}\n\n{_cell(about)}\n"
            yield from _table(section, f"{name}.", comments)
            yield from _sections(section, f"{name}.", comments)


def _table(section: Any, prefix: str, comments: dict[str, str]) -> Iterator[str]:
    yield "| option | default | values | used with | |\n|---|---|---|---|---|"
    hints = typing.get_type_hints(type(section))
    for spec in fields(section):
        if not is_dataclass(hints[spec.name]):
            path, value = f"{prefix}{spec.name}", getattr(section, spec.name)
            allowed = _allowed(hints[spec.name], spec.metadata)
            default, used = _default(value, spec.metadata), _used(spec.metadata)
            yield f"| `{path}` | {default} | {allowed} | {used} | {_cell(comments.get(path, ''))} |"


def _default(value: Any, metadata: Mapping[str, Any]) -> str:
    """The default, and those of single kinds."""
    kinds: dict[str, list[str]] = {}
    for kind, other in metadata["of_kind"].items():
        if other != metadata["default"]:
            kinds.setdefault(_shown(other), []).append(kind)
    return "; ".join([f"`{_shown(value)}`", *(f"{', '.join(names)}: `{other}`" for other, names in kinds.items())])


def _used(metadata: Mapping[str, Any]) -> str:
    """The condition under which a run uses the setting, in words."""
    told = []
    for term in filter(None, metadata["used"].split(" & ")):
        name, _, wanted = term.lstrip("!").partition("=")
        kinds = wanted.split("|")
        if len(kinds) > len(knobs.METHODS) // 2:
            others = [kind for kind in knobs.METHODS if kind not in kinds]
            told.append(f"any `{name}` but {', '.join(['none', *others])}")
        elif wanted:
            told.append(f"`{name}` {', '.join(kinds)}")
        else:
            told.append(f"{'no ' if term.startswith('!') else ''}`{name}`")
    return " and ".join(told)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(list(value) if isinstance(value, tuple) else value)


def _allowed(kind: Any, allowed: Any) -> str:
    if allowed.get("one_of"):
        return ", ".join(f"`{value}`" for value in allowed["one_of"])
    name = _TYPES.get(getattr(kind, "__name__", ""), "list of numbers" if "tuple" in str(kind) else "mapping")
    low, high, above = allowed.get("low"), allowed.get("high"), allowed.get("above")
    limits = [f"at least {low:g}"] if low is not None else [f"above {above:g}"] if above is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    return ", ".join([name, *limits])


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
    return said.getvalue().replace(knobs.__file__ or "", "ngsgd/config.py")


def error_codes() -> Iterator[str]:
    """The error tree with its exit codes."""
    yield "# Errors and exit codes\n"
    yield ("Made from `ngsgd/errors.py` by `make reference`. Every error is a sentence on stderr beginning with `ngsgd:` that says "
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
