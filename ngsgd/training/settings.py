"""The settings of a run that the engine reads; those of models and data belong to the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from ngsgd.config import (
    ClusterConfig,
    FailureConfig,
    OptimizerConfig,
    OuterConfig,
    PreconditionerConfig,
    RunConfig,
    ScheduleConfig,
)
from ngsgd.preconditioners.build import mean_of_states
from ngsgd.training.job import Fisher


@dataclass(frozen=True)
class EngineSettings:
    """Sections of a run's configuration, and single settings that stand in other sections of it."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    preconditioner: PreconditionerConfig = field(default_factory=PreconditionerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    seed: int = 0
    on_corrupt: Literal["stop", "quarantine"] = "stop"  # on a damaged archive
    equalize_layers: bool = False      # adapt learning rates so that all layers change alike
    last_layer_factor: float = 1.0     # relative change of the last layer, with `equalize_layers`
    num_averaging_threads: int = 1

    @classmethod
    def of(cls, config: RunConfig, *, num_averaging_threads: int = 1) -> EngineSettings:
        """The engine's part of a complete configuration."""
        sections = {one.name: getattr(config, one.name) for one in fields(cls)[:7]}
        return cls(**sections, on_corrupt=config.egs.on_corrupt,  # type: ignore[arg-type]
                   equalize_layers=config.objective.equalise_layers,
                   last_layer_factor=config.objective.last_layer_factor,
                   num_averaging_threads=num_averaging_threads)

    @property
    def keeps_fisher(self) -> bool:
        """Whether a job continues from the Fisher estimates of the previous job of its slot."""
        if self.preconditioner.kind == "none":
            return self.optimizer.ng_state != "reset"
        return self.preconditioner.averaging != "reset"

    @property
    def mean_fisher(self) -> Callable[[Sequence[Fisher]], Fisher] | None:
        """Averages the jobs' states where every job continues from the average; None otherwise."""
        return mean_of_states(self.preconditioner)
