"""Computation of shards in parallel processes, also of several computers with one `data.cache_dir`.

Files are locked while they are computed. A process is this module. It reads lines of JSON, the
settings and then one shard at a time, and ends with its standard input. It replies to each shard
with numbers of utterances that are done, and with an `Answer`. It is not a fork, because the
caller may run threads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from ngsgd import files
from ngsgd.asr.corpora import sharding
from ngsgd.asr.corpora.sharding import SHARD_S, Shard
from ngsgd.asr.features.audio import Reader
from ngsgd.config import FeatureConfig
from ngsgd.counting import counted
from ngsgd.phase import Progress

# between two questions whether the shards of other processes are complete
_WAIT_S = 0.5
_MODULE = "ngsgd.asr.corpora.shard_processes"


class Answer(StrEnum):
    """Result of a shard."""

    DONE = "done"
    BUSY = "busy"  # another process computes it
    FAILED = "failed"  # the caller computes it again, for the error


def compute(shards: Sequence[Shard], config: FeatureConfig, folder: Path, *,
            num_processes: int = 0, report: Callable[[str], None] = lambda _line: None) -> None:
    """Compute all shards that do not exist in the folder, by one process per core by default, none
    for one shard. Raises DataError for damaged data, OSError if the disk is full.
    """
    files.remove_abandoned(folder)
    pending = [shard for shard in shards if not sharding.is_complete(folder / shard.file_name)]
    # a process takes a second to start, as long as some minutes of speech
    num_worth = math.ceil(sum(shard.seconds for shard in pending) / SHARD_S)
    num_processes = min(num_processes or min(len(os.sched_getaffinity(0)), num_worth), len(pending))
    if not pending:
        return
    progress = Progress(report, f"computing features in {counted(max(num_processes, 1), 'process', 'processes')}",
                        sum(len(shard.at) for shard in pending))
    with _processes(config, folder, num_processes if num_processes > 1 else 0) as idle:
        while pending:
            answers = _parallel(pending, idle, num_processes, progress) if num_processes > 1 else \
                [Answer.FAILED] * len(pending)
            left = []
            with contextlib.closing(Reader(config.sample_rate_hz, resample=config.resample)) as reader:
                for shard, answer in zip(pending, answers, strict=True):
                    # a failed one is computed here, for the error
                    if answer is Answer.FAILED and sharding.compute(shard, config, folder, reader, progress.each):
                        continue
                    if answer is not Answer.DONE:
                        left.append(shard)
            if len(left) == len(pending):
                time.sleep(_WAIT_S)
            pending = left


Processes = queue.SimpleQueue["subprocess.Popen[bytes]"]


def _parallel(pending: Sequence[Shard], idle: Processes, num_threads: int, progress: Progress) -> list[Answer]:
    """Send each shard to a process; after a failure the others are skipped."""
    stop = threading.Event()

    def answer(shard: Shard) -> Answer:
        if stop.is_set():
            return Answer.BUSY
        process = idle.get()
        assert process.stdout is not None
        _send(process, json.dumps(shard.to_json()))
        while (line := process.stdout.readline().decode().strip()).isdecimal():
            progress.add(int(line))
        # an empty line: it died
        found = Answer(line) if line else Answer.FAILED
        idle.put(process)
        if found is Answer.FAILED:
            stop.set()
        return found
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            return list(threads.map(answer, pending))
        finally:
            # after Ctrl-C
            stop.set()


@contextmanager
def _processes(config: FeatureConfig, folder: Path, number: int) -> Iterator[Processes]:
    about = json.dumps({"features": asdict(config), "folder": str(folder)})
    started: list[subprocess.Popen[bytes]] = []
    idle: Processes = queue.SimpleQueue()
    try:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(process)
            _send(process, about)
            idle.put(process)
        yield idle
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    # it died, which the missing answer shows
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def main() -> None:
    """Compute the shards of standard input, in a process."""
    # Ctrl-C reaches all processes; the caller ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    about = json.loads(sys.stdin.readline())
    config, folder = FeatureConfig(**about["features"]), Path(about["folder"])
    reader = Reader(config.sample_rate_hz, resample=config.resample)
    for line in sys.stdin:
        try:
            is_done = sharding.compute(Shard.of_json(json.loads(line)), config, folder, reader, _each)
            answer = Answer.DONE if is_done else Answer.BUSY
        except Exception:
            # the caller reports it
            answer = Answer.FAILED
        _tell(answer)


def _each(items: Iterable[Any]) -> Iterator[Any]:
    """Yield utterances, and report once a second how many are done."""
    done, told_s = 0, time.monotonic()
    for item in items:
        yield item
        done += 1
        if time.monotonic() - told_s >= 1.0:
            _tell(done)
            done, told_s = 0, time.monotonic()
    _tell(done)


def _tell(answer: object) -> None:
    # the caller was killed: the file remains for the next one
    with contextlib.suppress(BrokenPipeError):
        print(answer, flush=True)


if __name__ == "__main__":
    main()
