"""A Ray cluster with Ray's own autoscaler, whose machines are raylets of this one.

    python -m tests.integration.autoscaled SCENARIO FOLDER [SECONDS]    prints the result as JSON

The scenario `head` needs redis-server in PATH; test_autoscaled.py runs the others.

`ray.cluster_utils.AutoscalingCluster` ends every Ray of the machine when it starts, those of other
programs too, and reads a file that the wheel lacks. So the same command is run here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ngsgd.config import ClusterConfig, FailureConfig, RunConfig
from ngsgd.launcher.reports.efficiency import efficiency_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training import worker_wait
from ngsgd.training.job import Job
from ngsgd.training.storage.audit import audit
from tests.tiers import HANGS_S
from tests.toy import Run, config
from tests.training.snapshots.jobs import ALWAYS

_STORE_BYTES = 80 * 2**20
_HEAD_ID = "f" * 51 + "00000"
_RAY = str(Path(sys.executable).parent / "ray")
# of an idle machine, until it is removed
_IDLE_S = 6.0
# of each minibatch, so that a job lasts until something has happened to it
_STEP_S = 0.05


def autoscaling(address: str, most: int) -> dict[str, Any]:
    """The configuration of the autoscaler: no machine at first."""
    resources = {"CPU": 1, "object_store_memory": _STORE_BYTES}
    worker = {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": most}
    commands = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
                "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")
    provider = {"type": "fake_multinode", "gcs_address": address, "head_node_id": _HEAD_ID, "launch_multiple": True,
                "use_node_id_as_ip": True, "disable_node_updaters": True, "disable_launch_config_check": True}
    # the head counts
    return {"cluster_name": "fake", "max_workers": most + 1, "upscaling_speed": 10.0, "idle_timeout_minutes": _IDLE_S / 60,
            "provider": provider, "head_node_type": "ray.head.default", "auth": {}, "docker": {}, "file_mounts": {},
            "file_mounts_sync_continuously": False, **{name: [] for name in commands},
            "available_node_types": {"worker": worker, "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0}}}


@contextlib.contextmanager
def redis() -> Iterator[dict[str, str]]:
    """Variables of a head that stores its state in a Redis server, where a new head reads it."""
    program = shutil.which("redis-server")
    assert program, "no redis-server in PATH"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(most: int, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a head without CPUs, whose autoscaler starts up to `most` machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        file, output = Path(scratch) / "autoscaling.json", Path(scratch) / "output.txt"
        file.write_text(json.dumps(autoscaling(address, most)))
        environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_TMPDIR": scratch,
                       "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID, **environment}
        words = [_RAY, "start", "--head", "--block", f"--port={address.rpartition(':')[2]}", "--node-ip-address=127.0.0.1",
                 "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}",
                 f"--temp-dir={scratch}", f"--autoscaling-config={file}"]
        if "RAY_REDIS_ADDRESS" in environment:
            # that process would end the others as soon as one of them is lost
            words.remove("--block")
        try:
            # a busy machine may be too slow for Ray's own time limits
            for _ in range(5):
                with output.open("w") as stream:
                    head = subprocess.Popen(words, env=environment, stdout=stream, stderr=stream)
                until(lambda head=head: "Ray runtime started" in output.read_text() or head.poll() is not None,  # type: ignore[misc]
                      "the head did not start")
                if not head.poll():
                    break
                end(scratch)
            assert not head.poll(), output.read_text()
            yield address
        finally:
            end(scratch)
            head.wait()


def end(scratch: str) -> None:
    """End the processes of the cluster in this folder, also those that outlive its head."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(scratch in word for word in process.cmdline()) and process.pid != os.getpid():
                process.kill()


def found(program: str, address: str) -> psutil.Process:
    """The process of the cluster at this address that runs this program."""
    port = address.rpartition(":")[2]
    return next(process for process in psutil.process_iter(["cmdline"])
                if any(word.endswith(program) for word in process.info["cmdline"] or ())
                and any(word.endswith((f":{port}", f"={port}")) for word in process.info["cmdline"]))


