"""Addresses at which no Ray answers: one message within seconds, and Ray itself is never asked."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngsgd.config import ClusterConfig
from ngsgd.errors import ClusterError, ConfigError
from ngsgd.launcher import cli
from ngsgd.launcher.ray import jobs, probe
from ngsgd.launcher.ray.probe import (
    HeadWatch,
    require_cluster,
    require_dashboard,
    require_head,
    require_version,
)
from tests.launcher.records import Command


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(probe, "CONNECT_TIMEOUT_S", 0.3)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that does this with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection)
        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Connections are made, by the kernel, and nothing ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def speaks_http(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.0 404 Not Found\r\n\r\n")


def speaks_http2(connection: socket.socket) -> None:
    """Without support for Ray, as a proxy in between."""
    connection.recv(1000)
    connection.sendall(struct.pack("!3sBBI", b"\0\0\0", 4, 0, 0) + struct.pack("!3sBBI", b"\0\0\1", 1, 5, 1) + b"\x8d")


def serves(connection: socket.socket) -> None:
    """As a GCS answers grpc.health.v1.Health/Check."""
    connection.recv(1000)
    connection.sendall(struct.pack("!3sBBI", b"\0\0\0", 4, 0, 0))
    connection.sendall(struct.pack("!3sBBI", b"\0\0\7", 0, 0, 1) + b"\0\0\0\0\2\x08\1")


def test_a_closed_port_is_one_message_with_the_address(closed_port: int) -> None:
    with pytest.raises(ClusterError, match=f"127.0.0.1:{closed_port}") as found:
        require_head(f"127.0.0.1:{closed_port}")
    assert "\n" not in str(found.value)


def test_a_port_that_never_answers_is_one_message(silent_port: int) -> None:
    with pytest.raises(ClusterError, match=f"127.0.0.1:{silent_port}"):
        require_head(f"127.0.0.1:{silent_port}")
    with pytest.raises(ClusterError, match=f"127.0.0.1:{silent_port}"):
        require_dashboard(f"http://127.0.0.1:{silent_port}")


@pytest.mark.parametrize("serve", [speaks_http, speaks_http2])
def test_a_web_server_is_no_head(serve: Callable[[socket.socket], None]) -> None:
    with server(serve) as port, pytest.raises(ClusterError, match="server"):
        require_head(f"127.0.0.1:{port}")


def test_a_dashboard_may_answer_anything() -> None:
    """Its kind shows when a job is sent."""
    with server(speaks_http) as port:
        require_dashboard(f"http://127.0.0.1:{port}")


def test_a_head_passes_whatever_the_form_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(serves) as port:
        require_head(f"127.0.0.1:{port}")
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        require_head("auto")


def test_the_cluster_named_by_the_environment_is_checked_for_auto(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(ClusterError, match=str(closed_port)):
        require_head("auto")
    require_head("local")   # starts one, so that nobody has to be there


def test_a_check_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a name server does that never answers."""
    monkeypatch.setattr(probe, "CHECK_TIMEOUT_S", 0.1)
    release = threading.Event()
    monkeypatch.setattr(probe, "ask_server", lambda *_, **__: release.wait(30))
    try:
        with pytest.raises(ClusterError, match="head:6379"):
            require_head("head:6379")
    finally:
        release.set()


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:ray", "head:0", "head:65536",
                                     "ray://head:10001", "ray://head", "http://head:8265"])
def test_an_address_that_is_not_host_and_port_is_a_mistake_in_the_settings(address: str,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        require_head(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError):
        require_head("auto")


def test_a_client_address_of_ray_ends_a_command_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "cluster=ray", "cluster.address=ray://head:10001", f"output_dir={tmp_path}"]
    assert cli.main(words) == ConfigError.exit_code
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("installed", "is_old"), [("2.52.1", True), ("2.53.0", True), ("2.54.0", False), ("2.60.0", False),
                                                   ("3.0.0rc1", False), ("2.9.3", True), ("not installed", False)])
def test_a_ray_with_the_open_delete_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str, is_old: bool) -> None:
    monkeypatch.setattr(probe, "version", lambda package: installed)
    with pytest.raises(ConfigError, match=f"Ray {installed}") if is_old else contextlib.nullcontext():
        require_version()
    with pytest.raises(ConfigError, match=f"Ray {installed}") if is_old else contextlib.nullcontext():
        require_cluster(ClusterConfig("ray"))
    require_cluster(ClusterConfig("local"))


def test_the_oldest_ray_is_the_one_that_the_package_asks_for() -> None:
    from tests.docs.pages import ROOT

    oldest = ".".join(map(str, probe.OLDEST_RAY))
    assert f"ray[default]>={oldest}," in (ROOT / "pyproject.toml").read_text()


def test_training_ends_before_any_data_is_made(tmp_path: Path, closed_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["train", "cluster=ray", f"cluster.address=127.0.0.1:{closed_port}", f"output_dir={tmp_path}"])
    assert code == ClusterError.exit_code
    assert [line for line in capsys.readouterr().err.splitlines() if line] != []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("status",), ("logs", "job"), ("stop", "job"), ("submit", "cluster.num_workers=2")])
def test_commands_about_jobs_end_with_one_message(words: tuple[str, ...], silent_port: int, closed_port: int,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    for port in (silent_port, closed_port):
        assert cli.main([*words, "--dashboard-url", f"http://127.0.0.1:{port}"]) == ClusterError.exit_code
        wait, line = capsys.readouterr().err.splitlines()
        assert f"127.0.0.1:{port}" in wait, "a sign of life before the answer"
        assert str(port) in line


def test_doctor_reports_a_cluster_that_does_not_answer(tmp_path: Path, closed_port: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from ngsgd.launcher.doctor import cluster

    # other tests share one Ray session, which would be used instead of the address
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    (finding,) = cluster.nodes(f"127.0.0.1:{closed_port}", tmp_path)
    assert finding.verdict == "fail" and str(closed_port) in finding.found


@pytest.mark.parametrize("flags", [[], ["--json"], ["--quiet"]], ids=" ".join)
def test_doctor_shows_that_it_waits_for_a_cluster(flags: list[str], tmp_path: Path, closed_port: int, command: Command,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    printed = command("doctor", "--output-dir", str(tmp_path), "--address", f"127.0.0.1:{closed_port}", *flags, code=1)
    assert len(printed.err.splitlines()) == (flags != ["--quiet"])
    assert str(closed_port) in printed.out


def test_no_token_is_sent_before_a_server_answers(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setattr(jobs, "use_token", lambda door: pytest.fail("the token was read"))
    with pytest.raises(ClusterError):
        jobs.connect(jobs.job_server_of(SimpleNamespace(dashboard_url=f"127.0.0.1:{closed_port}", token_file="")))


class Clock:
    now = 0.0

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
