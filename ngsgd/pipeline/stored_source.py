"""Speech in object storage: a run reads a local copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ngsgd.config import DataConfig
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.mirror import mirrored
from ngsgd.object_storage.urls import is_url


def with_local_source(data: DataConfig, report: Callable[[str], object]) -> DataConfig:
    """Copy `data.source` if it is a URL, and return settings with paths of the copy.

    Other options whose values are below that URL name files of the copy, too.

    Args:
        data: the section `data`.
        report: receives one line if files are copied.

    Raises:
        DataError, ObjectStorageError: the files cannot be copied.
    """
    url = data.source.rstrip("/")
    if not is_url(url):
        return data
    folder = mirrored(ObjectStore(url), report)
    return replace(data, **{name: _local(value, url, folder) for name, value in asdict(data).items()})


def _local(value: Any, url: str, folder: Path) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_local(one, url, folder) for one in value)
    if not isinstance(value, str) or f"{value.rstrip('/')}/"[:len(url) + 1] != f"{url}/":
        return value
    return str(folder / value[len(url):].strip("/"))
