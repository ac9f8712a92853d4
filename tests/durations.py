"""Measured durations of test files, which balance the parts that run in parallel.

    make test-all ARGS="--cpu-report times.jsonl"
    python -m tests.durations times.jsonl           # writes tests/durations.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
# files that take less time than this have the usual durations
_WORTH_S = 2.0


def known() -> dict[str, dict[str, float]]:
    """Return file -> mean seconds of a test without a tier marker, and of one with a marker."""
    found: dict[str, dict[str, float]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def table(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the means of the lines that `--cpu-report` wrote."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        kind = "marked" if line["marks"] else "unmarked"
        seconds[line["test"].partition("::")[0]][kind].append(line["clock_s"])
    return {file: {kind: round(sum(values) / len(values), 3) for kind, values in sorted(kinds.items())}
            for file, kinds in sorted(seconds.items()) if sum(map(sum, kinds.values())) > _WORTH_S}


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8") as report:
        TABLE.write_text(json.dumps(table(map(json.loads, report)), indent=1) + "\n", encoding="utf-8")
