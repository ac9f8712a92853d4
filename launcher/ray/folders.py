"""Folders that the workers of a run read, and the nodes that do not see them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray.util


@dataclass(frozen=True)
class UnseenFolder:
    """The answer of a worker that starts on a node without a folder of the run."""

    host: str
    ip: str
    folder: str
    # why its files could not be fetched; empty before that was tried
    reason: str = ""

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
