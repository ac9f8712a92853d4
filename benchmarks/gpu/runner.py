"""Run parts in separate processes, one after another, and keep their results in one JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import machine
from benchmarks.gpu.parts import PARTS

RESULTS = Path(__file__).parent / "results"
_FORMAT = 1
# with less time left, no part is started
_LEAST_S = 5.0
# for a process to exit after SIGTERM
_GRACE_S = 8.0
# output of a crashed process that is kept
_TAIL = 2000
# concurrent parts: on a CPU their timings have no meaning
_DRY_PROCESSES = 2


@dataclass
class _Run:
    """One call of the program: its file, and the time that is left."""

    path: Path
    dry_run: bool
    deadline: float
    kept: dict[str, Any]
    # process groups to end at Ctrl-C
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    is_stopped: bool = False
    # of `kept` and its file
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(
    names: Sequence[str], folder: Path, *, dry_run: bool, seconds: float, again: bool = False
) -> int:
    """Run parts and write the JSON file after each of them; returns 1 where one did not pass, else
    0.

    Args:
        names: the parts, in the order in which they run.
        folder: of the JSON file.
        dry_run: small sizes on the CPU.
        seconds: limit on all parts together; parts that do not fit are recorded as not run.
        again: also run parts whose results are in the file already.
    """
    if not dry_run and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no GPU here; give --dry-run for the CPU, or install a torch with CUDA.",
            file=sys.stderr,
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    kept, path = _opened(folder, dry_run=dry_run)
    this = _Run(path, dry_run, time.monotonic() + seconds, kept)
    wanted = [name for name in names if again or not is_finished(kept, name)]
    for name in names:
        if name not in wanted:
            print(f"{name:12} finished before, skipped; --only {name} runs it again", flush=True)
    # the longest ones first if two run at a time
    order = reversed(wanted) if dry_run else wanted
    with ThreadPoolExecutor(_DRY_PROCESSES if dry_run else 1) as pool:
        try:
            list(pool.map(lambda name: _run_part(this, name), order))
        except KeyboardInterrupt:
            # a second Ctrl-C would leave processes behind
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            this.is_stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in this.running:
                _end(process)
    if this.is_stopped:
        print(
            f"stopped; finished parts are in {path}, and the same command continues",
            file=sys.stderr,
        )
        return 130
    print(f"results: {path}")
    bad = [
        name
        for name in names
        if kept["parts"].get(name, {}).get("status") not in ("passed", "skipped")
    ]
    if bad:
        print(f"not passed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def part_key(name: str) -> str:
    """Digest of the code of a part and of the library: results with the same key need not be
    measured again.
    """
    own = Path(__file__).parent
    files = [*sorted(own.glob("*.py")), own / "parts" / f"{name}.py"]
    shared = [path for path in files if path.name not in ("page.py", "runner.py", "__main__.py")]
    return machine.digest(shared)[:12] + machine.library_digest()[:12]


def is_finished(kept: dict[str, Any], name: str) -> bool:
    """Whether the file has a passed result of this part with the same code."""
    found = kept["parts"].get(name, {})
    return bool(found.get("status") == "passed" and found.get("key") == part_key(name))


def _opened(folder: Path, *, dry_run: bool) -> tuple[dict[str, Any], Path]:
    """The results so far of this device, torch and library."""
    about = machine.describe(dry_run=dry_run)
    device = (
        "dry-run" if dry_run else re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    )
    version = torch.__version__.partition("+")[0]
    path = folder / f"{device}-torch{version}-{machine.library_digest()[:8]}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.get("format") == _FORMAT and isinstance(kept.get("parts"), dict):
            return {**kept, "machine": about}, path
    return {"format": _FORMAT, "dry_run": dry_run, "machine": about, "parts": {}}, path


def _run_part(this: _Run, name: str) -> None:
    part = PARTS[name]
    left_s = this.deadline - time.monotonic()
    if left_s < _LEAST_S:
        found: dict[str, Any] = {"status": "not run", "message": "no time was left (--minutes)"}
        # an earlier result has more information
        if name in this.kept["parts"]:
            return
    else:
        found = _in_process(
            this, name, min(part.dry_limit_s if this.dry_run else part.limit_s, left_s)
        )
    if this.is_stopped:
        return
    with this.lock:
        this.kept["parts"][name] = {
            **found,
            "key": part_key(name),
            "commit": machine.commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        _write(this.path, this.kept)
    counts = [
        f"{sum(row['status'] == status for row in found.get('cases', []))} {status}"
        for status in ("passed", "failed", "skipped")
    ]
    print(
        f"{name:12} {found['status']:10} {found.get('wall_s', 0.0):6.1f} s   {', '.join(counts)}   {found.get('message', '')}",
        flush=True,
    )
    for row in found.get("cases", []):
        if row["status"] == "failed":
            print(f"{'':12} failed: {row['case']}: {row.get('message', '')}", flush=True)


def _in_process(this: _Run, name: str, limit_s: float) -> dict[str, Any]:
    """Run the part in a process and keep its recorded results, however it ends."""
    with tempfile.TemporaryDirectory(prefix="ngsgd-gpu-") as scratch:
        rows, log = Path(scratch) / "rows.jsonl", Path(scratch) / "log.txt"
        words = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--output", str(rows)]
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                words + ["--dry-run"] * this.dry_run,
                cwd=machine.ROOT,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
            this.running.append(process)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            _end(process)
        cases = (
            [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
            if rows.exists()
            else []
        )
        found = {"wall_s": round(time.monotonic() - start, 1), "cases": cases}
        if code == 0 and cases:
            return {"status": _status([row["status"] for row in cases]), **found}
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        after = f"after {cases[-1]['case']!r}" if cases else "before its first case"
        ended = f"took longer than {limit_s:.0f} s" if code is None else f"ended with code {code}"
        return {
            "status": "timed out" if code is None else "crashed",
            "message": f"{ended}, {after}",
            "output": tail,
            **found,
        }


def _status(of_cases: Sequence[str]) -> str:
    if "failed" in of_cases:
        return "failed"
    return "passed" if "passed" in of_cases else "skipped"


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(machine.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PYTHONPATH": path,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all remaining processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(path: Path, kept: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
