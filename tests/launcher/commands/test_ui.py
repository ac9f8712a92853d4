"""The dashboard command: messages before it starts anything, and no server is left behind."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ngsgd.errors import ConfigError
from ngsgd.launcher.commands import ui
from ngsgd.launcher.mlflow import ui_app
from ngsgd.launcher.mlflow.store import sqlite_uri
from ngsgd.launcher.reports.progress import dashboard_command
from tests.tiers import HANGS_S


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    (tmp_path / "mlflow.db").touch()
    return tmp_path


def test_dashboard_command_is_what_a_shell_takes() -> None:
    assert dashboard_command("runs") == "ngsgd ui"
    assert dashboard_command(Path("/a b")) == "ngsgd ui '/a b'"


def test_a_missing_database_and_ports_that_cannot_be_used_are_one_sentence_each(output_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for folder, port, named in ((output_dir / "none", 0, r"mlflow\.db"), (output_dir, 99999, "used"),
                                    (output_dir, taken.getsockname()[1], "--port")):
            with pytest.raises(ConfigError, match=named):
                ui.serve(folder, port=port)


def test_a_program_on_the_port_is_asked_in_public(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be slow, and the command waits for it."""
    def hang_up(server: socket.socket) -> None:
        server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=hang_up, args=(silent,), daemon=True).start()
        port = silent.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            ui.serve(output_dir, port=port)
    assert str(port) in capsys.readouterr().err


def test_links_lead_to_the_newest_run(output_dir: Path) -> None:
    # the newest one is in another store
    for number, (name, uri) in enumerate({"a": sqlite_uri(output_dir), "b": "http://tracking.example"}.items()):
        (output_dir / name).mkdir()
        stored = {"experiment_id": "3", "run_id": f"{name}bc", "tracking_uri": uri}
        (output_dir / name / "tracking.json").write_text(json.dumps(stored))
        os.utime(output_dir / name / "tracking.json", (number, number))
    # no server keeps our columns here
    runs, _charts, newest = ui.page_links(output_dir, "http://127.0.0.1:1", ["3"])
    assert "#/experiments/3/runs?workflowType=machine_learning" in runs and "viewStateShareKey" not in runs
    assert "runs/abc/model-metrics?workflowType=machine_learning" in newest
    runs, charts, _newest = ui.page_links(output_dir, "http://127.0.0.1:1", ["3", "5"])
    for link in (runs, charts):
        assert json.loads(parse_qs(urlsplit(link.split()[1]).fragment.partition("?")[2])["experiments"][0]) == ["3", "5"]
    assert len(ui.page_links(output_dir, "http://127.0.0.1:1", [])) == 1


def test_a_server_that_ends_is_reported_with_its_last_output(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "server_command", lambda *_: [sys.executable, "-c", "print('no flask here'); exit(1)"])
    with pytest.raises(ui.DashboardError, match="start"):
        ui.serve(output_dir, port=free_port(), say=lambda _: None)


