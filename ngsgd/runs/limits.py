"""Rejection of settings that exceed any machine, before anything is allocated."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from ngsgd.config import ModelConfig, RunConfig
from ngsgd.errors import ConfigError
from ngsgd.models.build import least_parameters

# maximum archive passes of a run; a plan lists them all, which takes some seconds
_MAX_PASSES = 5_000_000
_BYTES = 4                  # of a float32 parameter
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def require_memory(model: ModelConfig, num_inputs: int = 1, num_classes: int = 1) -> None:
    """Raise ConfigError for a model whose parameters alone exceed the memory of this machine."""
    import psutil
    if model._target_:
        return
    num_parameters = least_parameters(model, num_inputs, num_classes)
    available = float(psutil.virtual_memory().total)
    # a container may have less; without a limit: "max"
    with contextlib.suppress(OSError, ValueError):
        available = min(available, float(CGROUP_LIMIT.read_text()))
    if num_parameters * _BYTES > available:
        raise ConfigError(f"model.hidden_dim {model.hidden_dim} with model.num_layers "
                          f"{model.num_layers} requires at least {num_parameters:.2g} parameters, "
                          f"{num_parameters * _BYTES / 2**30:,.0f} GiB, but this machine has "
                          f"{available / 2**30:,.0f} GiB; lower them.")


def require_schedule(config: RunConfig, num_frames: int) -> None:
    """Raise ConfigError for a run of too many archive passes over `num_frames` frames."""
    num_examples = math.ceil(num_frames / config.egs.frames_per_eg)
    num_archives = max(1, round(num_examples / config.egs.samples_per_iter))
    num_passes = config.schedule.num_epochs * num_archives * config.egs.frames_per_eg
    if num_passes > _MAX_PASSES:
        raise ConfigError(f"egs.samples_per_iter {config.egs.samples_per_iter} divides "
                          f"{num_frames} frames into {num_archives} archives, and "
                          f"schedule.num_epochs {config.schedule.num_epochs:g} requires "
                          f"{num_passes:,.0f} passes over them, but a run has at most "
                          f"{_MAX_PASSES:,}: raise the first or lower the second.")
