"""A Ray cluster: joining or starting it, dividing its GPUs, and what its errors mean."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayActorError, RayError, RayTaskError

from ngsgd.cluster.exchange.collective_client import Ending
from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, ClusterTokenError, FailureKind, NgsgdError, RayStartError, failure_kind, reason_of
from ngsgd.launcher.ray.capacity import gpus_per_worker, need_of, require_room
from ngsgd.launcher.ray.probe import require_head, require_version
from ngsgd.launcher.ray.session import PrivateFolder, divert

_STORE_BYTES = 512 * 2**20  # plasma on one machine; parameters and results of some tens of workers
_JOIN_TRIES = 3             # a second apart
# of Ray's start: the second one helps where a busy machine was too slow for Ray's own time limits
_START_TRIES = 2
# these are the same in another try
_LASTING = (AttributeError, ImportError, MemoryError, PermissionError, TypeError, ValueError)
_WORKER_ENV = {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads of one worker would starve another
# variables of this process, for its workers; not OMP_NUM_THREADS, since workers have
# cluster.threads_per_worker, and Ray sets the variable to 1 in the process of a job
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_")
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the configuration of the Ray job that started this process
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_folder: PrivateFolder | None = None  # of the Ray that this process started
_begun: _Start | None = None  # the start of `begin` that `connect` did not take yet


class _Start(threading.Thread):
    """Starts a Ray, and lives as long as the process: the kernel ends Ray with this thread."""

    def __init__(self) -> None:
        super().__init__(name="ray-start", daemon=True)
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        divert()
        try:
            _start()
        except BaseException as error:
            self.error = error
        self.done.set()
        threading.Event().wait()


def begin(config: ClusterConfig) -> None:
    """Start a Ray for the run, for `connect`; `end_unused` ends it where that is never called.

    Raises:
        RayStartError: it did not start. Data preparation, which may take hours, would be in vain.
    """
    global _begun  # noqa: PLW0603
    if config.kind == "ray" and not config.address and not ray.is_initialized():
        _begun = _Start()
        # OpenBLAS ends its threads at a fork, and a BLAS call of another thread then never returns.
        # So nothing is computed while the processes of Ray start.
        _begun.done.wait()
        if (error := _begun.error) is not None:
            _begun = None
            raise error


def end_unused() -> None:
    """End a Ray that was begun and never connected to, because the run failed before."""
    global _begun  # noqa: PLW0603
    if _begun is not None:
        _begun.done.wait()
        shutdown()
    _begun = None


def require_workers(config: ClusterConfig, report: Callable[[str], object]) -> None:
    """Raise ClusterError unless this process may join the run's cluster and a worker fits there.

    An autoscaler that has scaled the cluster to zero starts a machine first.
    """
    # left again: data preparation may take hours, and Ray ends a process whose head is lost
    was_connected = ray.is_initialized()
    connect(config)
    try:
        need = need_of(config.ranks_per_worker * max(1, config.threads_per_worker), gpus_per_worker(config, is_own=False))
        require_room(need, config, ray.get_runtime_context().gcs_address, report)
    finally:
        if not was_connected:
            ray.shutdown()


def connect(config: ClusterConfig) -> bool:
    """Join the cluster of `config.address`, or start a Ray here; True if it was started here."""
    global _begun  # noqa: PLW0603
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # a test session, or a user's own program
    if _begun is None and ray.is_initialized():
        return False
    require_version()
    if config.address:
        require_head(config.address)
    divert()
    if not config.address:
        if _begun is None:
            _start()
        _begun = None
        return True
    try:
        _join(config.address)
    # Ray raises Exception itself, too
    except Exception as error:
        raise _not_joined(config.address, error) from error
    return False


def _not_joined(address: str, error: Exception) -> ClusterError:
    """The reason why a head that answered a moment ago could not be joined, and the next step."""
    said = f"the Ray cluster at {address} could not be joined"
    if isinstance(error, (AuthenticationError, ConnectionError)):
        # where Ray takes its token from, never the token itself
        if os.environ.get("RAY_AUTH_TOKEN"):
            found = "the token is that of RAY_AUTH_TOKEN"
        elif path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
            found = f"the token is that of the file RAY_AUTH_TOKEN_PATH={path}"
        elif (Path.home() / ".ray" / "auth_token").is_file():
            found = "the token is that of ~/.ray/auth_token"
        else:
            found = "there is no token"
        if (mode := os.environ.get("RAY_AUTH_MODE", "")) != "token":
            advice = (f"RAY_AUTH_MODE is {mode or 'not set'}, so that Ray sends no token: export RAY_AUTH_MODE=token. With it, "
                      f"here {found}. If that is no help, the version of Ray is another one, or no Ray runs on this machine.")
        else:
            advice = (f"The token or the version of Ray is probably another one, or no Ray runs on this machine. Here "
                      f"{found}; set RAY_AUTH_TOKEN to the head's token (on the head: cat ~/.ray/auth_token).")
        return ClusterTokenError(f"{said}: its head answers, but rejects this process ({reason_of(error)}). {advice}")
    reason = " ".join(str(error).split())[:400].rstrip(".")
    if isinstance(error, (ValueError, TypeError)) and _JOB in os.environ:
        return ClusterError(f"{said}: Ray rejects the runtime environment of this Ray job ({reason}). Correct the runtime_env of "
                            "the job (in a RayJob: runtimeEnvYAML), then submit it again.")
    return ClusterError(f"{said}: {reason}. Install the head's versions of Ray and Python here, and run on this machine, unless it "
                        f"is done: ray start --address={address}")


def shutdown(*, keep_logs: bool = False) -> None:
    """End the Ray that `connect` started, and remove its folder without the logs to keep."""
    global _folder  # noqa: PLW0603  Ray itself is one per process
    ray.shutdown()
    if _folder is not None:
        _folder.close(keep=keep_logs)
    _folder = None


def log_folder() -> str:
    """Where the logs are of the Ray that this process started; empty for another one's."""
    return _folder.logs if _folder else ""


