"""Prepared data for the nodes of a run that do not see its folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from ngsgd.data.fetching.files import Offer, RemoteData
from ngsgd.data.fetching.source import StoreSource
from ngsgd.launcher.ray.file_server import CoordinatorSource, start_server
from ngsgd.launcher.ray.folders import UnseenFolder
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.task import TaskSpec

_GB = 1e9


class NodeData:
    """Access to the folders of a run, for nodes that do not see them.

    Nothing is started or read before the first of these nodes.

    Args:
        spec: the task of the run.
        report: receives one line per node.
    """

    def __init__(self, spec: TaskSpec, report: Callable[[str], object]) -> None:
        self._spec = spec
        self._report = report
        self._offers: Sequence[Offer] | None = None
        self._server: Any = None
        self._nodes: set[str] = set()

    def for_node(self, unseen: UnseenFolder) -> RemoteData | None:
        """Return access for a node; None if a folder cannot be fetched.

        The folder of a task of another kind cannot be fetched. The ranks of a group are no Ray
        actors, so they fetch from `data.store` only.
        """
        spec = self._spec
        if not isinstance(spec, SpeechTaskSpec):
            return None
        data = spec.config.data
        if spec.settings.cluster.ranks_per_worker > 1 and not data.store:
            return None
        if self._offers is None:
            self._offers = spec.offers()
        if unseen.folder not in [offer.folder.path for offer in self._offers]:
            return None
        if not data.store and self._server is None:
            self._server = start_server({digest: str(path) for offer in self._offers for digest, path in offer.paths.items()})
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


def fetching(spec: TaskSpec, remote: RemoteData) -> TaskSpec:
    """Return the description of a task whose folders are fetched."""
    return spec.fetching(remote) if isinstance(spec, SpeechTaskSpec) else spec
