"""The head of a Ray cluster: missed only when it is gone for long."""

from __future__ import annotations

import socket

import pytest

from ngsgd.errors import ClusterError
from ngsgd.launcher.ray.probe import HeadWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_head_that_is_gone_for_half_of_rays_patience_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    at_exit: list[object] = []
    monkeypatch.setattr("ngsgd.launcher.ray.probe.atexit.register", at_exit.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        clock = Clock()
        watch = HeadWatch(address, clock=clock)
        for clock.now in (5.0, 50.0, 100.0):
            watch.check()
    clock.now = 106.0
    watch.check()  # gone, but it may come back
    assert at_exit == []
    clock.now = 111.0
    with pytest.raises(ClusterError, match=rf"{address}.* 11 s"):
        watch.check()
    assert watch.is_lost
    assert len(at_exit) == 1  # Ray's clean-up must not come first: it would change the exit code


def test_it_is_looked_for_now_and_then_not_at_every_question() -> None:
    clock = Clock()
    watch = HeadWatch("127.0.0.1:1", clock=clock)  # nobody listens there
    for clock.now in (1.0, 2.0, 5.9):
        watch.check()
    assert watch.last_check_s == 0.0
    clock.now = 6.1
    watch.check()
    assert watch.last_check_s == 6.1
