"""Recipes without Hydra: a configuration from conf/recipe/NAME.yaml and the caller's own settings."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ngsgd.config import ClusterConfig, RunConfig, TrackingConfig, check, unused
from ngsgd.errors import ConfigError

_Section = TypeVar("_Section")


def recipe(name: str, **settings: Any) -> RunConfig:
    """The configuration of a recipe with settings on top, as `ngsgd train recipe=NAME` composes it.

    Workers are processes of this machine (cluster.kind=local), and nothing is tracked.

    Args:
        name: a file of conf/recipe, such as "yesno".
        **settings: values of the configuration; those of a section as a mapping.

    Raises:
        ConfigError: everything wrong with the settings, at once.

    Example:
        recipe("yesno", data={"source": "waves_yesno.tar.gz"}, seed=1)
    """
    import yaml

    folder = Path(__file__).resolve().parents[1] / "conf" / "recipe"
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{name} is not a recipe; choose one of {', '.join(known)}.")
    config = replace(RunConfig(), cluster=ClusterConfig(kind="local"), tracking=TrackingConfig(kind="none"))
    written = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    config = _with_jobs(_changed(_changed(config, _resolved(written, settings), ""), settings, ""), settings)
    given = {f"{section}.{key}" for section, values in settings.items() if isinstance(values, Mapping) for key in values}
    problems = [setting.sentence for setting in unused(config) if setting.path in given] + list(check(config))
    if problems:
        raise ConfigError(problems)
    return config


def _changed(section: _Section, values: Mapping[str, Any], prefix: str) -> _Section:
    """The section with these values instead of its own."""
    hints = typing.get_type_hints(type(section))
    known = {spec.name for spec in fields(section)}  # type: ignore[arg-type]
    unknown = [f"{prefix}{name} is not a setting." for name in values if name not in known]
    if unknown:
        raise ConfigError(unknown)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        old = getattr(section, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name} is {value!r}; it must be a mapping of settings.")
            changes[name] = _changed(old, value, f"{prefix}{name}.")
        else:
            changes[name] = _converted(f"{prefix}{name}", value, hints[name])
    return replace(section, **changes)  # type: ignore[type-var]


def _converted(path: str, value: Any, kind: Any) -> Any:
    """The value with the type of its setting: YAML has neither tuples nor paths, and writes 1 for 1.0."""
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        of = typing.get_args(kind)[0]
        return tuple(_converted(path, item, of) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if isinstance(kind, type) and type(value) is not kind:
        raise ConfigError(f"{path} is {value!r}; it must be of type {kind.__name__}.")
    return value


def _resolved(written: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with its references to data.source resolved."""
    source = str(settings.get("data", {}).get("source", ""))
    for section in written.values():
        for name, value in section.items():
            if isinstance(value, str):
                section[name] = value.replace("${data.source}", source)
    return written


def _with_jobs(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """One job per worker, unless the caller sets the number of jobs."""
    given, schedule, num_workers = settings.get("schedule", {}), config.schedule, config.cluster.num_workers
    return replace(config, schedule=replace(
        schedule,
        num_jobs_initial=schedule.num_jobs_initial if "num_jobs_initial" in given else num_workers,
        num_jobs_final=schedule.num_jobs_final if "num_jobs_final" in given else num_workers))