def _join(address: str) -> None:
    """Connect to a head that answers; with a wrong token, Ray would retry 20 times."""
    from ray._private import ray_constants
    if hasattr(ray_constants, "NUM_REDIS_GET_RETRIES"):
        ray_constants.NUM_REDIS_GET_RETRIES = _JOIN_TRIES
    # Ray sets the variables of the Ray job that started this process, and rejects a second value
    job = json.loads(os.environ.get(_JOB, "{}"))
    runtime_env = (job.get("runtime_env") or {}) if isinstance(job, dict) else job
    of_job = runtime_env.get("env_vars") or {} if isinstance(runtime_env, dict) else runtime_env
    if not isinstance(of_job, dict):
        raise ValueError(f"{_JOB} holds no mapping env_vars")
    own = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED) and name != "OMP_NUM_THREADS"}
    worker_env = {name: one for name, one in {**_WORKER_ENV, **own}.items() if name not in of_job}
    handler = signal.getsignal(signal.SIGTERM)
    with _without_stderr():
        ray.init(address=address, runtime_env={"env_vars": worker_env} if worker_env else None, **_QUIET)
    if handler is not None and threading.current_thread() is threading.main_thread():
        # Ray's C++ code has replaced it: SIGTERM would end the process with a crash dump
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard stderr of Ray's C++ code while it connects; the exception has the same content."""
    sys.stderr.flush()
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _start() -> None:
    for is_last in (*(False,) * (_START_TRIES - 1), True):
        try:
            _try_to_start()
            return
        except (Exception, SystemExit) as error:
            if is_last or isinstance(error, _LASTING):
                raise RayStartError(f"Ray could not be started ({type(error).__name__}: {reason_of(error)}); if this machine is "
                                    "busy, wait and repeat the command, or use cluster=local, which needs no Ray.") from error


def _try_to_start() -> None:
    global _folder  # noqa: PLW0603
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # workers inherit it; a runtime_env would make them wait for one of Ray's agents
    for name, value in _WORKER_ENV.items():
        os.environ.setdefault(name, value)
    # uploaded files of a Ray job are in its own cluster; workers inherit its variables from here
    os.environ.pop(_JOB, None)
    # a token of this run alone: whoever reaches a port of Ray without one can run code
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "RAY_AUTH_MODE" not in os.environ:
        # the default for a local cluster is a token in some versions, and none in others
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray has read its settings when it was imported; private, so it may not be there
        settings = getattr(ray._raylet, "Config", None)
        if settings is not None:
            settings.initialize("")
    _folder = PrivateFolder()
    try:
        with _on_loopback():
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, _temp_dir=_folder.temp_dir,
                     **_QUIET)
    except BaseException:
        # another try would find a half-connected process
        with contextlib.suppress(Exception):
            ray.shutdown()
        _folder.close()
        _folder = None
        raise


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray listens on 127.0.0.1 alone: no other machine joins a cluster that a run has to itself."""
    from ray._private import ray_constants
    # as on systems where Ray has no clusters; in a version without these, the token remains
    name, variable = "ENABLE_RAY_CLUSTER", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = getattr(ray_constants, name, None), os.environ.get(variable)
    if before[0] is not None:
        setattr(ray_constants, name, False)
    os.environ[variable] = "0"
    try:
        yield
    finally:
        if before[0] is not None:
            setattr(ray_constants, name, before[0])
        if before[1] is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before[1]


def cause_of(error: RayTaskError) -> Exception:
    """Return the error of a worker that could not start."""
    cause = error.cause
    if isinstance(cause, NgsgdError):
        return cause
    name = type(cause).__name__
    kind = failure_kind(name, str(cause))
    return ClusterError(f"a worker could not start ({name}: {cause}); is the same version of ngsgd installed on every node?",
                        failure=kind if kind is FailureKind.MEMORY else FailureKind.START_EXCEPTION)


def exchange_error(error: RayTaskError) -> Exception:
    """What a worker raised while results were averaged."""
    cause = error.cause
    if isinstance(cause, NgsgdError):
        return cause
    return ClusterError(f"a worker failed while results were averaged ({type(cause).__name__}: {cause}); see the Ray log of its "
                        "node, or set cluster.exchange=auto, then resume.")


def how_it_ended(error: RayError) -> Ending:
    text = str(error)
    if "SIGKILL" in text or "signal 9" in text:
        return Ending("killed by SIGKILL", FailureKind.KILLED)
    if "its node has died" in text or "node failure" in text:
        return Ending("its node was lost", FailureKind.NODE)
    if isinstance(error, RayActorError):
        return Ending("its process ended", FailureKind.ENDED)
    # the out-of-memory killer's error is no RayActorError
    kind = failure_kind(type(error).__name__, text)
    if kind is not FailureKind.MEMORY:
        kind = FailureKind.NODE if "raylet" in text or "NodeDied" in text else FailureKind.UNKNOWN
    return Ending(reason_of(error), kind)
