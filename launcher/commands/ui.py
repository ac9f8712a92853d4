"""`ngsgd ui`: the MLflow dashboard of the runs of one output folder."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from ngsgd.errors import EXIT_OK, ConfigError, MissingExtraError, NgsgdError, PortInUseError
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.mlflow.metrics import COLUMNS
from ngsgd.launcher.mlflow.store import read_tracking, sqlite_uri
from ngsgd.launcher.mlflow.ui_app import MARK, MARK_HEADER
from ngsgd.launcher.screen import loading
from ngsgd.launcher.signals import sigterm_interrupts
from ngsgd.object_storage.urls import local_root

# MLflow with our check of origins around it
_APP = "ngsgd-ui"
# it takes 20 s on two busy cores, and longer with a cold disk
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
# our columns of the table of runs
_VIEW = "ngsgd"
# the default is MLflow's page for language models
_PAGES = "?workflowType=machine_learning"


class DashboardError(NgsgdError):
    """The MLflow server did not start, or ended."""


def command(arguments: Sequence[str]) -> int:
    parser = Parser("ui")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="folder of the runs, with mlflow.db (default: runs)")
    parser.declare({"--output-dir DIR": "FOLDER as an option",
        "--host HOST": ("127.0.0.1", "address to listen on (default: %(default)s, this machine only)"),
        "--port PORT": (5000, "port to listen on")})
    options = parser.parse_args(arguments)
    folder = local_root(options.folder or options.output_dir or "runs")
    return serve(folder, host=options.host, port=options.port)


def serve(output_dir: Path, *, host: str = "127.0.0.1", port: int = 5000, say: Callable[[str], None] = print) -> int:
    """Serve until Ctrl-C or SIGTERM, and end all processes of the server."""
    require_usable(output_dir, host, port)
    say(f"starting MLflow on {output_dir.absolute() / 'mlflow.db'} ...")
    with (tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="ngsgd-ui-") as plugin, sigterm_interrupts()):
        mark = secrets.token_hex(8)
        server = _start(server_command(output_dir, host, port), log, Path(plugin), mark)
        try:
            address = _address(host, port)
            with loading(f"waiting for the server at {address}"):
                _wait_until_healthy(server, mark, host, port, log)
                links = page_links(output_dir, address, _experiments(address))
            for line in [*links, "Stop it with Ctrl-C."]:
                say(line)
            server.wait()
            raise DashboardError(f"the MLflow server ended: {_last_line(log)}")
        except KeyboardInterrupt:
            say("stopped.")
            return EXIT_OK
        finally:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    # the process group, because MLflow starts workers
                    os.killpg(server.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(_STOP_TIMEOUT_S)


def page_links(output_dir: Path, address: str, experiments: Sequence[str]) -> list[str]:
    """Return links to the table and the charts of all experiments, and to the newest run."""
    if not experiments:
        return [f"runs        {address}/#/experiments{_PAGES}"]
    if len(experiments) == 1:
        view = f"&viewStateShareKey={_VIEW}" if _add_view(address, experiments[0]) else ""
        page, shown = f"{address}/#/experiments/{experiments[0]}/runs{_PAGES}", view
    else:
        page, shown = f"{address}/#/compare-experiments/s{_PAGES}&experiments={quote(json.dumps(list(experiments)))}", ""
    links = [f"runs        {page}{shown}", f"charts      {page}&compareRunsMode=CHART"]
    written = sorted(output_dir.glob("*/tracking.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    found = (read_tracking(file.parent) for file in written)
    if stored := next((one for one in found if one.get("tracking_uri") == sqlite_uri(output_dir)), None):
        links.append(f"newest run  {address}/#/experiments/{stored['experiment_id']}/runs/{stored['run_id']}/model-metrics{_PAGES}")
    return links


def _experiments(address: str) -> list[str]:
    """All experiments but MLflow's own one without runs; empty if the server does not answer."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = _post(address, "experiments/search", {"max_results": 1000, "view_type": "ACTIVE_ONLY"})
        numbers = [str(one["experiment_id"]) for one in found["experiments"]]
        runs = _post(address, "runs/search", {"experiment_ids": ["0"], "max_results": 1})
        return [number for number in numbers if number != "0" or runs.get("runs")]
    return []


