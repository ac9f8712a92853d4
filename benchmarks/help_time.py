"""Time of `ngsgd COMMAND --help`: wall-clock seconds from the start of the process to its end.

    python benchmarks/help_time.py [REPEATS]

Run it on an idle machine.  The first call of each command, which may read from the disk, is
skipped.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from ngsgd.launcher.registry import COMMANDS


def seconds(words: list[str], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - began)
    return found[1:]


def main(repeats: int) -> None:
    program = str(Path(sys.executable).parent / "ngsgd")
    for command in ("", *(one.name for one in COMMANDS)):
        found = seconds([program, *([command] if command else []), "--help"], repeats)
        print(f"{command or '(none)':10} median {statistics.median(found):.3f} s, max {max(found):.3f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
