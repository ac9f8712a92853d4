"""Shared fixtures and the environment of all tests."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# set before torch, Ray or MLflow is imported anywhere
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
# at Ray's own 15 a worker starves next to anything else that computes
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
# nor may tests write to the server of whoever runs them
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("MLFLOW_EXPERIMENT_NAME", None)
os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
os.environ.pop("MLFLOW_RUN_ID", None)
# the record of runs that a user began must not be that of whoever runs the tests
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ngsgd-state-")

import numpy as np
import pytest
from hypothesis import settings

from tests import process_state
from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_runtest_protocol, pytest_runtestloop

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_runtest_protocol", "pytest_runtestloop"]

# a slow example is no fault where other jobs run
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


GOLDEN = Path(__file__).parent / "golden"


def pytest_configure() -> None:
    """Select products and kernels for processors of the other maker (tests/matrix.py)."""
    if os.environ.get("NGSGD_TEST_VENDOR") == "other":
        from ngsgd.ops.kernels import native

        is_intel = native.is_made_by("GenuineIntel")
        native.is_made_by = lambda vendor: (vendor == "GenuineIntel") is not is_intel  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Every test draws the same numbers in every run, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """A test leaves what all tests of a process share as it found it (`tests/process_state.py`)."""
    state = process_state.taken()
    yield
    process_state.restore(state)


# folders of tests whose workers are threads
_THREADS = ("tests/launcher/ray/", "tests/cluster/")


@pytest.fixture(autouse=True)
def no_collection_beside_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """No automatic garbage collection while threads save and restore random states of torch.

    torch.get_rng_state holds a lock of the generator while it allocates a Python object. That may
    start a collection, whose finalizers release the interpreter's lock. Another thread then waits
    for the lock of the generator and holds that of the interpreter.
    """
    if not request.node.nodeid.startswith(_THREADS):
        yield
        return
    gc.disable()
    yield
    gc.enable()


class Golden:
    """One file of reference vectors: cases of named arrays, each with a config."""

    def __init__(self, name: str) -> None:
        self.npz = np.load(GOLDEN / name)

    def cases(self, prefix: str = "") -> list[str]:
        return sorted({key.split("__")[0] for key in self.npz.files if "__" in key and key.startswith(prefix)})

    def config(self, case: str) -> dict[str, Any]:
        return json.loads(str(self.npz[f"{case}__config"]))  # type: ignore[no-any-return]

    def has(self, case: str, array: str) -> bool:
        return f"{case}__{array}" in self.npz.files

    def __call__(self, case: str, array: str) -> Any:
        return self.npz[f"{case}__{array}"]
