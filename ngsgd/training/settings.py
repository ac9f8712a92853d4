"""The settings of a run that the training loop reads; tasks hold those of models and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ngsgd.config import ClusterConfig, FailureConfig, OptimizerConfig, OuterConfig, RunConfig, ScheduleConfig, SitesConfig
from ngsgd.preconditioners.build import mean_of_states
from ngsgd.training.job import Fisher


@dataclass(frozen=True)
class EngineSettings:
    """Sections of a run configuration, and single options of other sections."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    sites: SitesConfig = field(default_factory=SitesConfig)
    seed: int = 0
    # action on a damaged archive
    on_corrupt: Literal["stop", "quarantine"] = "stop"
    num_averaging_threads: int = 1
    # folder of runs, whose free disk space is reported
    output_dir: str = "runs"

    @classmethod
    def of(cls, config: RunConfig, *, num_averaging_threads: int = 1) -> EngineSettings:
        """Return the training settings of a complete configuration."""
        return cls(schedule=config.schedule, optimizer=config.optimizer, outer=config.outer, cluster=config.cluster,
                   failure=config.failure, sites=config.sites, seed=config.seed, on_corrupt=config.egs.on_corrupt,
                   num_averaging_threads=num_averaging_threads, output_dir=config.output_dir)

    @property
    def jobs_keep_state(self) -> bool:
        """Whether a job also depends on a vector of the previous job of its slot."""
        return self.outer.jobs_keep_state or self.cluster.codec is not None

    @property
    def mean_fisher(self) -> Callable[[Sequence[Fisher]], Fisher] | None:
        """Function that averages the states of the jobs if every job continues from the average."""
        return mean_of_states(self.optimizer)
