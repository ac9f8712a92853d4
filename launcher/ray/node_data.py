"""Prepared data for the nodes of a run that do not see its folders.

Their workers fetch it from object storage, or from the coordinator through Ray's object store.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ngsgd.data.fetching.files import Offer, RemoteData
from ngsgd.data.fetching.source import FetchError, StoreSource
from ngsgd.errors import reason_of
from ngsgd.files import open_regular
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.task import TaskSpec

# bytes in the object store and in both processes, for each part that is under way
PART_BYTES = 4 << 20
_AHEAD = 2  # parts that a worker requests in advance, so that the network does not wait for it
_PART_S = 300.0
_READERS = 4
_GB = 1e9


@dataclass(frozen=True)
class UnseenFolder:
    """The answer of a worker that starts on a node without a folder of the run."""

    host: str
    ip: str
    folder: str
    reason: str = ""  # why its files could not be fetched; empty before that was tried

    def message(self, output_dir: str) -> str:
        """For people: which node, which folder, what to do."""
        is_default = Path(self.folder).is_relative_to(Path(output_dir).absolute())
        setting = f"output_dir ({output_dir})" if is_default else "data.cache_dir"
        if self.reason:
            return (f"node {self.host} ({self.ip}) does not see {self.folder}, the prepared data of the run, and could not fetch "
                    f"it: {self.reason.rstrip('.')}")
        return (f"node {self.host} ({self.ip}) does not see {self.folder}, the prepared data of the run, and cannot fetch it. "
                "Workers of several ranks fetch from object storage only: set data.store=URL. Or put "
                f"{setting} on a file system that all machines share under the same path, or set data.cache_dir to a folder "
                "there. ngsgd doctor --address HEAD:PORT checks each node")


def unseen_here(folders: Sequence[str]) -> UnseenFolder | None:
    """Return the first of the folders that this process does not see; None if it sees all."""
    for folder in folders:
        if not os.path.isdir(folder):
            return UnseenFolder(os.uname().nodename, ray.util.get_node_ip_address(), folder)
    return None


class NodeData:
    """Access to the folders of a run, for nodes that do not see them; `report` names each node.

    Nothing is started or read before the first of these nodes.
    """

    def __init__(self, spec: TaskSpec, report: Callable[[str], object]) -> None:
        self._spec = spec
        self._report = report
        self._offers: Sequence[Offer] | None = None
        self._server: Any = None
        self._nodes: set[str] = set()

    def for_node(self, unseen: UnseenFolder) -> RemoteData | None:
        """Return access for a node; None if a folder cannot be fetched."""
        spec = self._spec
        if not isinstance(spec, SpeechTaskSpec):
            return None
        data = spec.config.data
        # the ranks of a group are no Ray actors
        if spec.settings.cluster.ranks_per_worker > 1 and not data.store:
            return None
        if self._offers is None:
            self._offers = spec.offers()
        if unseen.folder not in [offer.folder.path for offer in self._offers]:
            return None
        if not data.store and self._server is None:
            # on the node of this process
            here = ray.get_runtime_context().get_node_id()
            options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 2, "max_concurrency": _READERS,
                                       "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
            paths = {digest: str(path) for offer in self._offers for digest, path in offer.paths.items()}
            self._server = ray.remote(**options)(FileServer).remote(paths)
        source = StoreSource(data.store) if data.store else CoordinatorSource(self._server)
        if unseen.ip not in self._nodes:
            self._nodes.add(unseen.ip)
            self._report(f"node {unseen.host} ({unseen.ip}) does not see {unseen.folder}; its workers fetch the prepared data "
                         f"from {source.where}")
        return RemoteData(tuple(offer.folder for offer in self._offers), source, int(data.node_cache_gb * _GB))

    def close(self) -> None:
        """End the server of files, if there is one."""
        if self._server is not None:
            ray.kill(self._server)
            self._server = None


class FileServer:
    """The actor: reads parts of files, by SHA-256, and no other files of the coordinator."""

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
            raise FetchError(f"{self.where} did not send a file of the prepared data "
                             f"({reason_of(error)})") from error
