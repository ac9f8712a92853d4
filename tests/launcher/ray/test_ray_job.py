"""The environment of workers where this process is the entry point of a Ray job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, ClusterTokenError
from ngsgd.launcher.ray import cluster

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
_KNOWN = ("OMP_WAIT_POLICY", "OMP_PROC_BIND", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments with which a Ray that answers was joined."""
    calls: list[dict[str, Any]] = []
    # other tests share one Ray session
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **given: calls.append(given))
    monkeypatch.setattr(cluster, "require_head", lambda address: None)
    for name in [name for name in os.environ if name.startswith(("OMP_", "NCCL_", "GLOO_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)
    return calls


def _join(joined: list[dict[str, Any]]) -> dict[str, str]:
    """The variables that ngsgd asks Ray to set in the workers."""
    cluster.connect(ClusterConfig(address="10.0.0.1:6379"))
    found: dict[str, str] = (joined[-1]["runtime_env"] or {}).get("env_vars", {})
    return found


@pytest.mark.entry("Ra1")
@pytest.mark.parametrize("of_job", [*_KNOWN, ""])
def test_a_variable_of_the_job_is_left_to_ray(of_job: str, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _join(joined) == _DEFAULTS, "a process that no job started"
    for name in _KNOWN:
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv(_JOB, json.dumps({"runtime_env": {"env_vars": {of_job: "job"}}, "metadata": {}}))
    assert _join(joined) == {name: "mine" for name in _KNOWN if name != of_job}


@pytest.mark.parametrize("runtime", [None, {}, {"env_vars": {}}, {"pip": ["x"]}, {"env_vars": None}])
def test_a_job_without_variables_gets_the_defaults(runtime: Any, joined: list[dict[str, Any]],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_JOB, json.dumps({"runtime_env": runtime, "metadata": {}}))
    # Ray sets it to 1 in the processes of a job; cluster.threads_per_worker decides
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert _join(joined) == _DEFAULTS


@pytest.mark.entry("Ra1")
@pytest.mark.parametrize("job", ["{", "[]", '{"runtime_env": {"env_vars": [1]}}', "3"])
def test_a_damaged_job_configuration_is_an_error_of_the_job(job: str, joined: list[dict[str, Any]],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_JOB, job)
    with pytest.raises(ClusterError, match="runtime_env") as caught:
        _join(joined)
    assert not isinstance(caught.value, ClusterTokenError) and joined == []


@pytest.mark.entry("Ra1")
@pytest.mark.parametrize(("error", "is_token"), [
    (ValueError("Failed to merge the Job's runtime env"), False), (TypeError("env_vars must be of type Dict"), False),
    (RuntimeError("Version mismatch: The cluster was started with:\n Ray: 2.55.0"), False), (OSError("no descriptor"), False),
    (ConnectionError("Failed to connect to Ray cluster"), True), (AuthenticationError("no token"), True)])
def test_only_a_rejected_connection_is_an_error_of_the_token(error: Exception, is_token: bool, joined: list[dict[str, Any]],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_given: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ClusterError) as caught:
        _join(joined)
    assert isinstance(caught.value, ClusterTokenError) == is_token and caught.value.__cause__ is error


SECRET = "b" * 64


@pytest.fixture
def head_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Ray 2.54 behaves with another token: the head is healthy, ray.init does not connect."""
    def refuse(address: str) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)   # other tests share one Ray session
    monkeypatch.setattr(cluster, "require_head", lambda address: None)
    monkeypatch.setattr(cluster, "_join", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


@pytest.mark.entry("S3", "the token of this shell is not that of the Ray head at `cluster.address`", "error",
                   "ClusterError after about 5 s: the head answers and refuses this process; the message names the token, where it "
                   "was taken from (variable or file, never its value) and how to get the head's")
@pytest.mark.parametrize(("source", "told"), [
    ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN"), ("RAY_AUTH_TOKEN_PATH", "the file RAY_AUTH_TOKEN_PATH="),
    ("file", "~/.ray/auth_token"), ("none", "no token")])
def test_a_wrong_token_is_named_with_its_source_and_never_shown(source: str, told: str, tmp_path: Path, head_that_refuses: None,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    if source == "RAY_AUTH_TOKEN":
        monkeypatch.setenv(source, SECRET)
    elif source != "none":
        file = tmp_path / ".ray" / "auth_token" if source == "file" else tmp_path / "token"
        file.parent.mkdir(exist_ok=True)
        file.write_text(SECRET)
        if source == "RAY_AUTH_TOKEN_PATH":
            monkeypatch.setenv(source, str(file))
    with pytest.raises(ClusterError) as caught:
        cluster.connect(ClusterConfig(address="10.0.0.1:6379"))
    message = str(caught.value)
    assert "10.0.0.1:6379" in message and told in message and "RAY_AUTH_TOKEN" in message
    assert SECRET not in message and "cluster.address" not in message


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_a_mode_without_token_is_named_before_the_token(mode: str, tmp_path: Path, head_that_refuses: None,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(SECRET)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    else:
        monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE.*RAY_AUTH_MODE=token.*auth_token"):
        cluster.connect(ClusterConfig(address="10.0.0.1:6379"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ClusterError) as caught:
        cluster.connect(ClusterConfig(address="10.0.0.1:6379"))
    assert "RAY_AUTH_MODE" not in str(caught.value)
