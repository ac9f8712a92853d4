"""Settings that no machine could carry out, rejected before anything is computed: a typing error must not end in the allocator."""

from __future__ import annotations

import math
from pathlib import Path

from ngsgd.config import ModelConfig, RunConfig
from ngsgd.errors import ConfigError
from ngsgd.models.saved import least_parameters

# archive passes of a run; a plan lists them all, which takes some seconds
_MAX_PASSES = 5_000_000
_BYTES = 4                  # of a float32 parameter
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def require_memory(model: ModelConfig, num_inputs: int = 1, num_classes: int = 1) -> None:
    """Raises ConfigError for a model whose parameters alone do not fit into this machine's memory."""
    if model._target_:
        return
    num_parameters, available = least_parameters(model, num_inputs, num_classes), _memory_bytes()
    if num_parameters * _BYTES > available:
        raise ConfigError(f"model.hidden_dim {model.hidden_dim} with model.num_layers {model.num_layers} makes at least "
                          f"{num_parameters:.2g} parameters, {num_parameters * _BYTES / 2**30:,.0f} GiB, and this machine has "
                          f"{available / 2**30:,.0f} GiB; lower them.")


def require_schedule(config: RunConfig, num_frames: int) -> None:
    """Raises ConfigError for a run of more archive passes than can be planned; `num_frames` is the training set's size."""
    num_examples = math.ceil(num_frames / config.egs.frames_per_eg)
    num_archives = max(1, round(num_examples / config.egs.samples_per_iter))
    num_passes = config.schedule.num_epochs * num_archives * config.egs.frames_per_eg
    if num_passes > _MAX_PASSES:
        raise ConfigError(f"egs.samples_per_iter {config.egs.samples_per_iter} divides {num_frames} frames into {num_archives} "
                          f"archives, and schedule.num_epochs {config.schedule.num_epochs:g} makes {num_passes:,.0f} passes over "
                          f"them; a run has at most {_MAX_PASSES:,}: raise the first or lower the second.")


def _memory_bytes() -> float:
    """Of this machine, or of the container if it may use less."""
    import psutil

    total = float(psutil.virtual_memory().total)
    try:
        return min(total, float(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        # no such limit: "max"
        return total
