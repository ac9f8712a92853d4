"""`ngsgd settings [PATTERN]`: the options of a run with their defaults, ranges and help texts."""

from __future__ import annotations

import fnmatch
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.config import describe
from ngsgd.launcher.config.describe import Described
from ngsgd.launcher.console import Parser

_WIDEST = 110


def command(arguments: Sequence[str]) -> int:
    """Print the options that a pattern selects."""
    parser = Parser("settings")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="",
                        help="a section (optimizer), part of a name (lr), a word of the help text, or a shell pattern "
                             "(schedule.lr*); without it, all options")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(list(arguments))
    found = matching(chosen.pattern)
    if not found:
        raise ConfigError(f"No option matches {chosen.pattern!r}; ngsgd settings lists all of them.")
    print(json.dumps([asdict(one) for one in found], indent=1) if chosen.json else text(found))
    return EXIT_OK


def matching(pattern: str) -> list[Described]:
    """Return the options of a section, those whose name matches, or those whose help text does."""
    every = describe.options()
    if pattern in {one.section for one in every if one.section}:
        return [one for one in every if one.section == pattern or one.section.startswith(f"{pattern}.")]
    wanted = pattern.lower()
    if any(sign in wanted for sign in "*?["):
        return [one for one in every if fnmatch.fnmatchcase(one.path, wanted)]
    by_name = [one for one in every if wanted in one.path]
    return by_name or [one for one in every if wanted in one.help.lower()]


def text(found: Sequence[Described]) -> str:
    """Return a paragraph per option, as wide as the terminal."""
    width = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    lines: list[str] = []
    section: str | None = None
    for one in found:
        if one.section != section:
            section = one.section
            title = f"{section}: {describe.section_help(section)}" if section else "the run"
            lines += ["", *textwrap.wrap(title, width)]
        lines.append(f"  {one.path}={one.default}" if len(one.default) < 40 else f"  {one.path}")
        about = [one.about, f"values: {one.values}"]
        about += [f"default: {one.default}"] if len(one.default) >= 40 else []
        about += [f"used with {one.used}"] if one.used else []
        for part in about:
            lines += textwrap.wrap(part, width, initial_indent="      ", subsequent_indent="      ",
                                   break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).lstrip("\n")
