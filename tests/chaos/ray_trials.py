"""Faults of Ray itself: a node that is lost, an object store that is full, a head that starts
again.

    python -m tests.chaos.ray_trials WHEN HOW FOLDER      one case, in a process that may die of it
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ngsgd.config import ClusterConfig, RunConfig
from ngsgd.errors import NgsgdError
from ngsgd.training.job import Job, VectorRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.storage.audit import audit
from tests.chaos.cases import Case, Seen
from tests.chaos.faults import Fault
from tests.chaos.invariants import TAG, Surroundings
from tests.chaos.recorded import RecordedRun, note_answer
from tests.tiers import HANGS_S
from tests.toy import Run, config

_STORE_BYTES = 80 * 2**20
_NUM_EPOCHS = 30.0
_AT = (2, 1)


def try_ray(case: Case, folder: Path) -> Seen:
    """The run continues, or its process ends in time and it is resumed, without a lost bit."""
    for name in ("whole", "run"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    within = Run(folder / "whole", _config("")).train().model_sha256
    tag = uuid.uuid4().hex
    around = Surroundings(tag=tag)
    words = [sys.executable, "-m", "tests.chaos.ray_trials", case.when, case.how, str(folder)]
    began = time.time()
    with (folder / "output.txt").open("w") as output:
        code = subprocess.run(words, stdout=output, stderr=output, timeout=HANGS_S, check=False,
                              env={**os.environ, TAG: tag, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode
    said = (folder / "output.txt").read_text()
    strikes = Fault(case.when, case.how, str(folder / "struck")).strikes()
    assert strikes, f"the fault never struck: {said[-2000:]}"
    assert around.problems(folder / "nowhere") == []
    note_answer(folder / "run", folder)
    run, outcome, recovery_s = RecordedRun(folder / "run", _config("")), "continued", None
    if (folder / "report.json").exists():
        report = json.loads((folder / "report.json").read_text())
        outcome, recovery_s = report["outcome"], report["recovery_s"]
    if outcome.startswith("ended") or code:
        how_it_ended = f"process ended with code {code}" if outcome == "continued" else outcome
        outcome = f"{how_it_ended} after {time.time() - began:.0f} s; resumed"
        run.train()
    latest, _ = run.store.latest()
    assert latest is not None and latest.model_sha256 == within
    assert audit(run.ledger_path) == []
    return Seen(outcome, True, recovery_s)


def _config(address: str) -> RunConfig:
    """Long enough for a node's end to be felt."""
    plain = config()
    return replace(plain, schedule=replace(plain.schedule, num_epochs=_NUM_EPOCHS),
                   cluster=ClusterConfig(kind="ray", num_workers=2, threads_per_worker=1, address=address, wait_for_workers_s=60.0))


def _main() -> None:
    when, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ.setdefault("RAY_AUTH_TOKEN", "chaos")
    from ray.cluster_utils import Cluster
    # the cluster writes its address there, and makes no folder but that of its files
    (Path(tempfile.gettempdir()) / "ray").mkdir(exist_ok=True)
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "object_store_memory": _STORE_BYTES, "temp_dir": scratch, "include_dashboard": False})
        try:
            for _ in range(3):   # one for each worker, and one to spare
                cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
            _train(when, how, folder, cluster)
        finally:
            import ray
            ray.shutdown()
            cluster.shutdown()


def _train(when: str, how: str, folder: Path, cluster: Any) -> None:
    from ngsgd.launcher.ray.pool import RayPool
    run = RecordedRun(folder / "run", _config(cluster.address))
    ways: dict[str, Callable[[RayPool], None]] = {
        "kill raylet": _kill_raylet, "object store full": _fill_store, "head restart": lambda pool: _restart_head(cluster)}

    class BreakingPool(RayPool):
        """Breaks Ray at one point, and notes when a job begins."""

        submitted: list[tuple[tuple[int, int, int], float]] = []  # noqa: RUF012
        num_published = 0

        def submit(self, job: Job) -> None:
            super().submit(job)
            self.submitted.append((job.identity, time.time()))
            if when != "idle" and job.identity == (*_AT, 1):
                self._strike()
            # does the new head still replace workers?
            if how == "head restart" and job.identity == (_AT[0] + 5, _AT[1], 1):
                os.kill(self.process_ids()[1], signal.SIGKILL)

        def publish(self, write: Callable[[Vector], object]) -> VectorRef:
            self.num_published += 1
            if when == "idle" and self.num_published == _AT[0] + 1:
                self._strike()
            return super().publish(write)

        def _strike(self) -> None:
            if replace(fault, how="nothing").strike():
                ways[how](self)

        def _admit(self, slot: Any, *arguments: Any) -> None:
            super()._admit(slot, *arguments)
            # as on another machine: through the store
            if how == "object store full" and slot.address:
                slot.address = replace(slot.address, device=replace(slot.address.device, is_near=False))
    fault = Fault(when, how, str(folder / "struck"))
    pool = BreakingPool(run.spec, 1, run.store.layout.size)
    outcome = "continued"
    try:
        run.train(pool)
    except NgsgdError as error:
        outcome = f"ended with an error ({type(error).__name__})"
        print(error)
    ((_, struck_s),) = fault.strikes()
    later = [at_s - struck_s for (outer_iter, job, _), at_s in pool.submitted if at_s > struck_s and (outer_iter, job) >= _AT]
    if any(incident.what == "worker_died" for incident in run.recorder.incidents):
        outcome = outcome.replace("continued", "retried")
    (folder / "report.json").write_text(json.dumps({"outcome": outcome, "recovery_s": min(later, default=None)}))


def _kill_raylet(pool: Any) -> None:
    """Of the node that the second worker is on, and all that ran there: the machine is gone."""
    raylet = psutil.Process(psutil.Process(pool.process_ids()[1]).ppid())
    assert "raylet" in raylet.name(), raylet.name()
    for process in (raylet, *raylet.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _fill_store(pool: Any) -> None:
    """With objects that somebody holds, until no more fit and Ray has to move them to disk."""
    import ray
    pool.ballast = [ray.put(np.zeros(_STORE_BYTES // 8, dtype=np.uint8)) for _ in range(24)]


def _restart_head(cluster: Any) -> None:
    """The process with the cluster membership dies and restarts without its state."""
    cluster.head_node.kill_gcs_server()
    time.sleep(1.0)
    cluster.head_node.start_gcs_server()


if __name__ == "__main__":
    _main()
