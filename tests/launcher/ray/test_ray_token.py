"""The error where the head of a Ray cluster answers and does not let this process in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError
from ngsgd.launcher.ray import cluster

SECRET = "b" * 64


@pytest.fixture
def head_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Ray 2.54 and later behave with another token than the head's: the health service answers,
    ray.init does not connect.
    """
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
