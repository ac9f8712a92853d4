"""Findings of `ngsgd doctor` and its fixes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngsgd.cluster.fingerprint import version_digest
from ngsgd.launcher.commands.cluster import doctor
from ngsgd.launcher.doctor import cluster, machine
from ngsgd.launcher.doctor.machine import Finding
from tests.launcher.records import Command

ROOT = Path(__file__).resolve().parents[3]


def findings(output_dir: Path, *, workers: int = 1, tracking_uri: str = "") -> dict[str, Finding]:
    return {finding.what: finding for finding in doctor.examine(str(output_dir), workers, "", tracking_uri)}


def test_a_machine_that_can_train_passes(tmp_path: Path, command: Command) -> None:
    found = json.loads(command("doctor", "--output-dir", str(tmp_path), "--json").out)
    assert {one["verdict"] for one in found} <= {"ok", "warn"}
    assert {"python", "torch", "ray", "threads", "storage", "tracking", "port"} <= {one["what"] for one in found}
    assert all(one["fix"] for one in found if one["verdict"] != "ok")


def test_nothing_is_written_by_looking_and_a_folder_that_cannot_be_written_fails(
        tmp_path: Path, command: Command) -> None:
    findings(tmp_path / "new" / "runs")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    told = command("doctor", "--output-dir", str(tmp_path / "file"), "--quiet", code=1).out
    assert "fail storage" in told


@pytest.mark.parametrize(("free", "verdict"), [(0, "fail"), (2**30, "warn"), (2**40, "ok")])
def test_a_full_disk_fails_and_a_nearly_full_one_warns(free: int, verdict: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    [found] = machine.storage(tmp_path)
    assert (found.verdict, bool(found.fix)) == (verdict, verdict != "ok")


def test_more_workers_than_cores_and_spinning_threads_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    assert findings(tmp_path, workers=cores + 1)["threads"].verdict == "warn"
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 1))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY=PASSIVE" in findings(tmp_path)["threads"].fix
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert findings(tmp_path)["threads"].verdict == "ok"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("processor", ["AVX2", "DEFAULT"])
def test_uncompilable_code_is_reported_where_it_would_be_used(native: bool, processor: str, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngsgd.ops.fisher_projection.is_native", lambda: native)
    monkeypatch.setattr("ngsgd.ops.kernels.native.capability", lambda: processor)
    found = findings(tmp_path)["compiled code"]
    assert found.verdict == ("ok" if native or processor == "DEFAULT" else "warn")
    assert ("g++" in found.fix) == (found.verdict == "warn")


def shadowed() -> list[Finding]:
    return [found for found in machine.shadows() if found.what == "shadowed"]


def test_an_empty_folder_of_an_older_installation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ngsgd").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = shadowed()
    # unlike rm -r it removes nothing else, even if the folder is filled meanwhile
    assert (found.verdict, found.fix) == ("warn", f"rmdir {tmp_path / 'ngsgd'}")


def test_a_clone_that_python_does_not_import_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clones" / "ngsgd" / "ngsgd").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "clones"), str(ROOT), *sys.path])
    assert shadowed() == []


@pytest.mark.parametrize("is_current", [True, False])
def test_a_clone_that_python_imports_is_never_removed(is_current: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clones" / "ngsgd" / "ngsgd").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "clones" if is_current else tmp_path)
    # as with an editable installation: no package further down
    others = [entry for entry in sys.path if not (Path(entry) / "ngsgd").exists()]
    monkeypatch.setattr(sys, "path", ["" if is_current else str(tmp_path / "clones"), *others])
    [found] = shadowed()
    assert found.verdict == "warn"
    assert str(tmp_path / "clones") in found.fix
    assert not re.search(r"\brm\b|rmdir", found.fix)


def test_a_token_that_others_can_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("x")
    token.chmod(0o644)
    assert findings(tmp_path)["Ray token"].fix == f"chmod 600 {token}"
    # another file is the token that counts
    other = tmp_path / "token"
    other.write_text("x")
    other.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    assert "Ray token" not in findings(tmp_path)
    other.chmod(0o640)
    assert findings(tmp_path)["Ray token"].fix == f"chmod 600 {other}"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    token.chmod(0o600)
    assert "Ray token" not in findings(tmp_path)


def test_a_taken_port_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 5000))
        except OSError:
            pass   # somebody else's server has it already, which is as good
        else:
            taken.listen()
        ports = [finding for finding in doctor.examine(str(tmp_path), 1) if finding.what == "port"]
    assert ports[0].verdict == "warn" and "--port" in ports[0].fix


class _Server(BaseHTTPRequestHandler):
    late_s = 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        import time

        return super().date_time_string(time.time() + self.late_s)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("late_s", "verdict"), [(0.0, "ok"), (90.0, "warn")])
def test_a_tracking_server_is_asked_and_its_clock_compared(late_s: float, verdict: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Server, "late_s", late_s)
    server = HTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://127.0.0.1:{server.server_port}"
    found = findings(tmp_path, tracking_uri=uri)
    assert (found["tracking"].verdict, found["clock"].verdict) == ("ok", verdict)
    server.shutdown()
    server.server_close()
    assert findings(tmp_path, tracking_uri=uri)["tracking"].verdict == "fail"


def test_a_node_is_checked_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / ".doctor"
    mark.touch()
    (tmp_path / "left" / "ngsgd").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "left"))
    cores = len(os.sched_getaffinity(0))
    found = cluster.report_node(str(mark), cores + 1)
    assert (found.sees, found.writes, found.code) == (True, True, version_digest())
    assert list(tmp_path.iterdir()) != [] and not list(tmp_path.glob(".doctor-*")), "it leaves nothing behind"
    lines = list(cluster.judged("n1 (10.0.0.1)", found, tmp_path, skew_s=90.0))
    told = {line.what: line for line in lines}
    assert (told["node"].verdict, told["clock"].verdict) == ("ok", "warn")
    assert told["threads"].verdict == "warn" and "n1 (10.0.0.1)" in told["threads"].found
    assert told["shadowed"].verdict == "warn"


def test_a_folder_that_cannot_be_made_fails_and_the_other_checks_remain(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    import ray

    monkeypatch.setattr("ngsgd.launcher.ray.cluster.connect", lambda config: False)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "runs")
    found = json.loads(command("doctor", "--json", "--address", "head:6379", "--output-dir", folder,
                               code=1).out)
    assert {"python", "storage", "Ray"} <= {one["what"] for one in found}
    [node] = [one for one in found if one["what"] == "node"]
    assert (node["verdict"], bool(node["fix"])) == ("fail", True)


@pytest.mark.parametrize(("now", "offset"), [(10.0, 0.0), (14.0, 0.0), (9.0, -1.0), (20.0, 6.0)])
def test_the_time_of_a_question_is_no_offset_of_a_clock(now: float, offset: float) -> None:
    assert cluster.skew(10.0, now, 14.0) == offset


@pytest.mark.parametrize(("sees", "writes", "code", "verdict", "told"), [
    (True, False, "", "fail", " write "), (True, True, "other", "fail", "another version"),
    # its workers fetch the data
    (False, True, "", "warn", "fetch"), (False, False, "", "warn", "fetch")])
def test_a_node_that_cannot_work_fails(sees: bool, writes: bool, code: str, verdict: str, told: str,
                                       tmp_path: Path) -> None:
    found = cluster.NodeReport(sees, writes, code or version_digest(), ())
    first, _ = cluster.judged("n1", found, tmp_path, skew_s=0.0)
    assert first.verdict == verdict and told in first.found and first.fix
