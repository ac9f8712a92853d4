"""The error where a Ray on this machine does not start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher import cli
from ngsgd.launcher.ray import cluster, session

ROOT = Path(__file__).resolve().parents[3]
# exception of Ray's start -> number of tries
ERRORS: list[tuple[BaseException, int]] = [
    (Exception("The current node timed out during startup. This could happen because some of the raylet failed to startup."), 2),
    (RaySystemError("System error: the raylet died"), 2),
    (RuntimeError("Failed to start the GCS: no free port"), 2),
    (TimeoutError("Timed out while waiting for the GCS"), 2),
    (ConnectionError("Could not read the address of the GCS"), 2),
    (OSError(98, "Address already in use"), 2),
    (KeyError("raylet_socket_name"), 2),
    (AssertionError(), 2),
    (SystemExit(1), 2),
    (ValueError("The configured object store size exceeds /dev/shm"), 1),
    (PermissionError(13, "Permission denied", "/dev/shm/ray"), 1),
    (ImportError("version clash"), 1),
    (AttributeError("module 'ray' has no attribute '_raylet'"), 1),
    (MemoryError(), 1),
]


class Start:
    """Takes the place of ray.init."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors, self.num_tries = list(errors), 0

    def __call__(self, **_options: Any) -> None:
        self.num_tries += 1
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Start]:
    """Make Ray's start raise errors, the last one each time."""
    # other tests share one Ray session
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(session, "scratch_folder", lambda: str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "OMP_WAIT_POLICY", "RAY_USAGE_STATS_ENABLED"):
        # restored at the end
        monkeypatch.setenv(name, "token")

    def patched(*errors: BaseException | None) -> Start:
        start = Start(*errors)
        monkeypatch.setattr(ray, "init", start)
        return start
    return patched


@pytest.mark.entry("Nc7", "Ray does not start, by any exception (time limit, no port, no /dev/shm, version clash)", "error",
                   "ClusterError (exit code 5) before the data are prepared, after a second try where one can help; the next step "
                   "is to wait, or `cluster=local`")
@pytest.mark.parametrize(("error", "num_tries"), ERRORS)
def test_every_error_of_a_start_is_raised_before_data_are_prepared(error: BaseException, num_tries: int,
                                                                  fail: Callable[..., Start], tmp_path: Path) -> None:
    start = fail(error)
    with pytest.raises(ClusterError, match="cluster=local") as caught:
        cluster.begin(ClusterConfig("ray"))
    assert caught.value.__cause__ is error and start.num_tries == num_tries
    assert not list(tmp_path.iterdir()), "the folder of Ray stays"
    # nothing is left to end
    cluster.end_unused()


@pytest.mark.entry("Lo1", "`ngsgd train cluster=ray` on a machine that is too busy for Ray to start", "error",
                   "exit code 5; the next step is to wait or to use `cluster=local`, and `ngsgd why` names the cluster")
@pytest.mark.parametrize("error", [error for error, _ in ERRORS])
def test_every_error_of_a_start_has_the_exit_code_of_clusters(error: BaseException, fail: Callable[..., Start],
                                                              tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    start = fail(error)
    # a custom task, which starts Ray with its workers
    arguments = ["train", "task=tests.tasks.blobs:make_task", f"task.search_path={ROOT}", "cluster=ray", "tracking.kind=none",
                 "name=run", "--quiet"]
    assert cli.main(arguments) == ClusterError.exit_code
    assert start.num_tries


def test_a_second_try_continues(fail: Callable[..., Start]) -> None:
    start = fail(Exception("The current node timed out during startup."), None)
    cluster.begin(ClusterConfig("ray"))
    assert cluster.connect(ClusterConfig("ray")) and start.num_tries == 2
    cluster.shutdown()


@pytest.mark.parametrize("error", [error for error, _ in ERRORS if isinstance(error, Exception)])
def test_every_error_of_joining_is_typed(error: Exception, fail: Callable[..., Start], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "require_head", lambda address: None)
    fail(error)
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379"):
        cluster.connect(ClusterConfig(address="10.0.0.1:6379"))
