"""An S3 service on this machine, with the objects of one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.object_storage.service import running
    with running(monkeypatch.setenv) as found:
        yield found


@pytest.fixture
def store(service: Any, tmp_path: Path) -> Any:
    from ngsgd.object_storage.client import ObjectStore
    # the service keeps objects for the life of the process
    return ObjectStore(f"s3://bucket/{tmp_path.name}")
