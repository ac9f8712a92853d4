"""A Ray instance that a run starts, in a separate process: open ports and remaining files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import HANGS_S

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray")]

# a stranger has no token, and asks the head for its nodes as a driver does
_CODE = """
import json, os, pathlib, stat, subprocess, sys
os.environ.pop("RAY_AUTH_TOKEN", None)
from ngsgd.launcher.ray.cluster import begin, connect, end_unused, log_folder, shutdown
from ngsgd.config import ClusterConfig
import psutil, ray
begin(ClusterConfig("ray"))
assert connect(ClusterConfig("ray"))
@ray.remote(num_cpus=0)
def host():
    return ray.util.get_node_ip_address()
found = {"worker": ray.get(host.remote()), "gcs": ray.get_runtime_context().gcs_address}
me = psutil.Process()
family = [me, *me.children(recursive=True)]
found["listens"] = sorted({c.laddr.ip for p in family for c in p.net_connections("tcp") if c.status == "LISTEN"})
from ngsgd.launcher.ray.probe import require_head
require_head(found["gcs"])   # raises unless it takes a real head for one
logs = pathlib.Path(log_folder())
found["logs"] = logs.is_dir()
found["folder"] = str(logs.parents[2])
found["mode"] = stat.S_IMODE(logs.parents[2].stat().st_mode)
sockets = list(pathlib.Path(found["folder"]).rglob("sockets/*"))
found["sockets"] = [len(str(path)) for path in sockets]
stranger = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)"
environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
asked = subprocess.run([sys.executable, "-c", stranger, found["gcs"]], env={**environment, "RAY_AUTH_MODE": "disabled"},
                       capture_output=True, text=True)
found["stranger"] = asked.returncode
shutdown()
begin(ClusterConfig("ray"))
end_unused()   # the data were bad
children = [p.name() for p in me.children(recursive=True) if p.status() != "zombie"]
found["after"] = ray.is_initialized() or children
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path_factory.mktemp("home"))}
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=False,
                          timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_nothing_listens_beyond_this_machine(found: dict[str, Any]) -> None:
    assert found["worker"] == "127.0.0.1" and found["gcs"].startswith("127.0.0.1:")
    assert {address.removeprefix("::ffff:") for address in found["listens"]} == {"127.0.0.1"}


def test_a_process_without_the_token_is_refused(found: dict[str, Any]) -> None:
    assert found["stranger"] != 0


def test_its_sockets_are_in_a_folder_of_the_user_alone_which_is_removed(found: dict[str, Any]) -> None:
    assert found["logs"] and found["mode"] == 0o700
    assert found["sockets"] and max(found["sockets"]) <= 107
    assert not Path(found["folder"]).exists()


def test_nothing_is_left_of_a_ray_that_was_begun_for_a_run_that_failed(found: dict[str, Any]) -> None:
    assert found["after"] == []