def until(is_so: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + HANGS_S
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@dataclass(frozen=True)
class SlowSpec(SpeechTaskSpec):
    """A task whose minibatches take time."""

    step_s: float = 0.0

    def task(self, device: Any = None) -> Any:
        task = super().task(device)
        batches = task.batches

        def slow(*arguments: Any, **options: Any) -> Iterator[Any]:
            for batch in batches(*arguments, **options):
                time.sleep(self.step_s)
                yield batch
        task.batches = slow  # type: ignore[method-assign]
        return task


def run_config(address: str, num_workers: int, failure: FailureConfig) -> RunConfig:
    plain = config(failure=failure)
    cluster = ClusterConfig(kind="ray", address=address, num_workers=num_workers, threads_per_worker=1, wait_for_workers_s=HANGS_S)
    # 30 minibatches in a job
    return replace(plain, cluster=cluster, schedule=replace(plain.schedule, minibatch_size=10, num_jobs_initial=num_workers,
                                                            num_jobs_final=num_workers))


def train(address: str, folder: Path, num_workers: int, strike: Callable[[Any, Job], bool] | None = None, *,
          failure: FailureConfig = ALWAYS) -> dict[str, Any]:
    """Train on the cluster; `strike` is called after each submitted job, until it returns True."""
    import ray

    from ngsgd.launcher.ray.cluster import require_workers
    from ngsgd.launcher.ray.pool import RayPool

    struck = False

    class FarPool(RayPool):
        """Treats the workers as on other machines."""

        def _admit(self, slot: Any, *arguments: Any) -> None:
            super()._admit(slot, *arguments)
            slot.address = replace(slot.address, device=replace(slot.address.device, is_near=False))

        def submit(self, job: Job) -> None:
            nonlocal struck
            super().submit(job)
            submitted_s.append(time.monotonic())
            nodes.update(node["NodeID"] for node in ray.nodes() if node["Alive"])
            if strike and not struck:
                struck = strike(self, job)

    settings = run_config(address, num_workers, failure)
    run = Run(folder, settings)
    spec = SlowSpec(run.config, str(run.egs), step_s=_STEP_S if strike else 0.0)
    worker_wait.EVERY_S = 0.5
    lines: list[str] = []
    submitted_s: list[float] = []
    nodes: set[str] = set()
    run.report = lines.append
    require_workers(settings.cluster, lines.append)
    began = time.monotonic()
    end = run.train(FarPool(spec, 1, run.store.layout.size, report=lines.append))
    records = run.recorder.records
    jobs = [job for record in records for job in record.jobs]
    complete = Run(folder / "complete", run_config("", num_workers, FailureConfig()))
    efficiency = efficiency_of({"event": "outer_iteration", **asdict(record)} for record in records)
    return {"model": end.model_sha256, "struck": struck or strike is None, "problems": audit(run.ledger_path), "lines": lines,
            "complete": complete.train().model_sha256, "participation": efficiency.participation,
            "frames": end.progress.frames_processed, "complete_frames": complete.recorder.records[-1].frames_processed,
            "first_job_s": submitted_s[0] - began,
            "incidents": [(one.what, one.message) for one in run.recorder.incidents],
            "continued": sum(job.continued_at > 0 for job in jobs), "num_jobs": len(jobs),
            "nodes": sorted(nodes)}


def scale(address: str, folder: Path) -> dict[str, Any]:
    """From no machine to four, and back."""
    import ray

    report = train(address, folder, 4)
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, "machines stay after the run")
    return report


def in_a_job(act: Callable[[Any, Any], object]) -> Callable[[Any, Job], bool]:
    """Return a strike that acts on the pool and the slot of a job of the second outer iteration."""
    def strike(pool: Any, job: Job) -> bool:
        if job.identity != (1, 1, 1):
            return False
        until(lambda: pool._snapshots.newest(pool._snapshots._entries[(1, 1)].memory), "no snapshot arrived")
        act(pool, next(slot for slot in pool._slots if slot.job is job))
        return True
    return strike


def drain(address: str, folder: Path) -> dict[str, Any]:
    """The node of a worker is drained while it runs a job."""
    def act(pool: Any, slot: Any) -> None:
        words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        subprocess.run([_RAY, "drain-node", "--address", address, "--node-id", slot.address.node_id, *words], check=True)
        until(lambda: slot.address.node_id in pool._capacity.draining, "nobody noticed")
    return train(address, folder, 2, in_a_job(act))


def sigterm(address: str, folder: Path) -> dict[str, Any]:
    """A worker gets SIGTERM in the middle of a job."""
    return train(address, folder, 2, in_a_job(lambda _pool, slot: os.kill(slot.address.process_id, signal.SIGTERM)))


def head(address: str, folder: Path) -> dict[str, Any]:
    """The server of the head is killed in a job, and starts again with its state from Redis."""
    def act(_pool: Any, _slot: Any) -> None:
        server = found("/gcs_server", address)
        words, environment = server.cmdline(), server.environ()
        server.kill()
        server.wait()
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return train(address, folder, 2, in_a_job(act))


def loss(address: str, folder: Path, outage_s: float = 0.0) -> dict[str, Any]:
    """All machines with workers are lost in two jobs, and none starts for `outage_s`."""
    def strike(pool: Any, job: Job) -> bool:
        if job.identity[:1] != (1,) or sum(slot.job is not None for slot in pool._slots) < 2:
            return False
        entries = pool._snapshots._entries
        until(lambda: all(pool._snapshots.newest(entries[1, number].memory) for number in (0, 1)), "no snapshot arrived")
        autoscaler = found("/monitor.py", address)
        autoscaler.suspend()
        threading.Timer(outage_s, autoscaler.resume).start()
        for process_id in pool.process_ids():
            raylet = psutil.Process(psutil.Process(process_id).ppid())
            assert "raylet" in raylet.name(), raylet.name()
            for process in (raylet, *raylet.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return True
    return train(address, folder, 2, strike)


def main() -> None:
    scenario, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    (folder / "complete").mkdir(parents=True, exist_ok=True)
    # ends the cluster, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # keeps Ray from writing a token into the home directory
    os.environ |= {"RAY_AUTH_TOKEN": "autoscaled" * 4, "RAY_AUTH_MODE": "token"}
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(redis()) if scenario is head else {}
        address = stack.enter_context(cluster(4, environment))
        import ray

        from ngsgd.launcher.ray.cluster import connect

        try:
            connect(ClusterConfig(kind="ray", address=address))
            print(json.dumps(scenario(address, folder, *map(float, sys.argv[3:]))))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
