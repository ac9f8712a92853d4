"""Modules that the fork server imports before it starts workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_process_starts_with_the_modules() -> None:
    for modules, expected in (["ngsgd.tasks.speech"], "yes"), (["ngsgd.of_no_name"], "no"):
        done = subprocess.run([sys.executable, "-c", CHILD, *modules], capture_output=True, text=True, check=True, timeout=HANGS_S)
        assert done.stdout == expected
