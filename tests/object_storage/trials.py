"""Trials of runs in object storage: each write of a run fails, and the run is resumed elsewhere.

    python -m tests.object_storage.trials [FAULT...]      # all points of these faults, else of all
    python -m tests.object_storage.trials paused          # a second coordinator during a long pause
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngsgd.errors import ObjectStorageError, RunLockedError
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.folder import newest_manifest
from ngsgd.object_storage.lease import read_head
from ngsgd.runs import stored_run
from ngsgd.training.storage import audit
from tests.object_storage.service import BUCKET, FAULTS, Fault, Faults, Service, running
from tests.object_storage.trainer import Trainer

_SHORT_LEASE_S = 2.0
LENGTHS = {"slow_down": 4, "expired": 10_000}


class Trials:
    """One service, one process that forks trainers, and the result of an undisturbed run."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.trainer = Trainer(folder, service.environment())
        self._num_cases = 0
        self._name = os.urandom(4).hex()  # a service may have the objects of earlier trials
        service.faults = Faults()
        url = self.new_url()
        assert self.run(url, "first") == 0, self.trainer.errors()
        self.num_writes = service.faults.num_writes
        self.digest = self.final_digest(url)

    def new_url(self) -> str:
        """A URL without runs."""
        self._num_cases += 1
        return f"s3://{BUCKET}/{self._name}/case{self._num_cases}"

    def run(self, url: str, cache: str, *, resume: str = "", fault: Fault | None = None) -> int:
        """Train or resume with a fault; return the exit code."""
        process = self.trainer.begin(url, f"{cache}{self._num_cases}", resume=resume)
        # stale lists are those of the process that resumes
        if not self.service.faults.lists_are_stale or not resume:
            self.service.faults = Faults(fault, process)
        os.kill(process, signal.SIGCONT)
        return self.trainer.end()

    def interrupted_by_another(self, number: int) -> Iterator[str]:
        """Stop the process of a run at a write until another machine has finished the run."""
        url = self.new_url()
        process = self.trainer.begin(url, "paused", lease_s=_SHORT_LEASE_S)
        self.service.faults = Faults(Fault("stop", number), process)
        os.kill(process, signal.SIGCONT)
        while not self.service.faults.num_faults:
            time.sleep(0.05)
        names = stored_run.names_of_runs(url)
        committed = [name for name in names if newest_manifest(ObjectStore(f"{url}/{name}"))]
        if not committed:
            # there is no run to take over yet
            os.kill(process, signal.SIGCONT)
            if self.trainer.end() != 0:
                yield f"the process ended with the messages {self.trainer.errors()}"
            return
        name = committed[0]
        other = Trainer(self.trainer.folder, self.service.environment())
        os.kill(other.begin(url, "other", resume=f"{url}/{name}", lease_s=_SHORT_LEASE_S), signal.SIGCONT)
        if other.end() != 0:
            yield f"the run could not be taken over: {self.trainer.errors()}"
        other.close()
        head = read_head(ObjectStore(f"{url}/{name}"))
        os.kill(process, signal.SIGCONT)
        code, errors = self.trainer.end(), self.trainer.errors()
        # a request that was open during the pause may fail first
        if code not in (RunLockedError.exit_code, ObjectStorageError.exit_code) or len(errors) != 1:
            yield f"the replaced process ended with {code} and the messages {errors}"
        if read_head(ObjectStore(f"{url}/{name}")) != head or self.final_digest(url) != self.digest:
            yield "the replaced process changed the run"

    def final_digest(self, url: str) -> str:
        """SHA-256 of the only finished model below a URL, as another machine reads it."""
        models = [self.fetched(f"{url}/{name}") / "final" / "model.safetensors"
                  for name in stored_run.names_of_runs(url)]
        (model,) = [model for model in models if model.is_file()]
        return hashlib.sha256(model.read_bytes()).hexdigest()

    def fetched(self, run: str) -> Path:
        os.environ["XDG_CACHE_HOME"] = str(self.trainer.folder / "reader")
        folder = stored_run.fetched(run)
        return folder if folder else Path(os.devnull)

    def problems(self, fault: Fault) -> Iterator[str]:
        """Disturb a run, end it on another machine, and yield the problems."""
        url = self.new_url()
        code = self.run(url, "first", fault=fault)
        if not self.service.faults.num_faults:
            yield "the fault was not reached"
        errors = self.trainer.errors()
        # after the last commit, only the release of the lease fails
        must_fail = fault.kind == "expired" and fault.number < self.num_writes
        allowed = [ObjectStorageError.exit_code] if must_fail else [0, ObjectStorageError.exit_code]
        if code != -signal.SIGKILL and (code not in allowed or len(errors) > 1):
            yield f"the run ended with {code} and the messages {errors}"
        names = stored_run.names_of_runs(url)
        if code != 0:
            found = [name for name in names if self.fetched(f"{url}/{name}").is_dir()]
            if (code := self.run(url, "second", resume=f"{url}/{found[0]}" if found else "")) != 0:
                yield f"the resumption ended with {code}"
            yield from (f"after the resumption: {error}" for error in self.trainer.errors())
        if self.final_digest(url) != self.digest:
            yield "the final model differs"
        for name in stored_run.names_of_runs(url):
            folder = self.fetched(f"{url}/{name}")
            if (folder / "ledger.jsonl").exists():
                yield from audit.audit(folder / "ledger.jsonl")
            # a finished run needs those of the last two commits
            if (num_objects := len(list(ObjectStore(f"{url}/{name}").keys()))) > 120:
                yield f"{num_objects} objects are left"


def main(kinds: Sequence[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder, running(os.environ.__setitem__) as service:
        trials = Trials(service, Path(folder))
        print(f"{trials.num_writes} writes in a run")
        for kind in kinds or (*FAULTS, "paused"):
            # at each write of a run
            faults = [Fault(kind, number, LENGTHS.get(kind, 1)) for number in range(1,
                            trials.num_writes + 1)]
            for fault in faults:
                found = trials.interrupted_by_another(fault.number) if kind == "paused" else trials.problems(fault)
                for problem in found:
                    failed += 1
                    print(f"{kind} {fault.number}: {problem}", flush=True)
            print(f"{kind}: {len(faults)} points", flush=True)
        trials.trainer.close()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
