"""A process that computes shards, started by `ngsgd.asr.corpora.shards.computing`.

`python -m ngsgd.asr.corpora.shards.process` reads lines of JSON: the settings, then one shard at a
time. It replies to each shard with one word: an `Answer`. It ends with its standard input, and
therefore soon after the process that started it. It is not a fork, because the caller may run
threads.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from enum import StrEnum
from pathlib import Path

from ngsgd.asr.corpora.shards import shard_file
from ngsgd.asr.corpora.shards.plan import Shard
from ngsgd.asr.features.audio import Reader
from ngsgd.config import FeatureConfig


class Answer(StrEnum):
    """Result of a shard."""

    DONE = "done"
    # another process computes it
    BUSY = "busy"
    # the caller computes it again, for the error
    FAILED = "failed"


def main() -> None:
    """Compute the shards of standard input."""
    # Ctrl-C reaches all processes; the caller ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    about = json.loads(sys.stdin.readline())
    config, folder = FeatureConfig(**about["features"]), Path(about["folder"])
    reader = Reader(config.sample_rate_hz, resample=config.resample)
    for line in sys.stdin:
        try:
            is_done = shard_file.compute(Shard.of_json(json.loads(line)), config, folder, reader)
            answer = Answer.DONE if is_done else Answer.BUSY
        except Exception:
            # the caller reports it
            answer = Answer.FAILED
        # the caller was killed: the file remains for the next one
        with contextlib.suppress(BrokenPipeError):
            print(answer, flush=True)


if __name__ == "__main__":
    main()
