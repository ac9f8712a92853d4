"""Wall time of `ngsgd --help` and other commands that must answer at once; print medians.

    python -m benchmarks.command_line [--repeats N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

# name -> arguments, and the line that a shell completes
_COMMANDS = {
    "ngsgd --help": (["--help"], ""),
    "ngsgd train --help": (["train", "--help"], ""),
    "ngsgd train --help optimizer": (["train", "--help", "optimizer"], ""),
    "ngsgd settings lr": (["settings", "lr"], ""),
    "completion of a command": (["completion", "--words"], "ngsgd re"),
    "completion of a setting": (["completion", "--words"], "ngsgd train schedule.l"),
    "completion of a flag": (["completion", "--words"], "ngsgd decode --"),
}


def seconds(arguments: list[str], line: str) -> float:
    """Return the wall time of one command in seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ngsgd", *arguments], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "COMP_LINE": line})
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each command (default: %(default)s)")
    options = parser.parse_args()
    print(f"median of {options.repeats}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, (arguments, line) in _COMMANDS.items():
        times = [seconds(arguments, line) for _ in range(options.repeats)]
        print(f"{name:30} {statistics.median(times):.3f} s")


if __name__ == "__main__":
    main()
