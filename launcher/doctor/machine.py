"""Checks of `ngsgd doctor` on one machine: this one, or a node of a cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

from ngsgd.counting import counted
from ngsgd.errors import NgsgdError
from ngsgd.launcher.console import version
from ngsgd.launcher.mlflow.store import without_login
from ngsgd.masking import conceal
from ngsgd.runs.stored_run import check_output_url

# prepared digits, checkpoints and a tracking store take less than 1 GiB
_FREE_BYTES = 2 * 2**30
# below this, not even the data of the smallest recipe fits
_FULL_BYTES = 100 * 2**20
# Ray's object store on one machine, and the shared parameters
_SHM_BYTES = 600 * 2**20
# file times and log lines of several machines should be in order
_MAX_SKEW_S = 5.0
# package -> the extra that installs it; empty: required by all of ngsgd
_NEEDS = {"torch": "", "numpy": "", "ray": "service", "hydra-core": "service", "mlflow": "service",
          "safetensors": "service", "matplotlib": "service", "kaldi-native-fbank": "asr",
          "kaldi-decoder": "asr", "kaldifst": "asr", "espeakng-loader": "synth"}

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of a check: verdict, name, finding and fix."""

    verdict: Verdict
    what: str
    found: str
    fix: str = ""


def python() -> Iterator[Finding]:
    found = f"{sys.version.split()[0]} in {sys.prefix}"
    if sys.prefix == sys.base_prefix:
        yield Finding("warn", "python", f"{found}, no virtual environment", "python3 -m venv .venv && . .venv/bin/activate")
    else:
        yield Finding("ok", "python", found)


def packages() -> Iterator[Finding]:
    for package, extra in _NEEDS.items():
        found, wanted = version(package), f"'ngsgd[{extra}]'" if extra else package
        if found != "not installed":
            yield Finding("ok", package, found)
        else:
            yield Finding("warn" if extra else "fail", package, found, f"pip install {wanted}")


