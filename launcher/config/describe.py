"""Descriptions of options for `--help`, `ngsgd settings` and the reference, from their metadata."""

from __future__ import annotations

import fnmatch
import operator
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ngsgd.config import METHODS, RunConfig, choices_of, types_of
from ngsgd.config.option import shown
from ngsgd.config.other_names import instead_of

_TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "true or false",
          "tuple[float, ...]": "list of numbers", "tuple[str, ...]": "list of names"}
# columns of a text
_WIDEST = 100


@dataclass(frozen=True)
class Described:
    path: str
    help: str
    default: str
    # the choices, or the type with its range
    values: str
    # the words that are allowed after =; empty: any value of the type
    choices: tuple[str, ...]
    unit: str
    # the condition under which a run uses the option; empty: always
    used: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def about(self) -> str:
        return f"{self.help} [{self.unit}]" if self.unit else self.help


def options() -> list[Described]:
    return list(_of_section(RunConfig(), ""))


def section_help(name: str) -> str:
    """Return the description of a section, such as tune.proxy."""
    return " ".join((operator.attrgetter(name)(RunConfig()).__doc__ or "").split())


def _of_section(section: Any, prefix: str) -> Iterator[Described]:
    for spec in fields(section):
        value, path, data = getattr(section, spec.name), f"{prefix}{spec.name}", spec.metadata
        if is_dataclass(value):
            yield from _of_section(value, f"{path}.")
        else:
            yield Described(path, data["help"], _default(data), _values(type(section), spec.name, data),
                            choices_of(type(section), spec.name) or (("true", "false") if isinstance(value, bool) else ()),
                            data["unit"], _used(data["used"]))


def _default(metadata: Any) -> str:
    kinds: dict[str, list[str]] = {}
    for kind, other in metadata["default_of_kind"].items():
        if other != metadata["default"]:
            kinds.setdefault(shown(other), []).append(kind)
    others = [f"{', '.join(names)}: {other}" for other, names in kinds.items()]
    return "; ".join([shown(metadata["default"]), *others])


def _values(section: type[Any], name: str, metadata: Any) -> str:
    if choices := choices_of(section, name):
        return ", ".join(choices)
    kind = types_of(section)[name]
    kind_text = _TYPES.get(getattr(kind, "__name__", ""), _TYPES.get(str(kind), "mapping"))
    low, high, above = metadata["low"], metadata["high"], metadata["above"]
    limits = [f"at least {low:g}"] if low is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    return ", ".join([kind_text, *limits])


def _used(condition: str) -> str:
    found = []
    for term in filter(None, condition.split(" & ")):
        name, _, wanted = term.lstrip("!").partition("=")
        kinds = wanted.split("|")
        if len([kind for kind in kinds if kind in METHODS]) > len(METHODS) // 2:
            others = [kind for kind in ("ngsgd", "sgd", *METHODS) if kind not in kinds]
            found.append(f"any {name} except {', '.join(others)}")
        elif wanted:
            found.append(f"{name} {', '.join(kinds)}")
        else:
            found.append(f"{'no ' if term.startswith('!') else ''}{name}")
    return " and ".join(found)


def in_section(name: str) -> list[Described]:
    """Return the options of a section and of the sections in it."""
    return [one for one in options() if f"{one.path}.".startswith(f"{name}.") and one.path != name]


def matching(pattern: str) -> list[Described]:
    """Return the options that a pattern selects, the best matches first.

    It is a section; or a shell pattern of names; or part of a name, a word of the help text, a
    default or value, or the option's name in another trainer.
    """
    every = options()
    if pattern in {one.section for one in every if one.section}:
        return in_section(pattern)
    wanted = pattern.lower()
    if any(sign in wanted for sign in "*?["):
        return [one for one in every if fnmatch.fnmatchcase(one.path, wanted)]
    same = [one for one in every if one.path == instead_of(wanted)]
    by_name = [one for one in every if wanted in one.path and one not in same]
    word = re.compile(rf"(?<![\w.]){re.escape(wanted)}(?![\w.])", re.IGNORECASE)
    by_text = [one for one in every if word.search(f"{one.about} {one.default} {one.values}")]
    return [*same, *by_name, *(one for one in by_text if one not in same and one not in by_name)]


def text(found: Sequence[Described]) -> str:
    """Return a paragraph per option, as wide as the terminal."""
    width = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    lines: list[str] = []
    section: str | None = None
    for one in found:
        if one.section != section:
            section = one.section
            title = f"{section}: {section_help(section)}" if section else "the run"
            lines += ["", *textwrap.wrap(title, width)]
        lines.append(f"  {one.path}={one.default}" if len(one.default) < 40 else f"  {one.path}")
        about = [one.about, f"values: {one.values}"]
        about += [f"default: {one.default}"] if len(one.default) >= 40 else []
        about += [f"used with {one.used}"] if one.used else []
        for part in about:
            lines += textwrap.wrap(part, width, initial_indent="      ", subsequent_indent="      ",
                                   break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).lstrip("\n")