def _post(address: str, what: str, content: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/{what}", json.dumps(content).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.loads(answer.read()))


def _add_view(address: str, experiment_id: str) -> bool:
    """Store the columns of the table as a shared view, as MLflow's button Share does."""
    view = {"searchFilter": "", "orderByKey": "attributes.start_time", "orderByAsc": False,
            "startTime": "ALL", "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
            "selectedColumns": [f"metrics.`{name}`" for name in COLUMNS]}
    # without it, the pages have MLflow's own columns
    with contextlib.suppress(OSError, ValueError):
        _post(address, "experiments/set-experiment-tag",
              {"experiment_id": experiment_id, "key": f"mlflow.sharedViewState.{_VIEW}", "value": json.dumps(view)})
        return True
    return False


def require_usable(output_dir: Path, host: str, port: int) -> None:
    """Raise one ConfigError with all problems."""
    port_problem = _port_problem(host, port)
    problems = [port_problem] if port_problem else []
    if not (output_dir / "mlflow.db").is_file():
        problems.insert(0, f"{output_dir} holds no mlflow.db, so there are no runs to show; give "
                           "the output_dir of a run: ngsgd ui PATH")
    if problems:
        is_in_use = len(problems) == 1 and problems[0].startswith(f"port {port} of")
        raise (PortInUseError if is_in_use else ConfigError)(problems)
    if importlib.util.find_spec("mlflow") is None:
        raise MissingExtraError("mlflow", "service", "ngsgd ui")


def _port_problem(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                return _in_use(host, port)
            reason = getattr(error, "strerror", None) or str(error)
            return f"{host}:{port} cannot be used ({reason}); choose another port with --port."
    return ""


def _in_use(host: str, port: int) -> str:
    with loading(f"asking which program uses port {port} of {host}"):
        user = "another ngsgd ui" if _mark_of(_address(host, port)) else "another program"
    return f"port {port} of {host} is in use by {user}; choose another one: ngsgd ui --port {min(port + 1, 65535)}"


def _mark_of(address: str) -> str | None:
    """The mark of the server that answers; empty for one that is no ngsgd ui, None if none does."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return str(answer.headers.get(MARK_HEADER, ""))
    except urllib.error.HTTPError:
        return ""
    except (OSError, http.client.HTTPException):
        return None


def server_command(output_dir: Path, host: str, port: int) -> list[str]:
    return [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", sqlite_uri(output_dir),
            "--artifacts-destination", str(output_dir.absolute() / "mlartifacts"),
            "--app-name", _APP, "--host", host, "--port", str(port), "--workers", "1"]


def _start(command: list[str], log: IO[bytes], plugin: Path, mark: str) -> subprocess.Popen[bytes]:
    # an entry point, where MLflow looks for servers
    package = plugin / "ngsgd_ui-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ngsgd-ui\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[mlflow.app]\n{_APP} = ngsgd.launcher.mlflow.ui_app:app\n")
    path = [str(plugin), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    # without job execution: saves a process of 236 MB
    settings = {MARK: mark, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, path))}
    # a new session: Ctrl-C reaches only this process, which ends the server with its children
    return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log,
                            stdin=subprocess.DEVNULL, start_new_session=True)


def _wait_until_healthy(server: subprocess.Popen[bytes], mark: str, host: str, port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            # another server may have taken the port since the check
            if problem := _port_problem(host, port):
                raise ConfigError(problem)
            raise DashboardError(f"the MLflow server did not start: {_last_line(log)}")
        found = _mark_of(_address(host, port))
        if found == mark:
            return
        if found is not None:
            # another server took the port since the check
            raise ConfigError(_in_use(host, port))
        time.sleep(0.3)
    raise DashboardError(f"the MLflow server did not answer within {_START_TIMEOUT_S:.0f} s: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _address(host: str, port: int) -> str:
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"
