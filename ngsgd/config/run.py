"""The complete configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngsgd.config.option import option
from ngsgd.config.sections.augmentation import AugmentConfig
from ngsgd.config.sections.cluster import ClusterConfig
from ngsgd.config.sections.data import DataConfig, EgsConfig
from ngsgd.config.sections.decoding import AlignConfig, CombinationConfig, DecodeConfig
from ngsgd.config.sections.failure import CheckpointConfig, FailureConfig
from ngsgd.config.sections.features import AdaptationConfig, FeatureConfig, IvectorConfig
from ngsgd.config.sections.model import ModelConfig, TaskConfig
from ngsgd.config.sections.objective import ObjectiveConfig
from ngsgd.config.sections.optimizer import OptimizerConfig
from ngsgd.config.sections.outer import OuterConfig
from ngsgd.config.sections.schedule import ScheduleConfig
from ngsgd.config.sections.sites import SitesConfig
from ngsgd.config.sections.tracking import TrackingConfig
from ngsgd.config.sections.tuning import TuneConfig

# outer iterations, with compression on Ray
_JOB_STATES_INTERVAL = 20


@dataclass(frozen=True)
class RunConfig:
    """All options of a run."""

    output_dir: str = option("runs", "folder of run folders, prepared data and the MLflow database")
    name: str = option("", "name of the run, the start of its folder's name; empty: corpus, model, optimizer, jobs and seed")
    seed: int = option(0, "random seed of training; every random number also depends on the outer "
                       "iteration and the job", low=0)
    init_model: str = option("", "run whose final model and priors initialize training; empty: random parameters")
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    adaptation: AdaptationConfig = field(default_factory=AdaptationConfig)
    ivectors: IvectorConfig = field(default_factory=IvectorConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    egs: EgsConfig = field(default_factory=EgsConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sites: SitesConfig = field(default_factory=SitesConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    combination: CombinationConfig = field(default_factory=CombinationConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)

    @property
    def job_states_interval(self) -> int:
        """Outer iterations between two checkpoints with the vectors of jobs; 1 without them."""
        # they travel uncompressed: each has as many bytes as 100 compressed deltas
        is_remote = self.cluster.codec is not None and self.cluster.kind not in ("local", "in_process")
        return _JOB_STATES_INTERVAL if is_remote else 1
