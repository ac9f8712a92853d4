"""Run pytest in several processes at once, each with its part of the test files.

    python -m tests.parallel --processes 2 -m "not slow"

Arguments that are not `--processes` go to pytest.  `tests/tiers.py` selects the tests of each part.  The processes are plain ones
without a plugin between them, because tests fork, send signals and use their standard streams.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_NO_TESTS = 5   # pytest's exit code; another part may have some
_PROGRESS_INTERVAL_S = 60.0


def run(processes: int, arguments: Sequence[str]) -> int:
    """Run all parts and print the output of each when it ends; the worst exit code."""
    with tempfile.TemporaryDirectory(prefix="ngsgd-tests-") as folder:
        logs = [Path(folder) / f"part-{part}.log" for part in range(1, processes + 1)]
        running: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for part, log in enumerate(logs, start=1):
                command = [sys.executable, "-m", "pytest", f"--part={part}/{processes}", *arguments]
                with log.open("wb") as output:
                    running[part] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            return _wait(running, logs)
        except KeyboardInterrupt:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for process in running.values():
                process.wait()
            for log in logs:
                print(log.read_text(errors="replace")[-2000:])
            return 130


def _wait(running: dict[int, subprocess.Popen[bytes]], logs: Sequence[Path]) -> int:
    codes: list[int] = []
    reported_s = time.monotonic()
    while running:
        time.sleep(0.2)
        for part, process in list(running.items()):
            if process.poll() is not None:
                del running[part]
                codes.append(process.returncode)
                print(f"===== part {part} of {len(logs)}: exit code {process.returncode} =====")
                print(logs[part - 1].read_text(errors="replace"), flush=True)
        if running and time.monotonic() - reported_s > _PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            print(", ".join(f"part {part}: {_percent(logs[part - 1])}" for part in running), flush=True)
    if all(code == _NO_TESTS for code in codes):
        return _NO_TESTS
    # a negative code is a signal
    return max(abs(code) for code in codes if code != _NO_TESTS)


def _percent(log: Path) -> str:
    found = re.findall(r"\[ *(\d+)%\]", log.read_text(errors="replace"))
    return f"{found[-1]} %" if found else "0 %"


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--processes", type=int, default=2)
    options, arguments = parser.parse_known_args()
    return run(options.processes, arguments)


if __name__ == "__main__":
    sys.exit(main())
