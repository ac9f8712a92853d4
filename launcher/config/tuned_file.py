"""What `ngsgd tune` learned, as settings: written once, used as `ngsgd train +tuned=FILE`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.config.yaml_text import read_yaml_text

if TYPE_CHECKING:  # brings torch
    from ngsgd.hypergrad.search_space import HyperSpace

_WORDS = ("+tuned=", "tuned=")


def settings_of(config: RunConfig, space: HyperSpace, values: Mapping[str, Sequence[float]], num_jobs: int) -> dict[str, Any]:
    """Nested settings that train as the proxy was trained: rates are effective ones there, and l2 is per frame."""
    found: dict[str, Any] = {"schedule": {}, "optimizer": {"kind": config.optimizer.kind}}
    if "schedule" in values:
        rates = [rate / num_jobs for rate in values["schedule"]]
        middle = math.exp(sum(map(math.log, rates)) / len(rates))
        found["schedule"] = {"lr_initial": middle, "lr_final": middle, "lr_factors": [rate / middle for rate in rates]}
    if "momentum" in values:
        found["optimizer"]["momentum"] = min(values["momentum"][0], 0.999)
    # half of l2 |w|^2 on the loss summed over a minibatch, against weight_decay |w|^2 per frame,
    # divided among the jobs
    per_frame = num_jobs / (2.0 * config.schedule.minibatch_size)
    keys = {"layer_lr": ("lr_factor", 1.0), "l2": ("weight_decay", per_frame), "max_change": ("max_change", 1.0)}
    options = {layer: {key: values[part][index] * unit for part, (key, unit) in keys.items() if part in values}
               for index, layer in enumerate(space.layers)}
    if any(options.values()):
        found["optimizer"]["layer_options"] = options
    if "init_scale" in values:
        found["model"] = {"init_scales": dict(zip(space.layers, values["init_scale"], strict=True))}
    return {section: content for section, content in found.items() if content}


def write(path: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    import yaml

    text = "".join(f"# {line}\n" for line in comments) + str(yaml.safe_dump(dict(settings), sort_keys=False))
    write_text(path, text)


def expanded(overrides: Sequence[str]) -> list[str]:
    """The overrides with the settings of a tuned file in the place of its name, so that what follows may change them."""
    return [line for override in overrides for line in (_read(override) if override.startswith(_WORDS) else [override])]


def _read(override: str) -> list[str]:
    import yaml

    path = Path(override.partition("=")[2])
    try:
        content = yaml.safe_load(read_yaml_text(path))
    except OSError as error:
        raise ConfigError(f"{override}: {path} cannot be read ({error.strerror}); give the tuned.yaml that ngsgd tune "
                          "wrote.") from None
    except (yaml.YAMLError, UnicodeError, RecursionError):
        raise ConfigError(f"{override}: {path} is not valid YAML; tune again, or restore it.") from None
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(f"{override}: {path} holds no settings; give the tuned.yaml that ngsgd tune wrote.")
    if wrong := [name for name in ("_target_", "search_path", "args") if name in content.get("model", {})]:
        raise ConfigError(f"{override}: {path} sets model.{wrong[0]}, which ngsgd tune never writes and which decides what code is "
                          "run; take it out of the file, and give it on the command line.")
    return [f"{section}.{key}={_shown(value)}" for section, part in content.items() for key, value in part.items()]


def _shown(value: Any) -> str:
    """As Hydra reads it back."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_shown, value)) + "]"
    return repr(value) if isinstance(value, float) else str(value)
