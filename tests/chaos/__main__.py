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
from pathlib import Path

from tests.chaos.cases import BEYOND, MATRIX, Seen
from tests.chaos.trials import try_case

_BEGIN, _END = "<!-- table of make chaos -->", "<!-- end of the table -->"
_TITLE = ("| who | when | how | outcome | recovery s | bitwise identical |", "|---|---|---|---|---|---|")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", type=Path, help="file whose table is to be replaced")
    asked = parser.parse_args()
    chosen = [case for case in (*MATRIX, *BEYOND) if asked.only in str(case)]
    began, rows, failed = time.monotonic(), list(_TITLE), []
    for case in chosen:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            try:
                seen = try_case(case, Path(folder) / "run")
            except Exception as error:   # whatever it is, the other cases are worth running
                first_line = f"{type(error).__name__}: {error}".splitlines()[0]
                seen = Seen(f"**Failed: {first_line[:200]}**", False)
                failed.append(str(case))
        recovery = "" if seen.recovery_s is None else f"{seen.recovery_s:.2f}"
        how = f"{case.how} ({case.setting})" if case.setting else case.how
        cells = (case.who, case.when, how, seen.outcome, recovery, "yes" if seen.is_equal else "no")
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    summary = f"{len(chosen) - len(failed)} of {len(chosen)} cases passed, {time.monotonic() - began:.0f} s."
    print(summary, *failed, sep="\n")
    if asked.write:
        before, _, rest = asked.write.read_text().partition(_BEGIN)
        table = "\n".join([_BEGIN, "", *rows, "", summary, "", _END])
        asked.write.write_text(before + table + rest.partition(_END)[2])
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
