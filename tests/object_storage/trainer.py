"""Processes that train to object storage and can be killed: forks of one that has torch loaded.

    python -m tests.object_storage.trainer

reads a line of JSON per process (see `Trainer.begin`), and prints its number. The process
waits for SIGCONT; its exit code follows on the next line.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import ngsgd
from ngsgd.errors import NgsgdError
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.lease import Lease
from ngsgd.pipeline.services import Services
from ngsgd.runs import stored_run
from tests.tasks import blobs

ROOT = Path(__file__).resolve().parents[2]
NUM_EPOCHS = 1


def main() -> None:
    for line in sys.stdin:
        if not (process := os.fork()):
            _child(json.loads(line))
        os.waitpid(process, os.WUNTRACED)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _child(wanted: Mapping[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    _share_kernels(Path(wanted["cache"]))
    os.environ["XDG_CACHE_HOME"] = wanted["cache"]
    mock.patch.object(stored_run, "Lease", functools.partial(Lease, duration_s=wanted["lease_s"])).start()
    mock.patch.object(stored_run, "ObjectStore", functools.partial(ObjectStore, retry_s=wanted["retry_s"])).start()
    code = 0
    with Path(wanted["log"]).open("a") as log:
        try:
            where = {"resume": wanted["resume"]} if wanted["resume"] else {
                "output_dir": wanted["url"], "num_epochs": NUM_EPOCHS, "batch_size": 16, "cluster": "in_process"}
            ngsgd.train(blobs.make_task, services=Services(), **where)
        except NgsgdError as error:
            log.write(f"{type(error).__name__}: {error}\n")
            code = error.exit_code
        except BaseException:
            log.write(traceback.format_exc())
            code = 99
    os._exit(code)


def _share_kernels(cache: Path) -> None:
    """Use the compiled kernels of this machine; compiling takes most of a case."""
    there = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ngsgd" / "kernels"
    there.mkdir(parents=True, exist_ok=True)
    here = cache / "ngsgd" / "kernels"
    here.parent.mkdir(parents=True, exist_ok=True)
    if not here.exists():
        here.symlink_to(there)


class Trainer:
    """The process that forks, and its current child."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.log = folder / "errors.log"
        self._process = subprocess.Popen([sys.executable, "-m", "tests.object_storage.trainer"], cwd=ROOT, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def begin(self, url: str, cache: str, *, resume: str = "", lease_s: float = 60.0, retry_s: float = 4.0) -> int:
        """Start a process that waits for SIGCONT; return its number."""
        assert self._process.stdin and self._process.stdout
        wanted = {"url": url, "resume": resume, "cache": str(self.folder / cache), "lease_s": lease_s, "retry_s": retry_s,
                  "log": str(self.log)}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> int:
        """Wait for the process; return its exit code, negative for a signal."""
        assert self._process.stdout
        return int(self._process.stdout.readline())

    def errors(self) -> list[str]:
        """The messages since the last call."""
        found = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    main()
