"""Commands that ngsgd prints, writes into files or documents, and the real parsers that judge them.

All commands in messages, help texts, scripts and pages are found in the sources and parsed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click

from ngsgd.launcher import arguments as arguments_module
from ngsgd.launcher import cli
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.sources import OURS
from ngsgd.launcher.registry import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
# for a value that the program puts in, which may be an integer or a name
VALUE = "8"
# shell, which tests execute
EXECUTED = ("launcher/schedulers/slurm.py",)
# of pages and help texts
_PLACEHOLDERS = {"GROUP": "optimizer", "FORMAT": "onnx", "N": VALUE}
_NAMES = '|'.join(one.name for one in COMMANDS)
_COMMAND = re.compile(rf"\b(?:ngsgd (?:{_NAMES})|ray (?:start|status|health-check|job submit)|mlflow server)\b")
# a command ends at shell operators, brackets, quotes, ends of clauses, and columns of a help text
_END = re.compile(r"[`|&<>()\[\]\"]| {2,}|\.\.\.|[.,;:](?=\s|$)| #|\*\*|'(?=[ .,;]|$)")
_SETTING = re.compile(r"[+~]?[a-z_]+([./][a-z_]+)*=.+")
_FLAG = re.compile(r"--?\w.*")
_ARGUMENT = re.compile(r"[+~]?[\w./]+=.*|[A-Z][A-Z_]*|.*[\d/:].*|\w+\.\w+")


@dataclass(frozen=True)
class Suggestion:
    where: str
    words: tuple[str, ...]

    def problem(self) -> str:
        """Why it cannot be given; empty if it can. Lower-case words at the end may be prose."""
        start = 2 + (self.words[0] == "ray" and self.words[1] == "job")
        sure = max((at + 1 for at, word in enumerate(self.words) if at >= start and not _is_plain(word)), default=start)
        if sure == start:
            return ""
        found = [rejection(list(self.words[:count])) for count in range(sure, len(self.words) + 1)]
        return "" if "" in found else f"{self.where}: {shlex.join(self.words[:sure])}: {found[0]}"


def suggestions(where: str, text: str) -> Iterator[Suggestion]:
    """The commands in a text, line by line."""
    for line in text.replace("\\\n", " ").splitlines():
        for found in _COMMAND.finditer("" if line.startswith("usage:") else line):
            rest = line[found.end():]
            end = _END.search(rest)
            more = rest[:end.start()] if end else rest
            yield Suggestion(where, tuple(_until_prose([*found[0].split(), *more.replace("'", "").split()])))


def _until_prose(words: list[str]) -> Iterator[str]:
    """The words up to the second one that is no flag and looks like no argument."""
    before = ""
    for at, word in enumerate(words):
        # the value of a flag, or a part of a command such as `tune run`
        if at > 2 and _is_plain(word) and not _FLAG.match(before):
            return
        yield word
        before = word


def _is_plain(word: str) -> bool:
    return not _FLAG.match(word) and not _ARGUMENT.fullmatch(word)


def in_python(path: Path) -> Iterator[Suggestion]:
    """The commands in strings of a module, but not in docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    skipped = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in skipped:
            yield from suggestions(f"{path.relative_to(ROOT)}:{node.lineno}", _text(node))


def _text(node: ast.expr) -> str:
    """A string with VALUE for everything that the program puts in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(VALUE if isinstance(part, ast.FormattedValue) else _text(part) for part in node.values)
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return ""
    return re.sub(r"\{\w*\}", VALUE, node.value.replace("{resume}", f"ngsgd resume {VALUE}"))


def rejection(words: list[str]) -> str:
    """The error of a command line by its own parser; empty if it can be given. Nothing is run."""
    try:
        return _of_ngsgd(words[1:]) if words[0] == "ngsgd" else _of_click(words)
    except click.ClickException as error:
        return error.format_message()


def _of_ngsgd(words: list[str]) -> str:
    said = io.StringIO()
    with contextlib.ExitStack() as patches:
        for method in ("parse_args", "parse_with_settings", "parse_intermixed_args"):
            patches.enter_context(mock.patch.object(Parser, method, _then_end(getattr(Parser, method))))
        # the record of the last error, for `ngsgd why`
        patches.enter_context(mock.patch("ngsgd.launcher.why.failed_commands.keep"))
        patches.enter_context(contextlib.redirect_stderr(said))
        patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
        code = cli.main([_PLACEHOLDERS.get(word, word) for word in words])
    return said.getvalue().strip() or (f"exit code {code}" if code else "") or _of_settings(words)


def _then_end(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parsed(parser: Parser, arguments: list[str], *others: str, **more: str) -> argparse.Namespace:
        options: argparse.Namespace = parse(parser, arguments, *others, **more)
        # parse_with_settings calls another of them
        if sys._getframe(1).f_code.co_filename != arguments_module.__file__:
            raise SystemExit(0)
        return options
    return parsed


def _of_settings(words: list[str]) -> str:
    settings = [word for word in words[1:] if _SETTING.fullmatch(word) and word.partition("=")[2] != VALUE
                # the name of a file, which is read
                and not word.startswith("+tuned=")]
    if words[0] not in ("train", "plan", "simulate", "align", "submit", "tune") or not settings:
        return ""
    try:
        list(compose.jobs_of_sweep(compose.normalized(settings, OURS), OURS)) if "-m" in words else compose.compose(settings)
    except Exception as error:
        return str(error)
    return ""


def _of_click(words: list[str]) -> str:
    """Of the programs of others; both have parsers by click."""
    with warnings.catch_warnings():
        # parts of Ray that ngsgd does not use
        warnings.simplefilter("ignore")
        command: Any = importlib.import_module({"ray": "ray.scripts.scripts", "mlflow": "mlflow.cli"}[words[0]]).cli
    rest = words[1:]
    while isinstance(command, click.Group):
        name, *rest = rest
        command = command.get_command(click.Context(command), name)
        if command is None:
            return f"{name} is not a command of {words[0]}"
    command.make_context(words[-1], rest)
    return ""


def modules(skip: tuple[str, ...] = EXECUTED) -> list[Path]:
    folders = [ROOT / "launcher", *(path for path in (ROOT / "ngsgd").iterdir() if path.is_dir() and not path.is_symlink())]
    found = sorted([*(ROOT / "ngsgd").glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])
    return [path for path in found if path.relative_to(ROOT).as_posix() not in skip]
