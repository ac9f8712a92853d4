"""Workers that would compute other bits than the run are not used."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ngsgd.cluster.fingerprint import Agreement, Fingerprint
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.errors import ClusterError
from ngsgd.ops.kernels import native
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job
from ngsgd.training.worker import Worker
from tests.toy import Run, require_undisturbed

pytestmark = pytest.mark.faults


class LosesItsSettings(Worker):
    """MKL runs other code in every process but the first `allowed` ones."""

    allowed = 2

    def __init__(self, spec: SpeechTaskSpec, index: int) -> None:
        super().__init__(spec, index)
        births = Path(spec.egs_directory).with_name("births")
        with births.open("a") as file:
            file.write(f"{index}\n")
        if len(births.read_text().splitlines()) > self.allowed:
            os.environ["MKL_CBWR"] = "COMPATIBLE"


def loses_it_once(spec: Any, index: int) -> Worker:
    """The first replacement differs, the next one does not."""
    worker = LosesItsSettings(spec, index)
    if len(Path(spec.egs_directory).with_name("births").read_text().splitlines()) > 3:
        os.environ.pop("MKL_CBWR", None)
    return worker


def differs_from_the_start(spec: Any, index: int) -> Worker:
    """MKL runs other code in the process of the second worker."""
    if index == 1:
        os.environ["MKL_CBWR"] = "COMPATIBLE"
    return Worker(spec, index)


def without_kernels(spec: Any, index: int) -> Worker:
    """A worker that found no compiler and no cache."""
    worker = Worker(spec, index)
    native._forbidden.set()
    return worker


def without_compiler_and_cache(spec: Any, index: int) -> Worker:
    """As a replacement whose compiler and cache have disappeared since the run began."""
    worker = Worker(spec, index)
    os.environ |= {"CXX": "/nonexistent",
                   "XDG_CACHE_HOME": str(Path(spec.egs_directory).with_name("empty"))}
    return worker


class KillsWorkers(ProcessPool):
    """Kills the worker of a job, in outer iterations 1 and 2."""

    def submit(self, job: Job) -> None:
        super().submit(job)
        (slot,) = [slot for slot in self._slots if slot.job is job]
        if job.identity in {(1, 0, 1), (2, 1, 1)}:
            assert slot.process.pid
            os.kill(slot.process.pid, signal.SIGKILL)


def _pool(run: Run, worker: Callable[[Any, int], Worker],
          agreement: Agreement | None = None) -> ProcessPool:
    return KillsWorkers(run.spec, 2, 1, run.store.layout.size, make_worker=worker, agreement=agreement)


def test_a_replacement_that_differs_is_not_used(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ClusterError, match=r"MKL_CBWR.*allow.other.bits"):
        run.train(_pool(run, LosesItsSettings))
    refused = [incident for incident in run.recorder.incidents if incident.what == "worker_refused"]
    assert refused and all("MKL_CBWR" in incident.message for incident in refused)


def test_the_run_continues_with_a_replacement_that_does_not_differ(tmp_path: Path) -> None:
    run = Run(tmp_path / "replaced")
    require_undisturbed(run, _pool(run, loses_it_once))


def test_workers_keep_the_kernels_of_the_beginning(tmp_path: Path) -> None:
    run = Run(tmp_path / "kernels")
    require_undisturbed(run, _pool(run, without_compiler_and_cache,
                                   Agreement(Fingerprint.of_this_process(1))))


def test_other_bits_are_reported_where_they_are_allowed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(_pool(run, LosesItsSettings, Agreement(allow_other_bits=True)))
    (told,) = [incident for incident in run.recorder.incidents if incident.what == "other_bits"]
    assert "MKL_CBWR" in told.message


def test_first_workers_that_differ_from_each_other_end_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ClusterError, match="MKL_CBWR"):
        run.train(_pool(run, differs_from_the_start))


def test_workers_are_compared_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    here = Fingerprint.of_this_process(1)
    if not here.differences(Fingerprint(kernels=dict.fromkeys(here.kernels, "none: torch operations"))):
        pytest.skip("no C++ compiler here")
    with pytest.raises(ClusterError, match="kernel"):
        run.train(_pool(run, without_kernels, Agreement(here)))
