"""Run pytest in several processes at once, which share the test files.

    python -m tests.parallel --processes 2 -m "not slow"

Other arguments go to pytest. A process takes the next file when it has ended one
(`tests/tiers.py`). There is no plugin between the processes, because tests fork, send signals and
use their standard streams.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.tiers import LAST_RUN, summary

_NO_TESTS = 5   # pytest's exit code
_PROGRESS_INTERVAL_S = 60.0


def run(processes: int, arguments: Sequence[str]) -> int:
    """Run all processes and print the output of each when it ends; the worst exit code."""
    with tempfile.TemporaryDirectory(prefix="ngsgd-tests-") as folder:
        begun = Path(folder) / "begun"
        begun.mkdir()
        LAST_RUN.parent.mkdir(exist_ok=True)
        LAST_RUN.write_text("")
        command = [sys.executable, "-m", "pytest", f"--share={begun}", f"--cpu-report={LAST_RUN}", *arguments]
        logs = [Path(folder) / f"process-{number}.log" for number in range(1, processes + 1)]
        running: dict[Path, subprocess.Popen[bytes]] = {}
        try:
            for log in logs:
                with log.open("wb") as output:
                    running[log] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                                                    stdin=subprocess.DEVNULL)
            code = _wait(running, begun)
            print(summary(LAST_RUN), flush=True)
            return code
        except KeyboardInterrupt:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for process in running.values():
                process.wait()
            for log in logs:
                print(log.read_text(errors="replace")[-2000:])
            return 130


def _wait(running: dict[Path, subprocess.Popen[bytes]], begun: Path) -> int:
    codes: list[int] = []
    reported_s = time.monotonic()
    while running:
        time.sleep(0.2)
        for log, process in list(running.items()):
            if process.poll() is not None:
                del running[log]
                codes.append(process.returncode)
                print(f"===== {log.stem}: exit code {process.returncode} =====")
                print(log.read_text(errors="replace"), flush=True)
        if running and time.monotonic() - reported_s > _PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            print(f"{len(list(begun.iterdir()))} test files begun", flush=True)
    if all(code == _NO_TESTS for code in codes):
        return _NO_TESTS
    # a negative code is a signal
    return max(abs(code) for code in codes if code != _NO_TESTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--processes", type=int, default=2)
    options, others = parser.parse_known_args()
    sys.exit(run(options.processes, others))
