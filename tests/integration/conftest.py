"""One Ray for all tests that need it, because starting it costs seconds; the command line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    import ray
    # keeps Ray from writing a token into the home directory
    os.environ["RAY_AUTH_TOKEN"] = "test-session"
    # socket paths must stay short
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=200 * 2**20,
                 log_to_driver=False, _temp_dir=str(Path(folder).resolve()))
        yield
        ray.shutdown()
