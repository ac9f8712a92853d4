"""Changes of a process end with their test: the second case reads the state of the first."""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import mlflow
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from ngsgd.cluster.fork_server import fork_server
from tests.process_state import PARTS

KEPT = "NGSGD_TEST_ENVIRONMENT"


def change_logging() -> None:
    """What Hydra's `disabled` does: no logger that exists prints any more."""
    logging.disable(logging.ERROR)
    logging.getLogger("hydra").disabled = True
    logging.getLogger("mlflow").setLevel(logging.FATAL)
    logging.root.addHandler(logging.NullHandler())


def start_fork_server() -> None:
    """In another environment than that of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "/nonexistent")
        fork_server()


CHANGES: dict[str, Callable[[], Any]] = {
    "server of MLflow": lambda: mlflow.set_tracking_uri("http://127.0.0.1:1"),
    "environment": lambda: os.environ.update({KEPT: "set"}),
    "folder": lambda: os.chdir("/"),
    "mask of new files": lambda: os.umask(0o77),
    "folder of temporary files": lambda: setattr(tempfile, "tempdir", "/"),
    "arguments": lambda: sys.argv.append("more"),
    "hooks": lambda: setattr(threading, "excepthook", print),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "switch interval": lambda: sys.setswitchinterval(sys.getswitchinterval() * 2),
    "garbage collection": gc.disable,
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8" if locale.setlocale(locale.LC_ALL) == "C" else "C"),
    "signals": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "logging": change_logging,
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "threads of torch": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "precision of products": lambda: torch.set_float32_matmul_precision("medium"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "fork servers": start_fork_server,
    "Hydra": lambda: setattr(GlobalHydra.instance(), "hydra", object()),
}
first: dict[str, Any] = {}


def value(part: str) -> Any:
    read = PARTS[part].read()
    if part != "logging":
        return read
    # a logger that a module made since then is no change
    return read[0], {name: state for name, state in read[1].items() if state != (logging.NOTSET, False, True, [], [])}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_what_a_test_changes_ends_with_it(part: str, is_first: bool) -> None:
    before = value(part)
    assert first.setdefault(part, before) == before
    CHANGES[part]()
    assert value(part) != before
