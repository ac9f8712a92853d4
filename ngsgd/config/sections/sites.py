"""Options of training at several sites, whose clusters are joined by slow networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ngsgd.config.option import option
from ngsgd.errors import ConfigError


@dataclass(frozen=True)
class SitesConfig:
    """Sites: each one is a run with its own cluster, and all of them train one model."""

    jobs: Mapping[str, Any] | None = option(
        None, "number of parallel jobs of each site, such as {east: 4, west: 4}; empty: one site")
    name: str = option("", "this site, a name in sites.jobs", used="jobs")
    exchange: str = option("", "URL of object storage (s3://, gs://, az://) or folder that all sites reach", used="jobs")
    period: int = option(
        4, "outer iterations between two averages over the sites; a site averages its own jobs in each one",
        unit="outer iterations", low=1, high=100000, used="jobs")
    delay: int = option(1, "outer iterations between the delta of a site and the use of the "
                        "average over sites, which hide the network; 0: sites wait for each other",
                        unit="outer iterations", low=0, high=1, used="jobs")
    compression: Literal["none", "int8", "sparse"] = option(
        "int8", "lossy format of the parameter deltas of sites, as of cluster.compression; the "
        "last ones are int8 with sparse", used="jobs")
    wait_s: float = option(
        60.0, "minimum time that a site waits for the others; it waits longer if its last outer "
        "iterations took longer", unit="s", above=0.0, used="jobs")

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs by site, in the order of the names; empty for a run of one site."""
        return {name: int((self.jobs or {})[name]) for name in sorted(self.jobs or {})}

    @property
    def own_jobs(self) -> slice | None:
        """The jobs of an outer iteration that run at this site; None: all of them."""
        if not self.jobs:
            return None
        counts = self.counts
        before = sum(count for name, count in counts.items() if name < self.name)
        return slice(before, before + counts[self.name])

    def require_none(self, command: str) -> None:
        """Raise ConfigError if a command that computes for one site is given several."""
        if self.jobs:
            raise ConfigError(f"{command} computes for one site only; remove all sites.* options.")


def total_jobs(num_workers: Any, jobs_of_sites: Mapping[str, Any] | None) -> Any:
    """Return the default number of parallel jobs: of all sites, or one per worker."""
    counts = list((jobs_of_sites or {}).values())
    return sum(counts) if counts and all(isinstance(count, int) for count in counts) else num_workers
