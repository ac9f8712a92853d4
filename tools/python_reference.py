"""Entries of the Python reference: signature, public methods and first sentence of each name.

A page has a heading `### ngsgd.package.Name` for every entry. `python -m tools.reference
docs/reference` writes the text below the heading. The site shows the complete docstring in its
place (docs/hooks.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"^### (ngsgd\.[\w.]+)\n((?!#).*\n)*", re.MULTILINE)
# a section of a run's configuration has more fields; docs/reference/settings.md lists them
_MAX_PARAMETERS = 30
_MAX_KEYS = 30


def pages(folder: Path) -> dict[str, str]:
    """Return the current text of each page of the Python reference by its path below `folder`."""
    found = [folder / "python.md", *sorted((folder / "python").glob("*.md"))]
    return {page.relative_to(folder).as_posix():
            ENTRY.sub(lambda one: entry(one[1]), page.read_text(encoding="utf-8")).rstrip() + "\n" for page in found}


def entry(path: str) -> str:
    """Return heading, signatures and first sentence of an exported name."""
    package, _, name = path.rpartition(".")
    # a function may have the name of its module
    module = importlib.import_module(package)
    found = getattr(module, name) if hasattr(module, name) else importlib.import_module(path)
    if not callable(found) and not inspect.ismodule(found):
        return f"### {path}\n\n{_filled(_of_value(found))}\n\n"
    about = inspect.getdoc(found) or ""
    code = "\n".join(_signatures(path.rpartition(".")[2], found))
    return f"### {path}\n\n```text\n{code}\n```\n\n{_filled(about.partition(chr(10) * 2)[0])}\n\n"


def _signatures(name: str, found: Any) -> list[str]:
    """The call of a function or class, and those of its public methods or functions."""
    if inspect.ismodule(found):
        return [_call(key, value) for key, value in vars(found).items() if not key.startswith("_")
                and inspect.isfunction(value) and value.__module__ == found.__name__]
    lines = [_call(name, found)]
    if inspect.isclass(found):
        bases = [base for base in found.__mro__[1:] if base.__module__.startswith("ngsgd.")]
        own = {key: getattr(value, "__func__", value) for key, value in vars(found).items()
               if not key.startswith("_") and not any(hasattr(base, key) for base in bases)}
        # methods without docstring belong to an interface that a base documents
        lines += [_call(key, value, ".") for key, value in own.items() if inspect.isfunction(value) and value.__doc__]
        lines += [f"(subclass of {base.__name__})" for base in bases[:1] if not base.__name__.startswith("_")]
    return lines


def _call(name: str, called: Callable[..., Any], prefix: str = "") -> str:
    try:
        signature = inspect.signature(called)
    except ValueError:
        # of exceptions, whose constructor is not written in Python
        return f"{prefix}{name}(...)"
    parameters = [one.replace(annotation=inspect.Parameter.empty, default=_plain(one.default))
                  for key, one in signature.parameters.items() if key not in ("self", "cls")]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    if len(parameters) > _MAX_PARAMETERS:
        shown = "(...)"
    return textwrap.fill(f"{prefix}{name}{shown}", 96, subsequent_indent="    ", break_long_words=False,
                         break_on_hyphens=False)


def _plain(default: Any) -> Any:
    """A default that is printed without an address."""
    if default is inspect.Parameter.empty or not (callable(default) or repr(default).startswith("<") or " at 0x" in repr(default)):
        return default
    return _Shown(getattr(default, "__name__", "..."))


class _Shown(str):
    def __repr__(self) -> str:
        return str(self)


def _of_value(value: Any) -> str:
    keys = list(value) if isinstance(value, Mapping | tuple | list | frozenset) else []
    if not keys:
        return f"Constant: `{value!r}`."
    if len(keys) > _MAX_KEYS or not all(isinstance(key, str) for key in keys):
        return f"Constant of type `{type(value).__name__}` with {len(keys)} entries."
    return "Constant with the entries " + ", ".join(f"`{key}`" for key in keys) + "."


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)