def test_a_port_that_another_server_took_meanwhile_is_a_mistake(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dashboards start at once: the port is free for both, and one server answers to both."""
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(ui_app.MARK_HEADER, "of the first")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass
    first = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=first.serve_forever, daemon=True).start()
    monkeypatch.setattr(ui, "require_usable", lambda *_: None)
    monkeypatch.setattr(ui, "server_command", lambda *_: ["sleep", "60"])
    with pytest.raises(ConfigError, match=rf"ngsgd ui --port {first.server_port + 1}"):
        ui.serve(output_dir, port=first.server_port, say=lambda _: None)
    first.shutdown()
    first.server_close()


def test_ending_it_leaves_no_process_behind(output_dir: Path) -> None:
    """A stand-in server with a child process, as MLflow has."""
    port, pids = free_port(), output_dir / "pids"
    server = ("import http.server, os, subprocess, sys; child = subprocess.Popen(['sleep', '60']); "
              f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); "
              "answer = lambda self: (self.send_response(200), "
              "self.send_header('x-ngsgd-ui', os.environ['NGSGD_UI_MARK']), self.end_headers()); "
              "handler = type('H', (http.server.BaseHTTPRequestHandler,), {'do_GET': answer}); "
              f"http.server.HTTPServer(('127.0.0.1', {port}), handler).serve_forever()")
    code = (f"import sys; from pathlib import Path; from ngsgd.launcher.commands import ui; "
            f"ui.server_command = lambda *_: [sys.executable, '-c', {server!r}]; "
            f"sys.exit(ui.serve(Path({str(output_dir)!r}), port={port}, say=lambda line: print(line, flush=True)))")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(3)]
        process.terminate()
        assert process.wait(HANGS_S) == 0
    assert f"http://127.0.0.1:{port}/" in told[1]
    assert "Ctrl-C" in told[2]
    # a process that stays fails by the timeout of pytest
    while any(is_alive(int(pid)) for pid in pids.read_text().split()):
        time.sleep(0.05)


def scope(method: str = "POST", path: str = "/graphql", **headers: str) -> dict[str, Any]:
    found = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": "127.0.0.1:5000", **headers}.items()]
    return {"type": "http", "method": method, "path": path, "headers": found}


@pytest.mark.parametrize(("request_", "is_foreign"), [
    (scope(), False), (scope("GET"), False), (scope(origin="http://127.0.0.1:5000"), False),
    (scope(origin="http://evil.example"), True), (scope("GET", origin="http://evil.example"), True), (scope(origin="null"), True),
    (scope(origin="http://127.0.0.1:3000"), True), (scope("GET", sec_fetch_site="cross-site"), True),
    (scope("GET", sec_fetch_site="same-origin"), False), (scope("GET", "/prefix/graphql/", sec_fetch_site="same-site"), True),
    (scope("GET", "/api/2.0/mlflow/runs/get", origin="http://evil.example"), False),
    (scope("DELETE", "/anything", origin="http://evil.example"), True), (scope("PATCH", "/", sec_fetch_site="cross-site"), True),
    (scope("GET", "/", sec_fetch_site="cross-site"), False),   # a link to the page
    ({**scope(path="/ws", origin="http://evil.example"), "type": "websocket"}, True), ({**scope(), "headers": []}, False)])
def test_pages_of_other_sites_change_nothing_and_ask_nothing_of_graphql(request_: dict[str, Any], is_foreign: bool) -> None:
    assert ui_app.is_foreign(request_) is is_foreign
    answers: list[Any] = []

    async def mlflow(*_: Any) -> None:
        answers.append("mlflow")

    async def send(message: Any) -> None:
        answers.append(message.get("status", message.get("code", "body")))
    asyncio.run(ui_app.SameOriginOnly(mlflow)(request_, None, send))
    assert answers[0] == ("mlflow" if not is_foreign else 1008 if request_["type"] == "websocket" else 403)


def test_origins_that_the_user_allowed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", "https://a.example, https://b.example")
    assert not ui_app.is_foreign(scope(origin="https://b.example"))
    assert ui_app.is_foreign(scope(origin="https://c.example"))


@pytest.mark.services
def test_the_server_that_is_started_refuses_a_foreign_graphql_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiments = [client.create_experiment(name) for name in ("digits-relu", "yesno-relu")]
    port, found, links = free_port(), list[int](), list[str]()
    address = f"http://127.0.0.1:{port}"

    def ask(**headers: str) -> int:
        headers |= {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{address}/graphql", b'{"query": "{__typename}"}', headers)
        try:
            with urllib.request.urlopen(asked, timeout=HANGS_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def say(line: str) -> None:
        links.append(line)
        if "Ctrl-C" in line:
            found[:] = [ask(), ask(Origin=address), ask(Origin="http://evil.example")]
            raise KeyboardInterrupt
    assert ui.serve(tmp_path, port=port, say=say) == 0
    assert found == [200, 200, 403]
    [runs] = [line for line in links if line.startswith("runs ")]
    assert all(f"%22{number}%22" in runs for number in experiments) and "%220%22" not in runs, "MLflow's own experiment is empty"


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
