"""Run the complete fault matrix and print the outcome of each case.

    python -m tests.chaos [--only WORD] [--write FILE]

`--write` puts the table between the two marks of a file, such as
benchmarks/fault-matrix.md. Ends with code 1 if a case failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.cases import BEYOND, MATRIX, Case, Seen
from tests.chaos.trials import try_case

_BEGIN, _END = "<!-- table of make chaos -->", "<!-- end of the table -->"
_TITLE = ("| who | when | how | outcome | recovery s | bitwise identical |", "|---|---|---|---|---|---|")
_UNEQUAL = "Failed: "


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", type=Path, help="file whose table is to be replaced")
    asked = parser.parse_args()
    chosen = [case for case in (*MATRIX, *BEYOND) if asked.only in str(case)]
    began, rows, failed = time.monotonic(), list(_TITLE), []
    for case in chosen:
        row, is_fine = _try(case)
        print(row, flush=True)
        rows.append(row)
        failed += [] if is_fine else [str(case)]
    summary = f"{len(chosen) - len(failed)} of {len(chosen)} cases passed, {time.monotonic() - began:.0f} s."
    print(summary, *failed, sep="\n")
    if asked.write:
        _write(asked.write, [*rows, "", summary])
    return bool(failed)


def _try(case: Case) -> tuple[str, bool]:
    """A row of the table, and whether the case passed."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            seen = try_case(case, Path(folder) / "run")
        except Exception as error:   # whatever it is, the other cases are worth running
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            seen = Seen(f"**{_UNEQUAL}{first_line[:200]}**", False)
    return " ".join(_cells(case, seen)), not seen.outcome.startswith(f"**{_UNEQUAL}")


def _cells(case: Case, seen: Seen) -> Iterator[str]:
    recovery = "" if seen.recovery_s is None else f"{seen.recovery_s:.2f}"
    how = f"{case.how} ({case.setting})" if case.setting else case.how
    for cell in (case.who, case.when, how, seen.outcome, recovery, "yes" if seen.is_equal else "no"):
        yield f"| {cell}"
    yield "|"


def _write(path: Path, lines: list[str]) -> None:
    before, _, rest = path.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    path.write_text(before + "\n".join([_BEGIN, "", *lines, "", _END]) + after)


if __name__ == "__main__":
    sys.exit(main())
