"""Files of the coordinator for workers on other nodes, through Ray's object store."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ngsgd.data.fetching.source import FetchError
from ngsgd.files import open_regular

# bytes in the object store and in both processes, for each part that is under way
PART_BYTES = 4 << 20
# parts that a worker requests in advance, so that the network does not wait for it
_AHEAD = 2
_PART_S = 300.0
_READERS = 4


class FileServer:
    """The actor: reads parts of files on the coordinator's machine.

    Args:
        paths: path of each file by SHA-256; no other file is read.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)

    def size(self, digest: str) -> int | None:
        """Return the size of a file in bytes; None if it is not offered, or not there any more."""
        try:
            return os.stat(self._paths[digest]).st_size
        except (KeyError, OSError):
            return None

    def part(self, digest: str, offset: int) -> bytes:
        """Return at most `PART_BYTES` bytes of a file."""
        with open_regular(Path(self._paths[digest])) as file:
            file.seek(offset)
            return file.read(PART_BYTES)


class CoordinatorSource:
    """Files that a `FileServer` reads; see `ngsgd.data.fetching.source.FileSource`."""

    def __init__(self, server: Any) -> None:
        self._server = server

    where = "the coordinator's machine"

    def size(self, digest: str) -> int | None:
        size: int | None = self._got(self._server.size.remote(digest))
        return size

    def parts(self, digest: str, size: int) -> Iterator[bytes]:
        requested: deque[Any] = deque()
        for offset in range(0, size, PART_BYTES):
            requested.append(self._server.part.remote(digest, offset))
            if len(requested) > _AHEAD:
                yield self._got(requested.popleft())
        while requested:
            yield self._got(requested.popleft())

    def _got(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=_PART_S)
        except RayError as error:
            reason = str(error).strip().split("\n", 1)[0][:200]
            raise FetchError(f"{self.where} did not send a file of the prepared data ({reason})") from error


def start_server(paths: Mapping[str, str]) -> Any:
    """Start a `FileServer` on the node of this process."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 2, "max_concurrency": _READERS,
                               "scheduling_strategy": here}
    return ray.remote(**options)(FileServer).remote(dict(paths))