def shadows() -> Iterator[Finding]:
    """Check for another package or folder called ngsgd that Python imports first."""
    # the parent is the package in a wheel, and the repository in a source tree
    above = Path(__file__).resolve().parents[2]
    is_wheel = above.name == "ngsgd" and (above / "launcher").is_dir() and (above / "errors.py").exists()
    ours = above if is_wheel else above / "ngsgd"
    places = _folders_of(importlib.util.find_spec("ngsgd"))
    strange = [place for place in places if place != ours]
    if strange or not places:
        yield Finding("fail", "shadowed",
                      f"ngsgd is imported from {strange[0] if strange else 'nowhere'}",
                      f"rename that folder, or run from another one; this package is {ours}")
    # the ngsgd that a new process with the same search path imports
    specs = (finder.find_spec("ngsgd", None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    first = _folders_of(next((spec for spec in specs if spec), None))
    # "" is the current folder
    for place in dict.fromkeys(Path(entry or os.curdir).absolute() / "ngsgd" for entry in sys.path):
        if not place.is_dir() or place.resolve() == ours or (place / "__init__.py").exists():
            continue
        if not any(place.iterdir()):
            yield Finding("warn", "shadowed", f"{place} is an empty folder of an older installation", f"rmdir {place}")
        # a package further down sys.path hides it, and an editable installation does not
        elif place.resolve() in first:
            fix = (f"run from another folder than {place.parent}" if place.parent == Path.cwd()
                   else f"rename that folder, or remove {place.parent} from PYTHONPATH")
            yield Finding("warn", "shadowed", f"{place} has no __init__.py, and Python programs "
                          f"import it instead of {ours}", fix)


def _folders_of(spec: ModuleSpec | None) -> list[Path]:
    places = (spec.submodule_search_locations if spec else None) or []
    return [Path(place).resolve() for place in places]


def threads(num_workers: int) -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    per_worker = max(1, num_cores // num_workers)
    found = f"{counted(num_cores, 'core')}, {counted(num_workers, 'worker')} of {counted(per_worker, 'thread')}"
    asked = os.environ.get("OMP_NUM_THREADS", "")
    num_asked = int(asked) * num_workers if asked.isdigit() else 0
    if num_workers > num_cores:
        yield Finding("warn", "threads", f"{found}: workers share cores",
                      f"cluster.num_workers={num_cores} is as fast on this machine")
    elif num_asked > num_cores and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        spinning = counted(num_asked, "thread that spins", "threads that spin")
        yield Finding("warn", "threads",
                      f"{found}; OMP_NUM_THREADS={asked} starts {spinning}, also during waits",
                      "unset OMP_NUM_THREADS, or export OMP_WAIT_POLICY=PASSIVE")
    else:
        yield Finding("ok", "threads", found)
    load = os.getloadavg()[0]
    if load > num_cores:
        yield Finding("warn", "load", f"{load:.1f} on {counted(num_cores, 'core')}: other programs compute",
                      "training is slower, mostly with Ray, whose workers have a low priority; set "
                      "RAY_worker_niceness=0 before ray start")


def memory() -> Iterator[Finding]:
    with contextlib.suppress(ImportError):
        import psutil
        free = psutil.virtual_memory().available
        yield _sized("memory", f"{free / 2**30:.1f} GiB free", free > 1.5 * 2**30,
                     "a worker takes 0.1 GB and its model, with Ray 0.3 GB more; use fewer workers")
    if (shm := Path("/dev/shm")).is_dir():
        free = shutil.disk_usage(shm).free
        yield _sized("shared memory", f"{free / 2**20:,.0f} MiB free in /dev/shm",
                     free >= _SHM_BYTES, "in a container: docker run --shm-size=2g")


def _sized(what: str, found: str, is_enough: bool, fix: str) -> Finding:
    return Finding("ok" if is_enough else "warn", what, found, "" if is_enough else fix)


def gpus() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            yield Finding("ok", "GPU", "none: training runs on the CPU")
        else:
            yield Finding("warn", "GPU",
                          f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU",
                          "install a torch built for your driver: https://pytorch.org/get-started")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("ok", "GPU", ", ".join(names))
    import subprocess
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        if "Exclusive" in done.stdout:
            yield Finding("warn", "GPU mode", "exclusive: one process per GPU",
                          "at most one worker per GPU (cluster.num_workers), or nvidia-smi -c "
                          "DEFAULT as root")


def compiled() -> Iterator[Finding]:
    """Check the C++ kernels, which are built at first use."""
    if importlib.util.find_spec("torch") is None:
        return
    from ngsgd.ops import fisher_projection
    from ngsgd.ops.kernels import native
    with native.reported_to(lambda _line: None):
        is_native = fisher_projection.is_native()
    if is_native:
        yield Finding("ok", "compiled code", f"built for {native.capability()}")
    elif native.capability() not in fisher_projection.PROCESSORS:
        yield Finding("ok", "compiled code", f"none for this processor ({native.capability()}): torch operations are used")
    else:
        problem = native.problems.get(fisher_projection.SOURCE.name, "unknown reason")
        yield Finding("warn", "compiled code",
                      f"cannot be built ({problem}): torch operations are used",
                      "apt install g++, or name a compiler in CXX: natural-gradient steps on the "
                      "CPU are then about 5 % faster")


def storage(output_dir: Path) -> Iterator[Finding]:
    folder = output_dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("fail", "storage", f"{existing} cannot be written ({error.strerror})",
                      "output_dir=PATH, or fix its permissions")
        return
    free = shutil.disk_usage(existing).free
    verdict: Verdict = "fail" if free < _FULL_BYTES else "warn" if free < _FREE_BYTES else "ok"
    yield Finding(verdict, "storage", f"{folder} can be written, {free / 2**30:.1f} GiB free",
                  "" if verdict == "ok" else "free disk space, or output_dir=PATH on another disk")


def object_storage(url: str) -> Iterator[Finding]:
    try:
        check_output_url(url)
        yield Finding("ok", "object storage", f"{url} can be written, conditional writes work")
    except NgsgdError as error:
        yield Finding("fail", "object storage", str(error), "correct the URL, the credentials or the policy of the bucket")


def tracking(output_dir: Path, uri: str) -> Iterator[Finding]:
    if not uri:
        store = output_dir / "mlflow.db"
        if not store.exists():
            yield Finding("ok", "tracking", f"{store} is created by the first run")
        elif os.access(store, os.W_OK):
            yield Finding("ok", "tracking", f"{store}, {store.stat().st_size / 2**20:.1f} MiB")
        else:
            yield Finding("fail", "tracking", f"{store} cannot be written", f"chmod u+w {store}, or tracking.kind=none")
        return
    conceal(uri)
    uri = without_login(uri)
    if not uri.startswith(("http://", "https://")):
        yield Finding("ok", "tracking", f"{uri} (checked by the run)")
        return
    import urllib.request
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=10) as answer:
            yield Finding("ok", "tracking", f"{uri} answers")
            # the Date header has a resolution of one second
            with contextlib.suppress(ValueError, TypeError):
                date = parsedate_to_datetime(answer.headers.get("Date", ""))
                yield clock("tracking server", date.timestamp() - time.time())
    except (OSError, ValueError) as error:
        yield Finding("fail", "tracking", f"{uri} does not answer ({error})",
                      "start it (docs/mlflow.md); training continues without it and sends the "
                      "missing metrics later")


def clock(whose: str, skew_s: float) -> Finding:
    return _sized("clock", f"of {whose}: {skew_s:+.1f} s from this machine",
                  abs(skew_s) <= _MAX_SKEW_S, "start chrony or ntpd on both")


def ports(*, with_dashboard: bool) -> Iterator[Finding]:
    """Check ports of servers that are started later; a cluster that runs has its dashboard."""
    servers = {5000: ("ngsgd ui", "ngsgd ui --port 5001")}
    if with_dashboard:
        servers[8265] = ("Ray's dashboard", "ray start --dashboard-port 8266")
    for port, (purpose, fix) in servers.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                yield Finding("warn", "port", f"{port} ({purpose}) is in use", fix)
            else:
                yield Finding("ok", "port", f"{port} ({purpose}) is free")


def ray_traps() -> Iterator[Finding]:
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if token.is_file() and token.stat().st_mode & 0o077:
        yield Finding("warn", "Ray token", f"others on this machine can read {token}", f"chmod 600 {token}")
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        yield Finding("warn", "Ray token", "RAY_AUTH_MODE=disabled: any client on the network can "
                      "run code on this machine", "unset RAY_AUTH_MODE")
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ok", "Ray address",
                      f"RAY_ADDRESS={address} is the cluster of ngsgd train, unless cluster=local is given")
    if len(tempfile.gettempdir()) > 60:
        yield Finding("warn", "temp folder", f"{tempfile.gettempdir()} is too long for Ray's sockets", "export TMPDIR=/tmp")
