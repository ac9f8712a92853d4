"""Modules that the fork server imports before it starts workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ngsgd.cluster.fork_server import modules_of
from ngsgd.cluster.groups import make_worker
from ngsgd.config import RunConfig
from ngsgd.tasks.speech import SpeechTaskSpec
from tests.tiers import HANGS_S

# prints the modules of a child that has not done anything
CHILD = """
import socket, sys
from ngsgd.cluster.fork_server import fork_server

ours, theirs = socket.socketpair()
one = fork_server().launch(exec, (
    "import os, sys; os.write(1, b'yes' if 'ngsgd.tasks.speech' in sys.modules else b'no')",),
    theirs, "child", sys.argv[1:])
assert one.exit_code(60.0) == 0
"""


def test_modules_of_this_package_are_imported_and_those_of_users_are_not() -> None:
    spec = SpeechTaskSpec(RunConfig(), "egs")
    assert modules_of(spec, make_worker) == ["ngsgd.cluster.groups", "ngsgd.tasks.speech"]
    assert modules_of(Path(), test_modules_of_this_package_are_imported_and_those_of_users_are_not, 5) == []


# a program of a user starts the fork server of multiprocessing, then changes its environment
FOREIGN = """
import multiprocessing, os, sys
context = multiprocessing.get_context("forkserver")
process = context.Process(target=int)
process.start()
process.join()
assert process.exitcode == 0
os.environ["OF_THE_USER"] = "new"
os.environ.pop("OF_BEFORE")
""" + CHILD.replace("b'yes' if", "os.environ.get('OF_THE_USER', '').encode() + os.environ.get('OF_BEFORE', '').encode() if")


def test_a_fork_server_of_the_user_and_an_old_environment_do_not_serve_workers() -> None:
    done = subprocess.run([sys.executable, "-c", FOREIGN, "ngsgd.tasks.speech"], capture_output=True, text=True, check=True,
                          timeout=HANGS_S, env={**os.environ, "OF_BEFORE": "old"})
    assert done.stdout == "new"


def test_a_process_starts_with_the_modules() -> None:
    for modules, expected in (["ngsgd.tasks.speech"], "yes"), (["ngsgd.of_no_name"], "no"):
        done = subprocess.run([sys.executable, "-c", CHILD, *modules], capture_output=True, text=True, check=True, timeout=HANGS_S)
        assert done.stdout == expected


CALL = "from ngsgd.pipeline.api import require_main_guard\n"


@pytest.mark.parametrize(("script", "is_rejected"), [
    ("require_main_guard()\n", True),
    ("def main():\n    require_main_guard()\n\n\nmain()\n", True),
    ("require_main_guard()\nif __name__ == '__main__':\n    pass\n", True),
    ("if __name__ == '__main__':\n    require_main_guard()\n", False),
    ("def main():\n    require_main_guard()\n\n\nif __name__ == '__main__':\n    main()\n", False)])
def test_a_script_needs_the_guard_before_the_call(script: str, is_rejected: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CALL + script)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    assert done.returncode == is_rejected
    assert ("ConfigError" in done.stderr) == is_rejected, done.stderr


def test_a_command_and_a_module_of_a_package_are_not_imported_by_workers(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", f"{CALL}require_main_guard()"], check=False).returncode == 0
    (tmp_path / "__main__.py").write_text(f"{CALL}require_main_guard()\n")
    assert subprocess.run([sys.executable, "-m", tmp_path.name], cwd=tmp_path.parent, check=False).returncode == 0
