"""The recipe digits as a user runs it: `ngsgd train` over Ray, with 1, 2 and 4 workers that share
one GPU, and with a killed worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu import machine
from benchmarks.gpu.measurement import Failed, Measurement
from ngsgd.files import read_json_lines
from ngsgd.word_errors import WordErrors

_NEEDS = (
    "ray",
    "hydra",
    "safetensors",
    "kaldi_native_fbank",
    "kaldifst",
    "kaldi_decoder",
    "espeakng_loader",
    "psutil",
)
_SMALL = (
    "data.train_minutes=1",
    "data.valid_minutes=0.3",
    "data.test_minutes=0.3",
    "schedule.num_epochs=1",
    "egs.samples_per_iter=512",
)
# time limit of one run on a GPU; the limit of the part is less than all runs together
_LIMIT_S = 150.0
# a dry run shares its cores with other programs
_DRY_LIMIT_S = 900.0
_POLL_S = 0.2
# output lines of a failed run that are kept
_LAST = 8


def run(measurement: Measurement) -> None:
    with TemporaryDirectory() as folder:
        for num_workers in () if measurement.dry_run else (1, 2, 4):
            with measurement.case(f"{num_workers} workers") as figures:
                measurement.need(*_NEEDS)
                figures.update(_train(measurement, Path(folder), num_workers, kill=False))
        with measurement.case("2 workers, kill -9 of one of them") as figures:
            measurement.need(*_NEEDS)
            figures.update(_train(measurement, Path(folder), 2, kill=True))


def _train(
    measurement: Measurement, folder: Path, num_workers: int, *, kill: bool
) -> dict[str, Any]:
    """WER and seconds of a run; with `kill` a Ray worker is killed during the second outer
    iteration.
    """
    name = f"digits-{num_workers}{'-killed' * kill}"
    words = [
        sys.executable,
        "-m",
        "ngsgd",
        "train",
        "recipe=digits",
        "cluster=ray",
        f"cluster.num_workers={num_workers}",
        f"cluster.device={'cpu' if measurement.dry_run else 'cuda'}",
        f"name={name}",
        f"output_dir={folder / 'runs'}",
        f"data.cache_dir={folder / 'data'}",
        "tracking.kind=none",
        *(_SMALL if measurement.dry_run else ()),
    ]
    log = folder / f"{name}.log"
    start, limit_s = time.monotonic(), _DRY_LIMIT_S if measurement.dry_run else _LIMIT_S
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(words, cwd=machine.ROOT, stdout=output, stderr=output)
        killed = 0
        while process.poll() is None:
            if time.monotonic() - start > limit_s:
                process.terminate()
                process.wait(20.0)
                raise Failed(f"the run took longer than {limit_s:.0f} s; {_end_of(log)}")
            if kill and not killed and _num_outer_iterations(folder, name) >= 1:
                killed = _kill_worker(process.pid)
            time.sleep(_POLL_S)
    if process.returncode:
        raise Failed(f"exit code {process.returncode}: {_end_of(log)}")
    if kill and not killed:
        raise Failed("no Ray worker was found to kill")
    return _summary(_events(folder, name)) | {"total_s": round(time.monotonic() - start, 1)}


def _events(folder: Path, name: str) -> Path | None:
    return next((folder / "runs").glob(f"{name}*/events.jsonl"), None)


def _num_outer_iterations(folder: Path, name: str) -> int:
    events = _events(folder, name)
    with contextlib.suppress(OSError, ValueError):
        return (
            0 if events is None else events.read_text(encoding="utf-8").count('"outer_iteration"')
        )
    return 0


def _kill_worker(pid: int) -> int:
    """Kill a worker of the run; return its process id, or 0 if there is none yet."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(pid).children(recursive=True):
            # Ray's name for the processes of an actor class
            if " ".join(one.cmdline()).startswith("ray::RayWorker"):
                os.kill(one.pid, signal.SIGKILL)
                return int(one.pid)
    return 0


def _summary(events: Path | None) -> dict[str, Any]:
    if events is None:
        raise Failed("the run wrote no events")
    lines: list[dict[str, Any]] = read_json_lines(events)
    steps = [line for line in lines if line["event"] == "outer_iteration"]
    report = next(line for line in reversed(lines) if line["event"] == "finished")
    seconds = sum(step["compute_s"] for step in steps)
    return {
        "wer": str(WordErrors.of_json(report["test_errors"])),
        "train_s": round(seconds, 2),
        "outer_iterations": len(steps),
        "frames_per_s": round(report["frames_processed"] / max(seconds, 1e-9)),
        "average_s": round(sum(step["average_s"] for step in steps), 3),
        "incidents": sum(line["event"] == "incident" for line in lines),
    }


def _end_of(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST:])
