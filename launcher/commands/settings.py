"""`ngsgd settings [PATTERN]`: the options of a run with their defaults, ranges and help texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.config import describe


def command(arguments: Sequence[str]) -> int:
    """Print the options that a pattern selects."""
    parser = Parser("settings")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="",
                        help="section (optimizer); part of a name (lr); name in another trainer "
                             "(batch_size); word of a help text, default or value (bmuf); shell "
                             "pattern (schedule.lr*) (default: all settings)")
    parser.add_argument("--json", action="store_true", help=JSON)
    chosen = parser.parse_args(list(arguments))
    found = describe.matching(chosen.pattern)
    if not found:
        raise ConfigError(f"no setting matches {chosen.pattern!r}; list all of them with: ngsgd "
                          "settings")
    print(json.dumps([asdict(one) for one in found], indent=1) if chosen.json else describe.text(found))
    return EXIT_OK
