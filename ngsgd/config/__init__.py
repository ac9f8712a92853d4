"""The configuration of a training run: options with unit, range, default and help text.

One dataclass per section (`ngsgd.config.sections`); `RunConfig` holds all of them. The dataclasses
hold plain values, without YAML. `check` returns all wrong values at once, `unused` the options
without effect. The library's classes repeat some defaults in their signatures;
tests/test_defaults.py compares them.

Section and equation numbers are those of arXiv 1410.7455. Learning rates are per frame, on the
objective function summed over the minibatch (Kaldi's convention).
"""

from ngsgd.config.build import build, default_with, with_kinds
from ngsgd.config.option import Problem, choices_of, option, types_of
from ngsgd.config.rules import check, check_values, problems_of
from ngsgd.config.run import RunConfig
from ngsgd.config.sections.augmentation import AugmentConfig
from ngsgd.config.sections.cluster import ClusterConfig
from ngsgd.config.sections.data import DataConfig, EgsConfig
from ngsgd.config.sections.decoding import AlignConfig, CombinationConfig, DecodeConfig
from ngsgd.config.sections.failure import CheckpointConfig, FailureConfig
from ngsgd.config.sections.features import AdaptationConfig, FeatureConfig, IvectorConfig
from ngsgd.config.sections.model import ModelConfig, TaskConfig
from ngsgd.config.sections.objective import ObjectiveConfig
from ngsgd.config.sections.optimizer import METHODS, OptimizerConfig
from ngsgd.config.sections.outer import OuterConfig
from ngsgd.config.sections.schedule import ScheduleConfig
from ngsgd.config.sections.sites import SitesConfig
from ngsgd.config.sections.tracking import TrackingConfig
from ngsgd.config.sections.tuning import ProxyConfig, TuneConfig
from ngsgd.config.unused import Unused, unused, unused_in

__all__ = ["METHODS", "AdaptationConfig", "AlignConfig", "AugmentConfig", "CheckpointConfig",
           "ClusterConfig", "CombinationConfig", "DataConfig", "DecodeConfig", "EgsConfig",
           "FailureConfig", "FeatureConfig", "IvectorConfig", "ModelConfig", "ObjectiveConfig",
           "OptimizerConfig", "OuterConfig", "Problem", "ProxyConfig", "RunConfig",
           "ScheduleConfig", "SitesConfig", "TaskConfig", "TrackingConfig", "TuneConfig", "Unused",
           "build", "check", "check_values", "choices_of", "default_with", "option", "problems_of",
           "types_of", "unused", "unused_in", "with_kinds"]
