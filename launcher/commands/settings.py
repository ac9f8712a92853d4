"""`ngsgd settings [PATTERN]`: the options of a run with their defaults, ranges and help texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.config import describe
from ngsgd.launcher.arguments import Parser


def command(arguments: Sequence[str]) -> int:
    """Print the options that a pattern selects."""
    parser = Parser("settings")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="",
                        help="a section (optimizer), part of a name (lr), a word of the help text, or a shell pattern "
                             "(schedule.lr*); without it, all options")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(list(arguments))
    found = describe.matching(chosen.pattern)
    if not found:
        raise ConfigError(f"No option matches {chosen.pattern!r}; ngsgd settings lists all of them.")
    print(json.dumps([asdict(one) for one in found], indent=1) if chosen.json else describe.text(found))
    return EXIT_OK
